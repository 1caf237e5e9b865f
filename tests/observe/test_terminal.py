"""The display on real terminals, in real pipes, and where nobody looks any more."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

from ithaca.observe.display import Steady

from .records import start

RUN = """
import os, sys, time
from ithaca.observe.display import Display
from tests.observe.records import record
with Display("demo", 20, folder="runs/demo") as display:
    display.say("first words")
    for step in range(1, 21):
        display.doing(f"step {step}")
        if step == 10:
            print("a stray print")
            while sys.argv[1:] and not os.path.exists(sys.argv[1]): time.sleep(0.005)
        display.step(record(step), eta=20.0 - step, next_save=20)
print("the end", file=sys.stderr)
"""
"""With an argument it waits at the tenth step, until there is a file of that name."""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def on_a_terminal(environment: dict[str, str], resized: Path | None = None) -> str:
    """What a real pseudo-terminal of 120 × 30 receives from RUN. resized: a file to make when, half-way, it has become 60 × 20."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    waits = [] if resized is None else [str(resized)]
    run = start(
        RUN, *waits, environment={"TERM": "xterm-256color", **environment}, stdin=there, stdout=there, stderr=there,
        cwd=ROOT,
    )  # fmt: skip
    os.close(there)
    received = b""
    with suppress(OSError):  # the other end is closed
        while True:
            received += os.read(here, 65536)
            if resized is not None and b"a stray print" in received:
                fcntl.ioctl(here, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
                resized.touch()
    os.close(here)
    assert run.wait() == 0
    return received.decode()


def test_a_real_terminal_that_is_resized(tmp_path: Path):
    shown = on_a_terminal({}, resized=tmp_path / "resized")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    words = [shown.index(part) for part in ("first words", "a stray print", "the end")]
    assert words == sorted(words) and "\x1b[1m" in shown
    plain_text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    widths = {len(line) for line in re.findall(r"╭[^╮\n]*╮", plain_text)}
    assert widths == {120, 60}
    assert "20/20" in plain_text and "loss 2.5000 lr" not in plain_text


def test_no_color_and_dumb_terminals():
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert not colour.search(on_a_terminal({"NO_COLOR": "1"}))
    dumb = on_a_terminal({"TERM": "dumb"})
    assert "\x1b" not in dumb and dumb.count("\n") == 20 + 3 and "step 20/20 loss 2.5000 lr" in dumb


def test_nobody_looks_any_more(tmp_path: Path):
    run = start(RUN, str(tmp_path / "gone"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline() == b"first words\n"
    run.stdout.close()
    (tmp_path / "gone").touch()
    with run.stderr:
        assert run.stderr.read() == b"the end\n" and run.wait() == 0


def test_a_file_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        output = Steady(full)
        output.write("words" * 10_000)
        output.flush()
        assert not output.isatty()
        closed = io.StringIO()
        closed.close()
        Steady(closed).write("words")
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), full.fileno())  # or closing the file would raise
