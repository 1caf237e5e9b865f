"""Attempts of a run on one machine, with real processes. The ranks here are a loop without torch, so that each case takes a second
or two: they walk through steps, wait for each other, save what they have done, and break as told. As in a real run they are forks
of a template. test_runs.py has real runs, launch/test_local.py ranks that are started one by one.

No limit of time decides here, because a machine may be slow: a rank is late when the test says so, after it has seen the hang.
How limits grow is in test_watching.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ithaca.base import faults
from ithaca.training.launch import local, supervise

from ..waiting import wait_until

LONG = os.environ.get("ITHACA_FAULTS") == "long"  # make faults
LAUNCH = """
import json, math, sys, time
from pathlib import Path
from types import SimpleNamespace
from ithaca.config.schema import Launch, Timeouts
from ithaca.training.launch import hang, local, process, supervise
from ithaca.base.processes.fork_server import Template
from ithaca.base.run_folder import RunFolder

options = json.loads(sys.argv[1])
supervise.GRACE_SECONDS, local.SETTLE_SECONDS = options["grace"], 0.0  # ranks here fail one at a time
local.DUMP_SECONDS = local.STRAGGLING_SECONDS = math.inf  # every rank answers, and comes along
hang.QUIET = math.inf  # where machines are slow, anybody may be quiet for long

if options["silence"] is not None:
    # Time counts the rounds in which all ranks but the last were heard, and begins when the test says so
    listen, heard, now = process.Worker.listen, set(), [0.0]

    def count(worker):
        before = worker.beat
        listen(worker)
        if worker.beat is not before and worker.rank < options["workers"] - 1 and Path("clock_runs").exists():
            heard.add(worker.rank)
        if len(heard) == options["workers"] - 1:
            now[0] += 1
            heard.clear()

    process.Worker.listen = count
    local.time = process.time = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)

launch = Launch(restarts=options["restarts"], timeouts=Timeouts(silence=options["silence"]))
command = [sys.executable, *sys.argv[2:]]
code = supervise.supervise(command, RunFolder("run"), launch, options["workers"], Template(command))
assert "torch" not in sys.modules  # the launcher stays small
sys.exit(code)
"""

RANK = '''
import math, os, sys, time
from dataclasses import asdict
from pathlib import Path
if "ITHACA_TEMPLATE" in os.environ:
    from ithaca.base.processes.fork_server import serve
    serve(["ithaca.base.faults", "ithaca.training.launch.heartbeat", "ithaca.base.run_folder"])
while Path("slow_start").exists(): time.sleep(0.01)  # what comes before the first sign of life takes seconds in a real run
from ithaca.base import faults
from ithaca.config.schema import Timeouts
from ithaca.base.processes import signals as stop
from ithaca.training.launch import heartbeat
from ithaca.base.processes.system import LAUNCHER
from ithaca.base.processes.system import tie_to_launcher
from ithaca.base.run_folder import RunFolder

rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "ITHACA_ATTEMPT"))
folder, done = RunFolder("run"), Path("run/done")
this = f"{os.environ[LAUNCHER]}-{attempt}"  # a run may be started again in its folder
heartbeat.PERIOD = 0.05
stop._AS_ONE = math.inf  # signals that a test sends together are one, however far apart they come
# a frame of a collective, as far as its file name goes; like one it calls nothing that is written in Python
barrier = {"listdir": os.listdir, "sleep": time.sleep}
exec(compile("""
def wait(folder, prefix, world):
    while sum(name.startswith(prefix) for name in listdir(folder)) < world:
        sleep(0.005)
