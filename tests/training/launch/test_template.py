"""Workers that are forks of one process: they must be what workers that were started one by one are. Real processes, no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ithaca.base.processes.fork_server import Template
from ithaca.config.schema import Timeouts
from ithaca.training.launch.local import watch

from ...waiting import wait_until

LAUNCH = """
import math, os, sys
from pathlib import Path
from ithaca.config.schema import Launch, Timeouts
from ithaca.training.launch.supervise import supervise
from ithaca.base.processes.fork_server import Template
from ithaca.base.run_folder import RunFolder
command = [sys.executable, "-c", sys.argv[1]]
launch = Launch(restarts=3, timeouts=Timeouts(setup=math.inf))  # however slow the machine
os.environ["KEPT"] = "by all"
sys.exit(supervise(command, RunFolder("run"), launch, 3, Template(command)))
"""

# What a worker finds. It says that it is still there when asked, and ends when told to.
RANK = """
import json, os, signal, stat, subprocess, sys, time
from pathlib import Path
if "ITHACA_TEMPLATE" in os.environ:
    from ithaca.base.processes.fork_server import serve
    sys.path.insert(0, os.getcwd())
    serve(["heavy"])
import resource
from ithaca.base.processes.signals import SIGNALS, StoppedEarly, listen
rank, attempt = int(os.environ["RANK"]), int(os.environ["ITHACA_ATTEMPT"])
found = {
    "rank": rank, "forked": "heavy" in sys.modules, "parent": os.getppid(), "leader": os.getsid(0) == os.getpid(),
    "blocked": sorted(set(SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])) == sorted(SIGNALS),
    "input": os.read(0, 1).decode(), "port": os.environ["MASTER_PORT"], "kept": os.environ.get("KEPT"),
    "variables": sorted(name for name in os.environ if name.startswith("ITHACA") or "RANK" in name or "WORLD" in name),
    "locked": any(os.path.realpath(f"/proc/self/fd/{each}").endswith("run/lock") for each in os.listdir("/proc/self/fd")),
    "report": stat.S_ISFIFO(os.fstat(int(os.environ["ITHACA_REPORT"])).st_mode),
    "listens": "ITHACA_LISTENER" in os.environ and stat.S_ISSOCK(os.fstat(int(os.environ["ITHACA_LISTENER"])).st_mode),
    "files": len(os.listdir("/proc/self/fd")), "pid": os.getpid(),
}
try:
    with listen():
        if os.environ.get("CHILD"):
            found["child"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid
        half = Path(f"found-{attempt}-{rank}.new")
        half.write_text(json.dumps(found))
        half.rename(f"found-{attempt}-{rank}")
        print("out of", rank, flush=True)
        print("err of", rank, file=sys.stderr, flush=True)
        while not Path("go").exists():
            if Path("asked").exists(): Path(f"here-{attempt}-{rank}").touch()
            time.sleep(0.01)
except StoppedEarly:
    os._exit(75)
"""


class Started:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Any = None

    def start(self, heavy: str = "", **environ: str) -> None:
        imported = "import os\nwith open('imported', 'a') as file: print(os.getpid(), file=file)\n"
        (self.folder / "heavy.py").write_text(imported + heavy)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK], cwd=self.folder, text=True, env={**os.environ, **environ},
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def found(self, attempt: int = 1) -> list[dict[str, Any]]:
        """What each worker of this attempt has found."""
        return [json.loads(file.read_text()) for file in self.wait_for(f"found-{attempt}")]

    def wait_for(self, name: str) -> list[Path]:
        """The files of this name, of each worker."""
        files = [self.folder / f"{name}-{rank}" for rank in range(3)]
        wait_until(lambda: all(file.exists() for file in files), self.still_running)
        return files

    def still_running(self) -> str:
        assert self.process.poll() is None, f"it has ended: {self.process.stderr.read()}"
        return ""

    def template(self) -> psutil.Process:
        return next(
            each for each in psutil.Process(self.process.pid).children() if each.name().startswith("ithaca temp")
        )

    def end(self) -> tuple[int, str, str]:
        (self.folder / "go").touch()
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def imports(self) -> list[str]:
        return (self.folder / "imported").read_text().split()

    def log(self, rank: int) -> str:
        return (self.folder / f"run/logs/rank-{rank}.log").read_text()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    try:
        wait_until(lambda: not processes_in(tmp_path))
    finally:
        for each in processes_in(tmp_path):
            each.kill()


def processes_in(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)]


def alike(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from start to start."""
    return [
        {name: value for name, value in each.items() if name not in ("pid", "port", "parent", "forked", "files")}
        for each in found
    ]


def test_a_fork_is_what_a_process_of_its_own_would_be(started: Started, tmp_path: Path):
    started.start()
    forked = started.found()
    launcher = started.process.pid
    code, out, err = started.end()
    assert code == 0 and out == "out of 0\n" and err == "err of 0\n" and len(started.imports()) == 1
    assert started.log(0) in ("out of 0\nerr of 0\n", "err of 0\nout of 0\n")
    assert started.log(2) == "out of 2\nerr of 2\n"
    assert [each["rank"] for each in forked] == [0, 1, 2] and len({each["port"] for each in forked}) == 1
    assert all(each["forked"] and each["parent"] == launcher and each["leader"] for each in forked)
    assert all(each["blocked"] and each["locked"] and each["report"] and each["input"] == "" for each in forked)
    assert [each["listens"] for each in forked] == [True, False, False]

    for left in tmp_path.glob("found-*"):
        left.unlink()
    (tmp_path / "go").unlink()
    started.start("raise RuntimeError('no')")
    single = started.found()
    code, _, _ = started.end()
    assert code == 0 and not any(each["forked"] for each in single) and alike(single) == alike(forked)
    assert all(one["files"] <= other["files"] for one, other in zip(forked, single, strict=True)), "none is left open"
    assert "RuntimeError: no" in started.log(0)


def test_restarts_need_no_imports_and_a_lost_template_is_replaced(started: Started):
    started.start(CHILD="yes")
    first = started.found()
    psutil.Process(first[1]["pid"]).kill()
    second = started.found(attempt=2)
    assert len(started.imports()) == 1 and all(each["forked"] for each in second)
    assert second[0]["port"] != first[0]["port"]
    launcher = psutil.Process(started.process.pid)
    wait_until(lambda: len(launcher.children()) == 4)  # three ranks and the template: what the dead had started is gone
    assert not any(psutil.pid_exists(each["child"]) for each in first)

    template = started.template()
    template.kill()
    wait_until(lambda: template.status() == psutil.STATUS_ZOMBIE)
    (started.folder / "asked").touch()
    started.wait_for("here-2")  # nobody minds
    psutil.Process(second[2]["pid"]).kill()
    third = started.found(attempt=3)
    assert len(started.imports()) == 2 and all(each["forked"] for each in third)
    code, _, err = started.end()
    lost = [line for line in err.splitlines() if line.startswith("ithaca: ")]
    assert code == 0 and [line.partition(" was killed by SIGKILL")[0] for line in lost] == [
        f"ithaca: rank {rank} (pid {found[rank]['pid']})" for rank, found in ((1, first), (2, second))
    ]


@pytest.mark.parametrize(
    ("heavy", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "(ithaca template)"),
        ("import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
         "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)", "has initialised CUDA"),
        ("os.kill(os.getpid(), 9)", "could not be used"),
    ],
    ids=["a thread", "CUDA", "killed"],
)  # fmt: skip
def test_a_template_that_cannot_be_forked_is_not(started: Started, heavy: str, why: str):
    started.start(heavy)
    assert not any(each["forked"] for each in started.found())
    code, _, _ = started.end()
    assert code == 0 and len(started.imports()) == 1
    assert why in started.log(0) and started.log(0).count("they are started one by one\n") == 1


