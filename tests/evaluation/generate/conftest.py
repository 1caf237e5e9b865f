"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A process group that `prepare` made for one process ends with the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