""", "/x/torch/distributed/fake.py", "exec"), barrier)

def meet(step):
    here = f"met-{this}-{step}."
    Path(f"run/{here}{rank}").touch()
    barrier["wait"]("run", here, world)

def note(state, **about):
    """Rank 0 writes it down; the others go on when it has."""
    noted = Path(f"run/noted-{this}-{step}-{state}")
    if rank == 0:
        folder.write_status(state, step=step, steps=6, attempts=attempt, **about)
        noted.touch()
    while not noted.exists(): time.sleep(0.005)

def carry(beat):
    """To the launcher, and for the test to see. Rank 0 alone is ever late: it is heard first, so what the others said before is
    known when it is judged."""
    late = rank == 0 and Path(f"late-{attempt}").exists()
    heartbeat.tell(os.environ, {"beat": {**asdict(beat), "limit": 0.0 if late else None}})
    if beat.where:
        Path(f"stands-{attempt}-{rank}").write_text(f"step {beat.step}: {beat.where}")

tie_to_launcher(os.environ)
code = 0
try:
    with stop.listen() as asked:
        try:
            heartbeat.begin(Timeouts(), carry)
            faults.arm(faults.parse_all(sys.argv[1:], os.environ), rank, folder.path)
            step = int(done.read_text()) if done.exists() else 0
            print("ready", flush=True)
            while Path("no_first_step").exists(): time.sleep(0.01)
            meet("start")
            asked.early = False
            while step < 6 and code == 0:
                step += 1
                faults.at(step)
                heartbeat.section("step", step)
                note("running")
                faults.reach("fwd")
                meet(step)
                if rank == 0:
                    Path("run/doing").write_text(str(step))
                    os.replace("run/doing", done)  # at once: it may be killed here
                if asked.name: code = 75
            note("stopped" if code else "finished", exit_code=code)
        except stop.StoppedEarly:
            code = 75
        os._exit(code)  # while it listens: the signal may come again, from the launcher
except stop.StoppedEarly:  # the signal had come before
    os._exit(75)
'''


class Launcher:
    def __init__(self, folder: Path, said: str = "said") -> None:
        self.folder, self.said = folder, folder / said
        self.process: Any = None

    def start(
        self, *faults: str, restarts: int = 3, workers: int = 3, grace: float = 0.0, silence: float | None = None
    ) -> subprocess.Popen[bytes]:
        options = json.dumps({"restarts": restarts, "workers": workers, "grace": grace, "silence": silence})
        with open(self.said, "w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, options, "-c", RANK, *faults], cwd=self.folder, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=said, env={**os.environ, "ITHACA_ALLOW_FAULTS": "1"},
            )  # fmt: skip
        return self.process

    def finish(self) -> tuple[int, list[str]]:
        """-> exit code, lines of the error output"""
        code, said = self.process.wait(), self.said.read_text().splitlines()
        return code, [line.removeprefix("ithaca: ") for line in said if not line.startswith("fault: ")]

    def run(self, *faults: str, **options: Any) -> tuple[int, list[str]]:
        self.start(*faults, **options)
        return self.finish()

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "run/status.json").read_text())

    def wait(self, condition: Callable[[], Any]) -> None:
        def trouble() -> str:
            assert self.process.poll() is None, f"it has ended: {self.said.read_text()}"
            return self.said.read_text()

        wait_until(condition, trouble)

    def ranks(self, count: int = 3) -> list[psutil.Process]:
        self.wait(lambda: len(ranks_of(self.process.pid)) == count)
        return sorted(ranks_of(self.process.pid), key=lambda each: each.name())

    def ready(self, count: int = 3) -> None:
        for rank in range(count):
            log = self.folder / f"run/logs/rank-{rank}.log"
            self.wait(lambda log=log: "ready" in log.read_text())

    def hangs(self, text: str) -> None:
        """Wait until this fault hangs one rank, and all others wait for it."""
        fault, ranks = faults.parse(text), self.ranks()
        log = self.folder / f"run/logs/rank-{fault.rank}.log"
        self.wait(lambda: f"fault: {text}" in log.read_text())
        stands = [self.folder / f"stands-1-{rank}" for rank in range(len(ranks))]
        hung = ranks[fault.rank]
        for rank, path in enumerate(stands):
            where = f"step {fault.step}: " + ("base/faults.py:" if rank == fault.rank else "distributed/fake.py:")
            if rank != fault.rank or fault.kind == "hang":
                self.wait(lambda path=path, where=where: path.read_text().startswith(where))
            elif fault.kind == "stop":
                self.wait(lambda: hung.status() == psutil.STATUS_STOPPED)
            else:  # none of its threads can do anything, and that is not for want of a processor
                self.wait(lambda: states(hung) == {"S"})

    def late(self) -> None:
        """From now on the first attempt has taken too long."""
        (self.folder / "late-1").touch()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher that does not outlive its test, and has left no rank behind."""
    made = Launcher(tmp_path)
    yield made
    if made.process is not None:
        left = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
        made.process.kill()
        made.process.wait()
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    ours = lambda: [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]  # noqa: E731
    wait_until(lambda: not ours(), lambda: f"processes are left behind: {ours()}")


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Its children but the template."""
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if child.name().startswith("ithaca rank") else []
    return found


def states(process: psutil.Process) -> set[str]:
    """Of its threads: R runs or wants to, S sleeps, T is stopped."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return {(each / "stat").read_text().rpartition(") ")[2][0] for each in threads}


