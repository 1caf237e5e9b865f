"""The local launcher: output, exit codes, causes, signals, and nobody left behind. Real processes; most need no torch."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ithaca.base.processes.system import usable_cores

from ...waiting import wait_until

LONG = os.environ.get("ITHACA_FAULTS") == "long"
LAUNCH = """
import os, sys
from pathlib import Path
from ithaca.training.launch import run_local
grace = float(os.environ.get("GRACE", "inf"))  # nobody is killed because the machine is slow
code = run_local([sys.executable, "-c", sys.argv[2]], workers=int(sys.argv[1]), logs=Path("logs"), grace=grace)
assert "torch" not in sys.modules  # the launcher stays small
sys.exit(code)
"""
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def until(*names):
    while not all(map(os.path.exists, names)): time.sleep(0.01)
def meet(name):
    open(f"{name}-{rank}", "w").close()
    until(f"{name}-0", f"{name}-1")
"""
# A rank whose peer has ended may be ended too: both have said everything before the first of them does.
SAVES = (
    RANK
    + """
got = []
for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(n, lambda n, _: got.append(n))
print("ready", flush=True)
while not got: time.sleep(0.01)
for turn in ("first turn", "second turn"):
    print(turn, flush=True)
    until(turn)
print("got", [signal.Signals(n).name for n in got], flush=True)
meet("said")
sys.exit(75)
"""
)
DEAF = (
    RANK
    + """
for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)
print("ready", flush=True)
"""
)


class Launcher:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, program: str, workers: int = 2, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(workers), program], cwd=self.folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environ},
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, program: str, workers: int = 2, **environ: str) -> tuple[int, str, str]:
        process = self.start(program, workers, **environ)
        out, err = process.communicate()
        return process.returncode, out, err

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()

    def ready(self) -> None:
        """Wait until both ranks have said so."""
        wait_until(lambda: all("ready" in self.log(rank) for rank in (0, 1)), self.still_running)

    def take_turns(self) -> None:
        """With `SAVES`: the launcher has passed on two lines, one after the other. So it has looked for signals between them, and
        whatever it would send a second time has been sent."""
        stdout = self.started[-1].stdout
        assert stdout is not None and stdout.readline() == "ready\n"
        for turn in ("first turn", "second turn"):
            assert stdout.readline() == f"{turn}\n"
            (self.folder / turn).touch()

    def still_running(self) -> str:
        assert self.started[-1].poll() is None, "it has ended"
        return ""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """No launcher of a test, and nothing that it has started, outlives the test."""
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    for each in psutil.process_iter(["cwd"]):
        if each.info["cwd"] == str(tmp_path):
            with suppress(psutil.NoSuchProcess):
                each.kill()


# Output


def test_rank_0_is_on_the_terminal_and_every_rank_in_its_log(launcher: Launcher):
    program = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    code, out, err = launcher.run(program, 3)
    assert (code, out, err) == (0, "out 0\n", "err 0\n")
    assert sorted(launcher.log(0).split("\n")) == ["", "err 0", "out 0"]
    assert [launcher.log(rank) for rank in (1, 2)] == ["out 1\nerr 1\n", "out 2\nerr 2\n"]
    launcher.run(program)
    assert launcher.log(1) == "out 1\nerr 1\n" * 2  # appended


def test_output_is_live_and_its_last_words_are_not_lost(launcher: Launcher):
    process = launcher.start(
        RANK + "print('first')\nuntil('never' if rank else 'seen')\nprint('x' * 300000 + 'end')\nsys.exit(6)"
    )
    assert process.stdout is not None and process.stdout.readline() == "first\n"
    (launcher.folder / "seen").touch()  # only now does rank 0 go on
    out, err = process.communicate()
    assert process.returncode == 6 and out == "x" * 300000 + "end\n"
    assert "rank 0 (pid" in err and 'xend"' not in err.splitlines()[0]


def test_a_display_of_rank_0_has_the_terminal_to_itself(launcher: Launcher, tmp_path: Path):
    ours, theirs = pty.openpty()
    program = RANK + "print('tty', os.isatty(1)); rank or os.get_terminal_size(1); print('!', file=sys.stderr)"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "2", program], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, text=True,
    )  # fmt: skip
    launcher.started.append(process)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # the terminal's other side has closed
        while True:
            text += os.read(ours, 4096)
    os.close(ours)
    assert process.wait() == 0
    assert text == b"tty True\r\n"
    assert (tmp_path / "logs/rank-0.log").read_text() == "!\n"  # what a display draws is no log, and nothing tears it
    assert "tty False" in (tmp_path / "logs/rank-1.log").read_text()


def test_a_reader_that_goes_away_does_not_stop_the_run(launcher: Launcher):
    process = launcher.start(RANK + "\nfor i in range(20000): print('line', i)\nprint('done', file=sys.stderr)")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == "done\n"
    assert launcher.log(0).count("line") == 20000