def test_a_template_that_does_not_come_is_not_waited_for(tmp_path: Path):
    log = tmp_path / "log"
    with Template([sys.executable, "-c", "import signal; signal.pause()"]) as template:
        for _ in range(2):  # nor a second time
            assert not template.prepare(os.environ, log, [], 0.1) and template.process is None
    assert log.read_text().count("took too long; they are started one by one\n") == 1


def test_it_has_as_long_as_a_rank_has_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits: list[float | None] = []
    monkeypatch.setattr(Template, "prepare", lambda *asked: limits.append(asked[-1]))
    for setup in (1e9, None):
        with Template([]) as template:
            outcome = watch(["true"], workers=1, logs=tmp_path, timeouts=Timeouts(setup=setup), template=template)
        assert outcome.code == 0
    assert limits == [1e9, None]


def test_where_a_fork_fails_the_others_are_started_one_by_one(started: Started):
    started.start("real, calls = os.fork, []\ndef fork():\n    calls.append(1)\n    if len(calls) > 2: raise OSError(11, 'no')\n"
                  "    return real()\nos.fork = fork")  # fmt: skip
    assert [each["forked"] for each in started.found()] == [True, False, False]
    assert started.end()[0] == 0 and "has failed; they are started one by one\n" in started.log(0)


def test_a_signal_during_the_imports_ends_the_run_at_once(started: Started):
    started.start("import signal\nwhile True: signal.pause()")
    wait_until((started.folder / "imported").exists, started.still_running)
    started.process.send_signal(signal.SIGTERM)
    _, err = started.process.communicate()
    assert started.process.returncode == 75 and "3 workers save and stop" in err
    assert json.loads((started.folder / "run/status.json").read_text())["state"] == "stopped"


def test_the_template_dies_with_the_launcher(started: Started):
    started.start()
    started.found()
    launcher = psutil.Process(started.process.pid)
    # A worker may say what it finds before the template has waited for the process between the two.
    wait_until(lambda: len(launcher.children(recursive=True)) == 4)
    family = launcher.children(recursive=True)
    started.process.kill()
    started.process.communicate()
    gone, left = psutil.wait_procs(family)
    assert len(gone) == 4 and not left
