"""Attempts of a run on one machine, with real processes. The ranks here are a loop without torch, so that each case takes a second
or two: they walk through steps, wait for each other, save what they have done, and break as told. As in a real run they are forks
of a template. test_runs.py has real runs, launch/test_local.py ranks that are started one by one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

LAUNCH = """
import json, sys
from ithaca.config.schema import Launch, Timeouts
from ithaca.launch.supervise import supervise
from ithaca.launch.template import Template
from ithaca.train.folder import RunFolder
options = json.loads(sys.argv[1])
launch = Launch(restarts=options["restarts"], timeouts=Timeouts(**options["timeouts"]))
command = [sys.executable, *sys.argv[2:]]
code = supervise(command, RunFolder("run"), launch, options["workers"], Template(command))
assert "torch" not in sys.modules  # the launcher stays small
sys.exit(code)
"""

RANK = '''
import os, sys, time
from pathlib import Path
if "ITHACA_TEMPLATE" in os.environ:
    from ithaca.launch.template import serve
    serve(["ithaca.faults", "ithaca.launch.pulse", "ithaca.train.folder"])
slow = Path("slow_start")
while slow.exists(): time.sleep(0.02)  # what comes before the first sign of life takes seconds in a real run
from ithaca import faults
from ithaca.config.schema import Timeouts
from ithaca.launch import pulse, stop
from ithaca.launch.process import tie_to_launcher
from ithaca.train.folder import RunFolder

rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "ITHACA_ATTEMPT"))
folder, done = RunFolder("run"), Path("run/done")
# a frame of a collective, as far as its file name goes; like one it calls nothing that is written in Python
barrier = {"listdir": os.listdir, "sleep": time.sleep}
exec(compile("""
def wait(folder, prefix, world):
    while sum(name.startswith(prefix) for name in listdir(folder)) < world:
        sleep(0.01)