def test_the_variables_of_a_job(launcher: Launcher):
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    program = RANK + f"print(*(os.environ[name] for name in {names}))"
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.run(
        [sys.executable, "-c", LAUNCH, "2", program], cwd=launcher.folder, env=environ, capture_output=True, text=True
    )
    assert process.stdout == f"2 0 2 127.0.0.1 {max(1, usable_cores() // 2)}\n"
    assert launcher.run(program, OMP_NUM_THREADS="7")[1] == "2 0 2 127.0.0.1 7\n"


# How a run ends


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        ("sys.exit(6)", 6, "rank 1 (pid PID) ended with exit code 6"),
        ("sys.exit(1)", 8, "rank 1 (pid PID) ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", 8, "rank 1 (pid PID) was killed by SIGKILL (by the system, because memory "
         "ran out, or by somebody)"),
    ],
)  # fmt: skip
def test_a_rank_that_fails_is_named_and_takes_the_others_with_it(launcher: Launcher, end: str, code: int, cause: str):
    program = RANK + f"print('step 41', rank, flush=True)\nif rank == 1: {end}\nsignal.pause()"
    got, _, err = launcher.run(program)
    assert got == code
    lines = re.sub(r"pid \d+", "pid PID", err).splitlines()
    assert lines[0] == f"ithaca: {cause}"
    assert lines[1] == '  last line of its log: "step 41 1"'
    assert lines[-1] == "  log: logs/rank-1.log" and len(lines) == 3


def test_a_rank_that_does_not_listen_is_killed(launcher: Launcher):
    code, _, err = launcher.run(DEAF + "meet('deaf')\nif rank: sys.exit(4)\nwhile True: signal.pause()", GRACE="0")
    assert code == 4 and "rank 1 (pid" in err


def test_what_a_rank_has_started_ends_with_it(launcher: Launcher):
    sleeper = "import subprocess\nchild = subprocess.Popen(['sleep', 'infinity'])\nprint(child.pid, flush=True)\n"
    code, out, _ = launcher.run(RANK + sleeper + "meet('said')\nsys.exit(5)")
    assert code == 5
    pids = [int(out), int(launcher.log(1))]
    wait_until(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_command_that_cannot_start(tmp_path: Path):
    from ithaca.training.launch import run_local

    with pytest.raises(FileNotFoundError):
        run_local(["/no/such/program"], workers=2, logs=tmp_path)


# Signals


# SIGTERM is passed on as it came, as SIGUSR1 is: make faults
@pytest.mark.parametrize(
    ("sent", "got"), [("SIGUSR1", "SIGUSR1"), ("SIGHUP", "SIGTERM"), *([("SIGTERM", "SIGTERM")] if LONG else [])]
)
def test_a_signal_is_passed_on_once_and_the_run_may_save(launcher: Launcher, sent: str, got: str):
    process = launcher.start(SAVES)
    launcher.ready()
    process.send_signal(getattr(signal, sent))
    launcher.take_turns()
    out, err = process.communicate()
    assert process.returncode == 75
    assert out == f"got ['{got}']\n" and launcher.log(1).endswith(f"second turn\n{out}")
    assert err == f"ithaca: {sent}: 2 workers save and stop; once more stops them at once\n"


def test_ctrl_c_reaches_each_rank_once(launcher: Launcher):
    """A terminal sends it to every process of the group in front; ours passes it on as well."""
    process = launcher.start(SAVES)
    launcher.ready()
    os.killpg(process.pid, signal.SIGINT)
    launcher.take_turns()
    out, _ = process.communicate()
    assert process.returncode == 75 and out == "got ['SIGINT']\n" and launcher.log(1).endswith(f"second turn\n{out}")


def test_the_second_signal_stops_at_once(launcher: Launcher):
    process = launcher.start(DEAF + "while True: signal.pause()")
    launcher.ready()
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and "once more" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + 15
    assert err == "ithaca: SIGTERM came again: stopped at once\n"


def test_ranks_that_know_no_signals_end_by_it(launcher: Launcher):
    process = launcher.start(RANK + "print('ready', flush=True)\nsignal.pause()")
    launcher.ready()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + 15
    assert err.splitlines()[-1] == "ithaca: SIGTERM ended the run before it could save"


def test_nobody_survives_the_launcher(launcher: Launcher):
    """kill -9, while one rank sleeps and the other is busy."""
    tie = "from ithaca.base.processes.system import tie_to_launcher\ntie_to_launcher(os.environ)\n"
    process = launcher.start(RANK + tie + "print('ready', flush=True)\nwhile rank: pass\nsignal.pause()")
    launcher.ready()
    ranks = [child.pid for child in psutil.Process(process.pid).children()]
    assert len(ranks) == 2
    process.kill()
    wait_until(lambda: not any(map(alive, ranks)))