def pending(process: psutil.Process, number: int) -> bool:
    """Whether a signal has arrived that is held back."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(text.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


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


@pytest.mark.parametrize("code", [3, 6] if LONG else [6])
def test_what_would_fail_again_is_not_tried_again(launcher: Launcher, code: int):
    found, said = launcher.run(f"exit={code}@1:2")
    assert found == code and said[0].endswith(f"ended with exit code {code} at step 2") and len(said) == 3
    assert launcher.status["exit_code"] == code and launcher.status["attempts"] == 1


def test_nobody_waits_for_a_lost_rank(launcher: Launcher):
    """Two are in a collective with the one that was killed, where they would stay for ever and do not end by SIGTERM."""
    launcher.start("hang@1:3", restarts=0)
    launcher.hangs("hang@1:3")
    ranks = launcher.ranks()
    ranks[1].kill()
    code, _ = launcher.finish()
    assert code == 8 and not any(each.is_running() for each in ranks)
    assert local.SETTLE_SECONDS + supervise.GRACE_SECONDS < 5, "reliability.md: all are gone within 5 s"


# Hangs (F20)


@pytest.mark.parametrize(
    ("fault", "words", "stack"),
    [
        ("hang@1:3", r"made no progress for \d+ s in step 3, at base/faults\.py:", "faults.py"),
        ("gil@1:3", "in step 3", "_hold_lock"),
        (
            "stop@1:3",
            r"is stopped \(SIGSTOP\?\) in step 3, for \d+ s",
            "most recent call first",
        ),  # it may go a line further
    ],
)
def test_a_rank_that_hangs_is_named_and_its_stack_written_down(launcher: Launcher, fault: str, words: str, stack: str):
    launcher.start(fault, restarts=0)
    launcher.hangs(fault)
    launcher.late()
    code, said = launcher.finish()
    assert code == 7 and said[0].startswith("rank 1 (pid ") and re.search(words, said[0]), said
    assert said[1] == "  stacks of all ranks: run/stacks"
    assert stack in (launcher.folder / "run/stacks/rank-1.txt").read_text()
    assert "fake.py" in (launcher.folder / "run/stacks/rank-0.txt").read_text()
    assert launcher.status["state"] == "failed" and launcher.status["exit_code"] == 7


def test_a_rank_that_holds_the_lock_for_long_is_told_from_those_that_wait_for_it(launcher: Launcher):
    launcher.start("gil@2:1", restarts=0, silence=4.0)
    launcher.hangs("gil@2:1")
    (launcher.folder / "clock_runs").touch()
    code, said = launcher.finish()
    assert code == 7 and re.fullmatch(r"rank 2 \(pid \d+\) gave no sign of life for 5 s in step 1", said[0]), said


def test_a_hang_is_tried_again(launcher: Launcher):
    launcher.start("hang@1:3", restarts=1)
    launcher.hangs("hang@1:3")
    launcher.late()
    code, said = launcher.finish()
    assert code == 0 and said[-1] == "  restarting from step 0 (attempt 1 of 1)"


# Signals before the first step (F11)


EARLY = [("imports", "group"), ("setup", "rank"), ("setup", "launcher")]
MORE_EARLY = [("imports", "rank"), ("imports", "launcher"), ("setup", "group")]


@pytest.mark.parametrize(("moment", "target"), [*EARLY, *(MORE_EARLY if LONG else [])])
def test_a_signal_before_the_first_step_leaves_at_once(launcher: Launcher, target: str, moment: str):
    """Without the signal they would stay where they are for ever; nobody is killed."""
    (launcher.folder / "no_first_step").touch()
    if moment == "imports":
        (launcher.folder / "slow_start").touch()
    process = launcher.start(grace=math.inf)
    ranks = launcher.ranks()
    if moment == "setup":
        launcher.ready()
    number = signal.SIGUSR1 if target == "rank" else signal.SIGTERM
    first = ranks[1] if target == "rank" else psutil.Process(process.pid)
    first.send_signal(number)
    if moment == "imports":  # until it is there, also from the launcher
        launcher.wait(lambda: all(pending(each, number) for each in (ranks if target != "rank" else [first])))
    for each in ranks if target == "group" else ():
        with suppress(psutil.NoSuchProcess):  # the launcher has passed it on, and the rank has gone
            each.send_signal(number)
    (launcher.folder / "slow_start").unlink(missing_ok=True)
    code, said = launcher.finish()
    assert code == 75, said
    assert launcher.status["state"] == "stopped" and launcher.status["exit_code"] == 75


def test_no_restart_once_somebody_has_asked_to_stop(launcher: Launcher):
    (launcher.folder / "slow_start").touch()
    process = launcher.start("kill@1:1", grace=math.inf)
    ranks = launcher.ranks()
    process.send_signal(signal.SIGHUP)
    launcher.wait(lambda: all(pending(each, signal.SIGTERM) for each in ranks))
    ranks[1].kill()
    launcher.wait(lambda: not ranks[1].is_running() or ranks[1].status() == psutil.STATUS_ZOMBIE)  # before another ends
    (launcher.folder / "slow_start").unlink()
    code, said = launcher.finish()
    assert code == 8 and not any("restarting" in line for line in said)


def test_two_runs_in_one_folder(launcher: Launcher):
    """F29. The folder is held by the launcher, whose pid is the one to look for, and by its ranks as long as one lives."""
    (launcher.folder / "slow_start").touch()
    process = launcher.start()
    launcher.ranks()
    other = Launcher(launcher.folder, "other")
    code, said = other.run()
    assert code == 1 and f"is in use by pid {process.pid} on " in said[-1]
    (launcher.folder / "slow_start").unlink()
    assert launcher.finish()[0] == 0
