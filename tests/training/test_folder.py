"""The run folder: names, one run at a time (also after a kill), and a status that is never half written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ithaca.base.run_folder import CONTRACT, RunFolder, write_atomically

HOLD = """
import sys
from ithaca.base.run_folder import RunFolder
with RunFolder(sys.argv[1]).claim():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_names(tmp_path: Path):
    folder = RunFolder(str(tmp_path))
    names = [folder.config, folder.metrics, folder.checkpoints, folder.logs, folder.status, folder.report, folder.lock]
    names.append(folder.about)
    assert [each.relative_to(tmp_path).as_posix() for each in [*names, folder.log(3)]] == [
        "config.yaml", "metrics.jsonl", "checkpoints", "logs", "status.json", "report", "lock", "about.json",
        "logs/rank-3.log",
    ]  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run_folder.md").read_text()
    assert f"version {CONTRACT}" in page and all(each.name in page for each in names)


def test_a_folder_in_use_names_host_and_pid(tmp_path: Path, other: subprocess.Popen[str]):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError) as error, folder.claim():
        raise AssertionError("two runs hold one folder")
    text = str(error.value)
    assert f"is in use by pid {other.pid} on {socket.gethostname()} (started 20" in text
    assert "choose another run.folder" in text
    holder = folder.holder()
    assert holder is not None and holder["pid"] == other.pid  # the attempt did not overwrite it


def test_a_killed_run_leaves_no_lock(tmp_path: Path, other: subprocess.Popen[str]):
    folder = RunFolder(tmp_path / "run")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert folder.holder() is None
    with folder.claim():
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"pid {os.getpid()}"), folder.claim():  # nor twice in one process
            pass
    assert folder.holder() is None and folder.lock.read_text() == ""


def test_halves_of_files_that_a_killed_process_left_go(tmp_path: Path):
    """Killed between the new status and its name: what is beside the file is removed by whoever holds the folder next, or ends."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.evaluations.mkdir()
    left = [folder.path / ".status.json.a1b2c3d4", folder.path / ".plan.json.x", folder.evaluations / ".step-5.json.y"]
    kept = [folder.path / ".notes", folder.evaluations / "step-5.json"]
    for path in (*left, *kept):
        path.write_text("")
    with folder.claim():
        assert not any(path.exists() for path in left) and all(path.exists() for path in kept)
        left[0].write_text("")  # a rank of this run
    assert not left[0].exists() and all(path.exists() for path in kept)


def test_asking_who_holds_it_does_not_keep_a_run_out(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create()
    folder.lock.touch()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            folder.holder()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(50):
            with folder.claim():
                pass
    finally:
        done.set()
        thread.join()


def test_the_lock_goes_with_an_exception(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyError), folder.claim():
        raise KeyError
    with folder.claim():
        pass


def test_a_workers_process_does_not_hold_the_lock(tmp_path: Path):
    """Started programs do not inherit it, so a forgotten one cannot keep the folder."""
    folder = RunFolder(tmp_path)
    with folder.claim():
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        assert folder.holder() is None
    finally:
        child.kill()
        child.wait()


def test_folders_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="a file is in the way"):
            RunFolder(path).create()
    with pytest.raises(ValueError, match=r"/proc/run cannot be made \(.*\); choose another run.folder"):
        RunFolder("/proc/run").create()
    RunFolder(tmp_path / "a" / "b").create()
    (tmp_path / "a" / "b" / "keep").write_text("x")
    RunFolder(tmp_path / "a" / "b").create()
    assert (tmp_path / "a" / "b" / "keep").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path):
    path = tmp_path / "run"
    RunFolder(path).create()
    path.chmod(0o555)
    with pytest.raises(ValueError, match="cannot be written"):
        RunFolder(path).create()


def test_status(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_status() is None
    folder.write_status("failed", step=41, cause="loss became NaN", exit_code=6)
    found = folder.read_status()
    assert found is not None and found["contract"] == CONTRACT
    assert (found["state"], found["step"], found["exit_code"], found["pid"]) == ("failed", 41, 6, os.getpid())
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]  # nothing left over
    assert folder.status.stat().st_mode & 0o777 == 0o644
    with pytest.raises(AssertionError):
        folder.write_status("dancing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ('{"contract": 1, "state": "dancing"}', "state is 'dancing', not one of starting"),
        ('{"contract": 1, "state": "running", "step": -3}', "step is -3, not a whole number from 0 on"),
        ("[]", "contract version None"),
        ('{"contract": 2}', "contract version 2, this ithaca knows 1"),
    ],
)
def test_a_status_of_somebody_else(tmp_path: Path, text: str, words: str):
    folder = RunFolder(tmp_path)
    folder.status.write_text(text)
    with pytest.raises(ValueError, match=words):
        folder.read_status()


def test_a_reader_never_sees_half_a_status(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write_status("running", step=0, padding="x" * 100_000)
    done = threading.Event()

    def write() -> None:
        for step in range(100):
            folder.write_status("running", step=step, padding="x" * 100_000)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while not done.is_set() or reads == 0:
        found = folder.read_status()
        assert found is not None and len(found["padding"]) == 100_000
        reads += 1
    thread.join()
    assert reads > 1


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["status.json"]
