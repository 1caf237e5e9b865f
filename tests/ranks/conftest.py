"""Real NCCL ranks that share the GPUs of this machine. Run with `-m ranks` where there is a GPU; see base/gpu_sharing.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ithaca.base.processes.pool import Workers

from ..conftest import PRELOAD


@pytest.fixture(scope="session")
def ranks() -> Iterator[Workers]:
    """Up to eight. Processes start at the first run and are reused."""
    with Workers(8, device="cuda", timeout=280.0, preload=PRELOAD, share_gpu=True) as pool:
        yield pool
