"""A config that the tests start runs with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LAUNCH = [sys.executable, "-m", "ithaca.training.launch"]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Write a config: launch and stack as given, results below tmp_path."""

    def write(launch: str, stack: str = "{ulysses: 2}") -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(
            f"model: {{folder: tiny_llama, random_init: true, dtype: fp32}}\n"
            f"data: {{context: 2K, sources: [{{synthetic: recall}}]}}\n"
            f"train: {{steps: 2, rows: 4}}\n"
            f"stack: {stack}\nlaunch: {launch}\nrun: {{folder: {tmp_path / 'run'}}}\n"
        )
        return path

    return write


@pytest.fixture(autouse=True)
def no_job_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may themselves run under Slurm or torchrun."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "ITHACA_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
