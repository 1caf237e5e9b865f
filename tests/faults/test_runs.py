"""One run and its bad day: killed at chosen points and at random moments, stopped, its launcher killed, and nothing lost.

A run is started once and then suffers, in this order: faults that were asked for, kills of random ranks at random moments, Ctrl-C
to the launcher alone, kill -9 of the launcher, SIGTERM to everybody. After each kill the newest checkpoint must verify. At the end
its weights must be, bit for bit, those of a run that nothing happened to.

In the suite: 2 ranks, a kill and an error that were asked for, no Ctrl-C. `make faults` (ITHACA_FAULTS=long): 4 ranks, every
point, ranks that freeze, 50 kills, and the time from a kill to the next step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from ithaca.base.processes.pool import Workers
from ithaca.observe.metrics import read_metrics
from ithaca.storage.check import verify
from ithaca.storage.files import latest, published

from ..waiting import wait_until
from .test_signals import run_once, weights
from .test_supervisor import pending, ranks_of, states

LONG = os.environ.get("ITHACA_FAULTS") == "long"
WORLD = 4 if LONG else 2
KILLS = 50 if LONG else 0
LAYOUT = ["stack.ulysses=2", f"stack.ring={WORLD // 2}", f"launch.cpu={WORLD}"]
SETTINGS = [*LAYOUT, "checkpoint.every=1", "checkpoint.keep_last=3"]
FAULTS = ["kill@1:2:fwd", "raise@0:3:bwd"]
if LONG:
    FAULTS += [
        "kill@0:4:optim",
        "segv@2:5:fwd",
        "kill@1:6:data",
        "kill@3:7:save.after_shard",
        "kill@0:8:save.before_rename",
    ]
    FAULTS += ["stop@2:9:bwd", "gil@1:10:fwd", "exit@3:11:optim"]
    SETTINGS += ["launch.timeouts.step=20"]  # for those that freeze
# four attempts, one after the other: most of a minute on two slow cores, twice that beside others
pytestmark = pytest.mark.timeout(3600 if LONG else 900)
# Python that the kernel kills with the test: one that is killed itself would leave a run behind that restarts a thousand times
TIED = [
    sys.executable, "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
]  # fmt: skip


@dataclass
class Story:
    """A run folder, the launchers that worked in it, and what was seen."""

    folder: Path
    said: Path
    process: Any = None
    damaged: list[str] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    stopped: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        short = ["data.context=64", "train.warmup=1", "train.schedule=constant", "train.rows=4", "log.every=1"]
        settings = [*short, *SETTINGS, "train.steps=100000", "launch.restarts=1000", f"run.folder={self.folder}"]
        words = [word for each in settings for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
        injected = [word for fault in FAULTS for word in ("--fault", fault)]
        with open(self.said, "a") as said:
            self.process = subprocess.Popen(
                [*TIED, "-m", "ithaca", "train", "--recipe", "tiny_cpu", *words, *injected], stdout=said, stderr=said,
                env={**os.environ, "ITHACA_ALLOW_FAULTS": "1", "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    @property
    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.process.pid)

    @property
    def text(self) -> str:
        return self.said.read_text()

    @property
    def step(self) -> int:
        """The last one written down."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()  # whole ones
        except FileNotFoundError:
            return 0
        return next((found["step"] for line in reversed(lines) if "step" in (found := json.loads(line))), 0)

    def spent(self) -> list[str]:
        """Faults that have fired."""
        return sorted(path.name for path in (self.folder / "faults").glob("*"))

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def wait(self, condition: Callable[[], Any]) -> None:
        def trouble() -> str:
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{self.text[-3000:]}"
            return f":\n{self.text[-3000:]}"

        wait_until(condition, trouble)

    def wait_for_faults(self) -> None:
        """Until all have fired, and the attempt that the last one ended is over: its cause is told."""
        for count in range(len(FAULTS)):
            self.wait(lambda count=count: len(self.spent()) > count)
        self.wait(lambda: any(FAULTS[-1] in line and not line.startswith("fault: ") for line in self.text.splitlines()))

    def wait_for_training(self) -> None:
        """Until an attempt has passed the newest checkpoint: a step that was not there before."""
        self.wait(lambda: self.status().get("state") in ("running", "saving"))
        since = self.step
        self.wait(lambda: self.step > since)

    def check(self) -> None:
        """What is published now must be whole, whatever is being killed."""
        newest = latest(self.folder / "checkpoints")
        if newest is not None:
            found = verify(newest)
            self.damaged += found if newest.is_dir() else []  # else a slow look: it was removed after three newer ones

    def kill_one(self, choose: random.Random) -> None:
        restarts = self.text.count("restarting from")
        time.sleep(choose.uniform(0.0, 1.0))  # any moment will do: nothing is expected to have happened
        choose.choice(self.ranks).kill()
        killed = time.monotonic()
        self.wait(lambda: self.text.count("restarting from") > restarts)
        self.check()
        self.wait_for_training()
        self.recovery.append(time.monotonic() - killed)

    def end(self) -> None:
        self.codes.append(self.process.wait())


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    base = tmp_path_factory.mktemp("story")
    mine = Story(base / "run", base / "said.txt")
    try:
        mine.start()
        mine.wait_for_faults()
        mine.check()
        mine.wait_for_training()
        choose = random.Random(0)
        for _ in range(KILLS):
            mine.kill_one(choose)
        if LONG:
            mine.process.send_signal(signal.SIGINT)
            mine.end()
            mine.stopped = mine.status()
            mine.start()
            mine.wait_for_training()
        # ranks, and the template they were forked from
        family = psutil.Process(mine.process.pid).children(recursive=True)
        mine.process.kill()
        mine.end()
        wait_until(lambda: not any(each.is_running() for each in family), lambda: "they survive the launcher")
        mine.check()

        mine.start()
        mine.wait_for_training()
        # a terminal or a scheduler signals everybody; the ranks stand still until they have both that and the launcher's
        ranks = mine.ranks
        for each in ranks:
            each.suspend()
        mine.wait(lambda: all(states(each) == {"T"} for each in ranks))
        mine.process.send_signal(signal.SIGTERM)
        for each in ranks:
            each.send_signal(signal.SIGINT)
        mine.wait(lambda: all(pending(each, number) for each in ranks for number in (signal.SIGINT, signal.SIGTERM)))
        for each in ranks:
            each.resume()
        mine.end()
        yield mine
    finally:
        if mine.process is not None and mine.process.poll() is None:
            mine.process.kill()  # ranks go with it
            mine.process.wait()