""", "/x/torch/distributed/fake.py", "exec"), barrier)

def meet(step):
    here = f"met-{attempt}-{step}."
    Path(f"run/{here}{rank}").touch()
    barrier["wait"]("run", here, world)

def note(state, **about):
    if rank == 0:
        folder.write_status(state, step=step, steps=6, attempts=attempt, **about)

tie_to_launcher(os.environ)
code = 0
try:
    with stop.listen() as asked:
        pulse.begin(Timeouts(step=1.5))
        faults.arm(faults.parse_all(sys.argv[1:], os.environ), rank, folder.path)
        step = int(done.read_text()) if done.exists() else 0
        print("ready", flush=True)
        if Path("wait_for_signal").exists():
            while True: time.sleep(0.01)
        meet("start")
        asked.early = False
        while step < 6 and code == 0:
            step += 1
            faults.at(step)
            pulse.section("step", step)
            note("running")
            faults.reach("fwd")
            meet(step)
            time.sleep(0.02)
            if rank == 0: done.write_text(str(step))
            if asked.name: code = 75
        note("stopped" if code else "finished", exit_code=code)
except stop.StoppedEarly:
    os._exit(75)
os._exit(code)
'''


class Launcher:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Any = None

    def start(self, *faults: str, restarts: int = 3, workers: int = 3, **timeouts: float) -> subprocess.Popen[str]:
        options = json.dumps({"restarts": restarts, "workers": workers, "timeouts": {"setup": 30.0, **timeouts}})
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, options, "-c", RANK, *faults], cwd=self.folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "ITHACA_ALLOW_FAULTS": "1"},
        )  # fmt: skip
        return self.process

    def finish(self) -> tuple[int, list[str]]:
        """-> exit code, lines of the error output"""
        assert self.process is not None
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, [
            line.removeprefix("ithaca: ") for line in err.splitlines() if not line.startswith("fault: ")
        ]

    def run(self, *faults: str, **options: Any) -> tuple[int, list[str]]:
        self.start(*faults, **options)
        return self.finish()

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "run/status.json").read_text())

    def ranks(self, count: int = 3) -> list[psutil.Process]:
        assert self.process is not None
        wait_until(lambda: self.process.poll() is not None or len(ranks_of(self.process.pid)) == count)
        assert self.process.poll() is None, self.process.stderr.read()
        return ranks_of(self.process.pid)

    def ready(self, count: int = 3) -> None:
        for rank in range(count):
            log = self.folder / f"run/logs/rank-{rank}.log"
            wait_until(lambda log=log: log.exists() and "ready" in log.read_text())


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher that does not outlive its test, and has left no rank behind."""
    made = Launcher(tmp_path)
    yield made
    if made.process is not None:
        left = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
        made.process.kill()
        made.process.communicate()
        for each in left:
            each.kill()
    ours = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]
    assert not ours, "processes are left behind"


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Its children but the template."""
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if child.name().startswith("ithaca rank") else []
    return found


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# Lost ranks (F1, F23)


def test_a_lost_rank_is_named_and_the_run_goes_on(launcher: Launcher):
    code, said = launcher.run("kill@1:3", "segv@2:5")
    assert code == 0 and launcher.status["state"] == "finished" and launcher.status["attempts"] == 3
    assert said[0].startswith("rank 1 (pid ") and "was killed by SIGKILL at step 3 (by the system" in said[0]
    assert said[1:4] == ['  last line of its log: "fault: kill@1:3"', "  log: run/logs/rank-1.log", said[3]]
    assert said[3] == "  restarting from step 0 (attempt 1 of 3)"
    assert "was killed by SIGSEGV at step 5" in said[4] and said[-1] == "  restarting from step 0 (attempt 2 of 3)"


def test_a_crash_loop_ends(launcher: Launcher):
    code, said = launcher.run("kill@1:3!", restarts=9, workers=2)
    assert code == 8 and said[-1] == "3 restarts, no progress past step 3. Not retrying."
    status = launcher.status
    assert status["state"] == "failed" and status["exit_code"] == 8 and status["attempts"] == 4 and status["step"] == 3
    assert "was killed by SIGKILL at step 3" in status["cause"] and status["resume"] == "ithaca train run/config.yaml"
    code, said = launcher.run("kill@0:4", "kill@1:5", restarts=1, workers=2)
    assert code == 8 and said[-1] == "launch.restarts=1 are used up; the same command goes on"
    assert launcher.run(workers=2)[0] == 0 and launcher.status["state"] == "finished"


@pytest.mark.parametrize("code", [3, 6])
def test_what_would_fail_again_is_not_tried_again(launcher: Launcher, code: int):
    found, said = launcher.run(f"exit={code}@1:2")
    assert found == code and said[0].endswith(f"ended with exit code {code} at step 2") and len(said) == 3
    assert launcher.status["exit_code"] == code and launcher.status["attempts"] == 1


def test_all_ranks_are_gone_within_five_seconds(launcher: Launcher):
    """Two wait in a collective for the one that was killed, and do not end by SIGTERM."""
    launcher.start("hang@1:3", restarts=0, step=60.0)
    ranks = launcher.ranks()
    launcher.ready()
    time.sleep(0.5)
    ranks[1].kill()
    begin = time.monotonic()
    code, _ = launcher.finish()
    assert code == 8 and time.monotonic() - begin < 5 and not any(each.is_running() for each in ranks)


# Hangs (F20)


@pytest.mark.parametrize(
    ("fault", "words", "stack"),
    [
        ("hang@1:3", r"made no progress for \d+ s in step 3, at ithaca/faults\.py:", "faults.py"),
        ("gil@1:3", "in step 3", "_hold_lock"),
        (
            "stop@1:3",
            r"is stopped \(SIGSTOP\?\) in step 3, for \d+ s",
            "most recent call first",
        ),  # it may go a line further
    ],
)
def test_a_rank_that_hangs_is_named_and_its_stack_written_down(launcher: Launcher, fault: str, words: str, stack: str):
    code, said = launcher.run(fault, restarts=0)
    assert code == 7 and said[0].startswith("rank 1 (pid ") and re.search(words, said[0]), said
    assert said[1] == "  stacks of all ranks: run/stacks"
    assert stack in (launcher.folder / "run/stacks/rank-1.txt").read_text()
    assert "fake.py" in (launcher.folder / "run/stacks/rank-0.txt").read_text()
    assert launcher.status["state"] == "failed" and launcher.status["exit_code"] == 7


def test_a_rank_that_holds_the_lock_for_long_is_told_from_those_that_wait_for_it(launcher: Launcher):
    code, said = launcher.run("gil@2:1", restarts=0, silence=4.0)
    assert code == 7 and said[0].startswith("rank 2 (pid ") and "in step 1" in said[0]


def test_a_hang_is_tried_again(launcher: Launcher):
    code, said = launcher.run("hang@1:3", restarts=1)
    assert code == 0 and said[-1] == "  restarting from step 0 (attempt 1 of 1)"


# Signals before the first step (F11)


@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
@pytest.mark.parametrize("moment", ["imports", "setup"])
def test_a_signal_before_the_first_step_leaves_at_once(launcher: Launcher, target: str, moment: str):
    (launcher.folder / ("slow_start" if moment == "imports" else "wait_for_signal")).touch()
    process = launcher.start()
    ranks = launcher.ranks()
    if moment == "setup":
        launcher.ready()
    else:
        time.sleep(0.3)
    if target == "launcher":
        process.send_signal(signal.SIGTERM)
    elif target == "rank":
        ranks[1].send_signal(signal.SIGUSR1)
    else:
        for each in (psutil.Process(process.pid), *ranks):
            with suppress(psutil.NoSuchProcess):  # the launcher has passed it on, and the rank has gone
                each.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    (launcher.folder / "slow_start").unlink(missing_ok=True)
    (launcher.folder / "wait_for_signal").unlink(missing_ok=True) if moment == "imports" else None
    code, said = launcher.finish()
    assert code == 75, said
    assert launcher.status["state"] == "stopped" and launcher.status["exit_code"] == 75


def test_no_restart_once_somebody_has_asked_to_stop(launcher: Launcher):
    (launcher.folder / "slow_start").touch()
    process = launcher.start("kill@1:1")
    launcher.ranks()
    process.send_signal(signal.SIGHUP)
    ranks = launcher.ranks()
    ranks[1].kill()
    (launcher.folder / "slow_start").unlink()
    code, said = launcher.finish()
    assert code == 8 and not any("restarting" in line for line in said)


def test_two_runs_in_one_folder(launcher: Launcher):
    """F29. The folder is held by the launcher, whose pid is the one to look for, and by its ranks as long as one lives."""
    (launcher.folder / "slow_start").touch()
    process = launcher.start()
    launcher.ranks()
    other = Launcher(launcher.folder)
    code, said = other.run()
    assert code == 1 and f"is in use by pid {process.pid} on " in said[-1]
    (launcher.folder / "slow_start").unlink()
    assert launcher.finish()[0] == 0
