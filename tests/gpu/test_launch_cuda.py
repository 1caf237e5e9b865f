"""A rank on a GPU that is a fork of the template: CUDA and NCCL begin in it, not before, and again after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# As `ithaca train` does it with several GPUs; with one it would need no worker.
LAUNCH = """
import sys
from ithaca.config.schema import Launch
from ithaca.training.launch.supervise import supervise
from ithaca.base.processes.fork_server import Template
from ithaca.base.run_folder import RunFolder
command = [sys.executable, *sys.argv[2:]]
sys.exit(supervise(command, RunFolder(sys.argv[1]), Launch(restarts=2), 1, Template(command)))
"""


@pytest.mark.parametrize("store", ["host", "gpu"])
def test_a_forked_rank_trains_and_is_restarted(tmp_path: Path, store: str):
    settings = {
        "run.folder": tmp_path / "run", "launch.cpu": "null", "model.dtype": "bf16", "stack.ulysses": 1, "stack.ring": 1,
        "stack.store": store, "train.steps": 4, "log.every": 1, "checkpoint.every": 1,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    command = ["-m", "ithaca", "train", "--recipe", "tiny_cpu", *words, "--fault", "kill@0:3:bwd"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "run"), *command], text=True, capture_output=True, timeout=240,
        env={**os.environ, "ITHACA_ALLOW_FAULTS": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "was killed by SIGKILL at step 3" in said and "restarting from step " in said, said
    assert "one by one" not in (tmp_path / "run/logs/rank-0.log").read_text(), "it was forked"
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 4), status