def test_the_newest_checkpoint_verifies_after_every_kill(story: Story):
    """F1, F3, F4: at most the steps since the last published checkpoint are lost, and nobody has to clean up."""
    assert story.damaged == [] and len(story.recovery) == KILLS
    if LONG:
        took = sorted(story.recovery)
        print(f"\nfrom kill to the next new step: median {took[KILLS // 2]:.1f} s, longest {took[-1]:.1f} s of {KILLS}")
    assert all(verify(path) == [] for path in published(story.folder / "checkpoints"))


def test_the_cause_comes_first_and_is_said_once(story: Story):
    """F1, F22: the rank, what happened, the step; where the rest is; from where it goes on."""
    lines = [line for line in story.text.splitlines() if not line.startswith("fault: ")]
    causes = [line for line in lines if line.startswith("ithaca: rank ")]
    assert len(causes) == story.text.count("restarting from") > KILLS  # a fault may meet another in one attempt
    assert "Traceback" not in story.text and "gloo" not in story.text
    assert "rank 1 (pid " in causes[0] and "was killed by SIGKILL at step 2 (by the system" in causes[0]
    assert "rank 0 (pid " in causes[1] and "at step 3: FaultRaised: fault raise@0:3:bwd" in causes[1]
    assert "FaultRaised" in (story.folder / "logs/rank-0.log").read_text()
    at = lines.index(causes[0])
    assert lines[at + 3].startswith("  restarting from step ") and lines[at + 3].endswith(" (attempt 1 of 1000)")


@pytest.mark.skipif(
    not LONG, reason="a start more: make faults; the signals to everybody below come to the launcher too"
)
def test_a_signal_to_the_launcher_alone(story: Story):
    """F11: it tells its ranks."""
    assert story.codes[0] == 75 and story.stopped["state"] == "stopped" and story.stopped["cause"] == "SIGINT"
    assert story.stopped["checkpoint"] == f"checkpoints/step-{story.stopped['step']}"
    assert story.stopped["attempts"] == 1 + story.text.count("restarting from") and story.stopped["exit_code"] == 75
    assert f"SIGINT: {WORLD} workers save and stop; once more stops them at once" in story.text


