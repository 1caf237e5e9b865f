"""A bad day on NCCL: a rank is lost inside a collective, freezes, runs out of memory or never comes.

The cause is named, nobody stays behind, no GPU memory either, and the run that goes on ends with the weights of one that nothing
happened to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from ..training.test_train import hashes_of
from ..waiting import wait_until

pytestmark = pytest.mark.ranks

STEPS = 6
# Ends one rank, in its own way, inside one of its collectives: before the call is queued, so that its peers wait for it in theirs.
PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from pathlib import Path
from ithaca.cli.main import main

name, rank, number, kind = os.environ["ITHACA_TRY"].split(":")
calls, once = 0, Path(os.environ["ITHACA_TRY_ONCE"])
own = getattr(dist, name)

def broken(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(number) and os.environ.get("RANK") == rank and not once.exists():  # forks get their rank later
        once.touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "never":
            time.sleep(1e6)
        if kind == "memory":
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    return own(*args, **kwargs)

setattr(dist, name, broken)
sys.exit(main(sys.argv[1:]))
"""
LAYOUTS = {
    "ulysses": ["stack.ulysses=2", "stack.ring=1"],
    "ring": ["stack.ulysses=1", "stack.ring=2"],
}


@dataclass
class End:
    code: int
    said: str
    folder: Path

    @property
    def weights(self) -> dict[str, str]:
        return hashes_of(self.folder / "checkpoints" / f"step-{STEPS}")

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())


def used() -> int:
    """GPU memory in use by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def train(folder: Path, layout: str, trouble: str = "all_reduce:9:1:none", *more: str) -> End:
    settings = [
        "launch.cpu=null", "launch.workers=2", "launch.share_gpu=true", "model.dtype=bf16", "data.context=256", "train.rows=4",
        f"train.steps={STEPS}", "train.schedule=constant", "train.warmup=1", "log.every=1", "checkpoint.every=1",
        "launch.timeouts.step=25", *LAYOUTS[layout], *more, f"run.folder={folder / 'run'}",
    ]  # fmt: skip
    words = [word for setting in settings for word in ("--" + setting.partition("=")[0], setting.partition("=")[2])]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", "--recipe", "tiny_cpu", *words], text=True, timeout=250,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "ITHACA_TRY": trouble, "ITHACA_TRY_ONCE": str(folder / "once"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return End(done.returncode, done.stdout, folder / "run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[End]]:
    """Two of each, to see whether repeats are equal bit for bit."""
    return {name: [train(tmp_path_factory.mktemp(name), name) for _ in range(2)] for name in LAYOUTS}


CASES = {
    "killed in an all-to-all": ("ulysses", "all_to_all_single:1:40:kill", "rank 1 .*was killed by SIGKILL", 0),
    "killed in a gather": ("ulysses", "all_gather_into_tensor:1:15:kill", "rank 1 .*was killed by SIGKILL", 0),
    "killed in a ring step": ("ring", "batch_isend_irecv:1:20:kill", "rank 1 .*was killed by SIGKILL", 0),
    "stopped": ("ulysses", "all_to_all_single:1:40:stop", "rank 1 .*stopped", 0),
    "never comes": ("ulysses", "all_to_all_single:1:40:never", "rank 1 .*hangs", 0),
    "out of memory": ("ulysses", "all_to_all_single:1:40:memory", "rank 1 .*out of (GPU )?memory", 5),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_day(undisturbed: dict[str, list[End]], tmp_path: Path, name: str):
    layout, trouble, cause, code = CASES[name]
    before = used()
    end = train(tmp_path, layout, trouble)
    assert (tmp_path / "once").exists(), f"the fault never came:\n{end.said}"
    assert end.code == code, end.said
    assert re.search(cause, end.said), end.said
    assert not [process for process in psutil.process_iter(["environ"]) if trouble in str(process.info["environ"])]
    wait_until(
        lambda: used() <= before + (64 << 20), lambda: f"{used() - before:,} bytes of GPU memory are still taken"
    )
    if code:
        assert end.status["state"] == "failed"
        return
    assert "restarting from step" in end.said and end.status["state"] == "finished", end.said
    first, second = undisturbed[layout]
    if first.weights == second.weights:
        assert end.weights == first.weights
