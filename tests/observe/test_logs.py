"""Messages arrive where they belong: the file has everything, the terminal what a person should see."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from rich.console import Console

from ithaca.base.run_folder import RunFolder
from ithaca.observe.display import Display
from ithaca.observe.logs import explain, log_to

from .records import record

logger = logging.getLogger("ithaca.training.somewhere")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def unseen() -> Iterator[None]:
    """Keeps what is logged out of pytest's own reports: half a character cannot be sent between its processes."""
    theirs = list(logging.getLogger().handlers)

    def nothing(record: logging.LogRecord) -> bool:
        return False

    for handler in theirs:
        handler.addFilter(nothing)
    yield
    for handler in theirs:
        handler.removeFilter(nothing)


@pytest.mark.usefixtures("unseen")
def test_the_file_has_everything_and_the_terminal_the_warnings(folder: RunFolder):
    shown = io.StringIO()
    before = list(logging.getLogger().handlers)
    display = Display("run", 10, console=Console(file=shown, width=80))
    with log_to(folder, 0, display) as path, warnings.catch_warnings():
        warnings.simplefilter("always")
        logger.info("an info with ünicode \ud800")
        logger.warning("a warning of %d words", 5)
        warnings.warn("a Python warning", UserWarning, stacklevel=1)
        logging.getLogger("other.library").warning("a foreign warning")
        logging.getLogger("other.library").info("a foreign info")
        display.say("first words")
        display.step(record(1))
    assert path == folder.log(0)
    lines = path.read_text(encoding="utf-8").splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
    assert re.fullmatch(stamp + r"INFO ithaca\.training\.somewhere: an info with ünicode \\ud800", lines[0])
    text = "\n".join(lines)
    for part in ("WARNING ithaca.training.somewhere: a warning of 5 words", "UserWarning: a Python warning", "a foreign warning",
                 "first words", "step 1/10 loss 2.5000 lr"):  # fmt: skip
        assert part in text, part
    assert "a foreign info" not in text
    seen = shown.getvalue().splitlines()
    assert seen[0] == "warning: a warning of 5 words" and seen[1].endswith("UserWarning: a Python warning")
    assert seen[2:4] == ["warning: a foreign warning", "first words"] and len(seen) == 5
    assert logging.getLogger().handlers == before and logging.getLogger("ithaca").level == logging.NOTSET


def test_other_ranks_have_a_file_only(folder: RunFolder, capfd: pytest.CaptureFixture):
    for _ in range(2):  # appended
        with log_to(folder, 3):
            logger.error("broken")
    assert folder.log(3).read_text().count("ERROR ithaca.training.somewhere: broken") == 2
    assert capfd.readouterr() == ("", "")
    with log_to(folder, 0):  # rank 0 before there is a display
        logger.error("broken")
    assert capfd.readouterr() == ("", "error: broken\n")


def test_a_traceback_goes_to_the_file(folder: RunFolder):
    shown = io.StringIO()
    display = Display("run", 10, console=Console(file=shown, width=80))
    with pytest.raises(ZeroDivisionError), log_to(folder, 0, display):
        _ = 1 / 0
    text = folder.log(0).read_text()
    assert "Traceback (most recent call last)" in text and "ZeroDivisionError: division by zero" in text
    assert shown.getvalue() == ""  # the command line explains it
    with pytest.raises(SystemExit), log_to(folder, 1, display):
        raise SystemExit(0)
    assert folder.log(1).read_text() == ""


def test_a_thread_that_fails(folder: RunFolder):
    shown = io.StringIO()
    display = Display("run", 10, console=Console(file=shown, width=80))
    with log_to(folder, 0, display):
        thread = threading.Thread(target=lambda: 1 / 0, name="saver")
        thread.start()
        thread.join()
    assert shown.getvalue() == "error: thread 'saver' ended with ZeroDivisionError: division by zero\n"
    assert "Traceback" in folder.log(0).read_text()


def test_a_log_file_on_a_full_disk(folder: RunFolder, capfd: pytest.CaptureFixture):
    folder.logs.mkdir()
    folder.log(2).symlink_to("/dev/full")
    with log_to(folder, 2):
        for _ in range(20):
            logger.warning("x" * 1000)
    assert capfd.readouterr() == ("", "")


def test_time_stamps_are_utc(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    before = datetime.now(timezone.utc).replace(microsecond=0)
    try:
        with log_to(folder, 1):
            logger.warning("now")
    finally:
        monkeypatch.undo()
        time.tzset()
    said = datetime.strptime(folder.log(1).read_text().split()[0], "%Y-%m-%dT%H:%M:%S%z")
    assert before <= said <= datetime.now(timezone.utc)


def caught(raise_it) -> BaseException:
    try:
        raise_it()
    except BaseException as error:
        return error
    raise AssertionError


def test_an_error_of_the_user_is_its_own_explanation():
    def refuse():
        raise ValueError("the context is too long\n  - use less")

    assert explain(caught(refuse), "runs/x/logs/rank-0.log").splitlines() == [
        "the context is too long",
        "  - use less",
        "traceback: runs/x/logs/rank-0.log",
    ]
    assert explain(caught(Path("/no/such/file").read_text), "log").startswith("[Errno 2] No such file or directory")


def test_anything_else_is_named_and_placed():
    def outer():
        try:
            raise OSError("the disk is gone")
        except OSError as error:
            raise RuntimeError("cannot save") from error

    text = explain(caught(outer), "log").splitlines()
    assert text[:2] == ["RuntimeError: cannot save", "caused by OSError: the disk is gone"]
    assert re.fullmatch(r"at .*test_logs\.py:\d+ in outer", text[2]) and "ithaca doctor" in text[3]
    assert explain(caught(lambda: [][1]), "log").startswith("IndexError: list index out of range\nat ")
    assert explain(AssertionError(), "log").startswith("AssertionError\n")
    assert explain(KeyboardInterrupt(), "log").splitlines() == ["stopped by Ctrl-C", "traceback: log"]


def test_memory_has_a_remedy():
    import torch

    assert "help: the GPU has too little memory" in explain(torch.OutOfMemoryError("CUDA out of memory. Tried"), "log")
    assert "stack.store disk" in explain(MemoryError(), "log")


def test_one_screen():
    text = explain(RuntimeError("\n".join(f"line {i} " + "x" * 1000 for i in range(300))), "log").splitlines()
    assert len(text) == 18 and all(len(line) < 450 for line in text)
    assert text[-3:-2] == ["... 285 more lines in the log"] and text[-1] == "traceback: log"
