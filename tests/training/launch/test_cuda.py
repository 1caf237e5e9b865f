"""Joining on a GPU: NCCL and gloo side by side, and two ranks that were given the same GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import LAUNCH, ROOT

pytestmark = pytest.mark.gpu


def test_torchrun_on_one_gpu(run_yaml: Callable[..., Path]):
    path = run_yaml("{}", "auto")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29533"]
    command = [*torchrun, "-m", "ithaca.training.launch", "tests.training.launch.functions:add_up_on_gpu", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cuda:0 sum 1, cpu sum 1" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs a machine with exactly one GPU")
def test_two_tasks_with_one_gpu_are_named(run_yaml: Callable[..., Path]):
    path = run_yaml("{workers: 2, nodes: 2}", "{ulysses: 2, ring: 2}")
    stub = [sys.executable, str(Path(__file__).with_name("stub_srun.py")), "--distribution=block"]
    done = subprocess.run(
        [*stub, *LAUNCH, "tests.training.launch.functions:add_up_on_gpu", str(path)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "SLURM_JOB_ID": "4713"},
    )  # fmt: skip
    assert done.returncode == 2 and "ranks 0 and 1 on " in done.stderr and "have the same GPU" in done.stderr
