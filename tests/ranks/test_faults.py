"""A bad day on NCCL: a rank is lost inside a collective, freezes, runs out of memory or never comes.

The cause is named, nobody stays behind, no GPU memory either, and the run that goes on ends with the weights of one that nothing
happened to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

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


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # since torch 2.13
CASES = {
    "killed in an all-to-all": ("ulysses", "all_to_all_single:1:40:kill", r"rank 1 .*was killed by SIGKILL", 0),
    "killed in a gather": ("ulysses", f"{GATHER}:1:15:kill", r"rank 1 .*was killed by SIGKILL", 0),
    "killed in a ring step": ("ring", "batch_isend_irecv:1:20:kill", r"rank 1 .*was killed by SIGKILL", 0),
    "stopped": ("ulysses", "all_to_all_single:1:40:stop", r"rank 1 .*stopped", 0),
    # it stands where its peer waits: which of them it is that does not come, nobody can tell
    "never comes": ("ulysses", "all_to_all_single:1:40:never", r"made no progress for 25 s in step", 0),
    "out of memory": ("ulysses", "all_to_all_single:1:40:memory", r"rank 1 .*out of (GPU )?memory", 5),
}
NOTHING = "all_reduce:9:1:none"


@dataclass
class Trained:
    folder: Path
    process: subprocess.Popen[str]
    said: str = ""

    @classmethod
    def start(cls, folder: Path, layout: str, trouble: str) -> Trained:
        settings = [
            "launch.cpu=null", "launch.workers=2", "launch.share_gpu=true", "model.dtype=bf16", "data.context=256", "train.rows=4",
            f"train.steps={STEPS}", "train.schedule=constant", "train.warmup=1", "log.every=1", "checkpoint.every=1",
            "launch.timeouts.step=25", *LAYOUTS[layout], f"run.folder={folder / 'run'}",
        ]  # fmt: skip
        words = [word for setting in settings for word in ("--" + setting.partition("=")[0], setting.partition("=")[2])]
        environ = {**os.environ, "ITHACA_TRY": trouble, "ITHACA_TRY_ONCE": str(folder / "once"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, "train", "--recipe", "tiny_cpu", *words]
        out = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return cls(folder, subprocess.Popen(command, text=True, env=environ, **out))  # pyright: ignore

    def end(self) -> None:
        try:
            self.said = self.process.communicate(timeout=240)[0]
        finally:
            self.process.kill()

    @property
    def weights(self) -> dict[str, str]:
        return hashes_of(self.folder / "run" / "checkpoints" / f"step-{STEPS}")

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "run" / "status.json").read_text())


def used() -> int:
    """GPU memory in use by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """All at once, for most of each is its start. Two of each layout are undisturbed, to see whether repeats are equal."""
    before = used()
    wanted = {f"{layout} {number}": (layout, NOTHING) for layout in LAYOUTS for number in (1, 2)}
    wanted |= {name: (layout, trouble) for name, (layout, trouble, _, _) in CASES.items()}
    started = {name: Trained.start(tmp_path_factory.mktemp("run"), *what) for name, what in wanted.items()}
    for run in started.values():
        run.end()
    yield started
    # nobody stays behind, and no memory of the GPU
    assert not [
        process for process in psutil.process_iter(["environ"]) if "ITHACA_TRY" in (process.info["environ"] or {})
    ]
    wait_until(
        lambda: used() <= before + (64 << 20), lambda: f"{used() - before:,} bytes of GPU memory are still taken"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undisturbed(runs: dict[str, Trained], layout: str):
    for number in (1, 2):
        run = runs[f"{layout} {number}"]
        assert run.process.returncode == 0 and run.status["state"] == "finished", run.said


@pytest.mark.parametrize("name", CASES)
def test_bad_day(runs: dict[str, Trained], name: str):
    layout, _, cause, code = CASES[name]
    run = runs[name]
    assert (run.folder / "once").exists(), f"the fault never came:\n{run.said}"
    assert run.process.returncode == code, run.said
    assert re.search(cause, run.said), run.said
    if code:
        assert run.status["state"] == "failed"
        return
    assert "restarting from step" in run.said and run.status["state"] == "finished", run.said
    first, second = runs[f"{layout} 1"], runs[f"{layout} 2"]
    if first.weights == second.weights:
        assert run.weights == first.weights
