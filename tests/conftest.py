"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ithaca.workers import Workers


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors on a machine that others share: a second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_group_outlives_its_file() -> Iterator[None]:
    """A process group that `prepare` made in this process: which file comes next here is decided while the tests run."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Up to eight gloo ranks on CPU. Processes start at the first run and are reused by every test of the session."""
    with Workers(8) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
