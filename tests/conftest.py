"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ithaca.base.gpu_sharing import why_not_shared
from ithaca.base.processes.pool import Workers
from ithaca.engine.model.families import FAMILIES

from . import multiply_in_float32

multiply_in_float32()

# What the ranks of most tests import, so that the server they are forked from does it once.
PRELOAD = ["pytest", "peft", "ithaca.training.phases", "ithaca.verify.case"]
PRELOAD += ["transformers.models.{0}.modeling_{0}".format(kind.removesuffix("_text")) for kind in FAMILIES]

# Files that take long. They go first: one that is begun last keeps one process busy while the other has nothing to do. Those that
# mostly wait are beside those whose ranks can use both cores.
LONGEST = (
    "faults/test_runs.py",
    "parity/test_families.py",
    "training/launch/test_two_hosts.py",
    "parity/test_matrix.py",
    "faults/test_supervisor.py",
    "training/test_criterion.py",
    "training/launch/test_local.py",
    "training/test_train.py",
    "base/test_workers.py",
    "faults/test_signals.py",
    "planner/test_search.py",
    "storage/test_resume.py",
    "training/launch/test_template.py",
    "integrations/test_trainers.py",
    "planner/test_settings.py",
)


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
    with Workers(8, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small tmpfs with the options given."""
    places: list[Path] = []

    def make(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield make
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected lasts: from here on garbage is looked for in the rest only


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    ranks = [item for item in items if item.get_closest_marker("ranks")]
    if ranks and (why := why_not_shared()) is not None:
        for item in ranks:
            item.add_marker(pytest.mark.skip(reason=f"real ranks that share a GPU: {why}"))