def test_nobody_survives_the_launcher_and_the_next_start_says_so(story: Story):
    """F2."""
    assert story.codes[-2] == -signal.SIGKILL
    assert story.text.count("Previous run ended without a clean stop.") == 1


def test_signals_to_everybody_publish_one_step_and_count_once(story: Story):
    """F11: a rank gets the one that was sent to it, and what the launcher passes on."""
    assert story.codes[-1] == 75 and "stopped at once" not in story.text
    stopped = story.status()
    assert stopped["cause"] in ("SIGINT", "SIGTERM")  # whichever the rank has looked at first
    assert stopped["state"] == "stopped" and stopped["checkpoint"] == f"checkpoints/step-{stopped['step']}"
    assert stopped["attempts"] == 1 and stopped["exit_code"] == 75  # of this start
    assert f"SIGTERM: {WORLD} workers save and stop; once more stops them at once" in story.text


def test_the_weights_are_those_of_a_run_without_faults(story: Story, workers: Workers, tmp_path: Path):
    """F1, F5: bit for bit, though every step was saved under a name that an interrupted save had used before."""
    end = story.status()["step"]
    lines = [line for line in read_metrics(story.folder / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, end + 1)), "no step is missing"
    settings = [*LAYOUT, f"train.steps={end}", "checkpoint.every=null"]
    assert workers.run(run_once, str(tmp_path), settings, [], world=WORLD) == [(0, "")] * WORLD
    clean = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["loss"] for line in lines] == clean
    assert weights(story.folder, end) == weights(tmp_path, end)


def test_nothing_is_left_behind(story: Story):
    """No process, no lock, no hidden folder, no file of an unknown name, no shared memory of ours."""
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(story.folder) in (each.info["cmdline"] or [])]
    assert (story.folder / "lock").read_bytes() == b""
    assert not list((story.folder / "checkpoints").glob(".*"))
    known = {
        "config.yaml",
        "about.json",
        "metrics.jsonl",
        "status.json",
        "lock",
        "checkpoints",
        "logs",
        "faults",
        "stacks",
    }
    assert {path.name for path in story.folder.iterdir()} <= known
    assert not [path for path in Path("/dev/shm").iterdir() if "ithaca" in path.name]


ALONE = """
import sys, threading, time
from types import SimpleNamespace
from ithaca.base import faults
from ithaca.cli.main import main
from ithaca.training.launch import heartbeat, peers

hang, looks = faults._ACTS["hang"].__code__, []

def now():
    if sys._current_frames()[threading.main_thread().ident].f_code is hang:
        looks.append("it hangs")
    return 86400.0 if len(looks) > 1 else 0.0

heartbeat.PERIOD, heartbeat.time = 0.05, SimpleNamespace(monotonic=now)
peers.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)  # nobody is there to read a verdict
sys.exit(main(sys.argv[1:]))
"""
"""A run with a clock that stands still as long as it does something, and is a day ahead from the second look at its hang on. At the
first it may be on its way into it: a sign of life is the line of code, then the time."""


@pytest.mark.skipif(not LONG, reason="a run of its own, 20 s: make faults")
def test_a_run_of_one_process_notices_that_it_hangs(tmp_path: Path):
    """F20: nobody else is there to."""
    settings = ["data.context=64", "train.steps=3", "train.warmup=1", "launch.cpu=1", "stack.ulysses=1", "stack.ring=1"]
    settings += [f"run.folder={tmp_path}"]
    words = [word for each in settings for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "train", "--recipe", "tiny_cpu", *words, "--fault", "hang@0:2:bwd"], text=True,
        env={**os.environ, "ITHACA_ALLOW_FAULTS": "1"}, capture_output=True,
    )  # fmt: skip
    status = json.loads((tmp_path / "status.json").read_text())
    assert done.returncode == 7 and (status["state"], status["exit_code"]) == ("failed", 7), done.stderr
    assert status["cause"].startswith("the run made no progress for 86400 s in step 2, at base/faults.py:")
    assert f"ithaca: {status['cause']}\n  stacks: {tmp_path}/stacks" in done.stderr
    assert "faults.py" in (tmp_path / "stacks/rank-0.txt").read_text()
