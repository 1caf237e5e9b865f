"""The heartbeat: what a rank tells others while it runs: the section it is in, and that it is alive.

    begin(timeouts, carry)            once, as soon as the process knows that it is a rank
    section("step", 41)               in the main thread, whenever something else begins
    ...                               a thread repeats it every second, with the line of code that the main thread is in

A section has a limit of time. Limits are computed here, where it is known how long things have taken so far and how long they were
planned to take; whoever watches (the launcher on one machine, a rank of each host elsewhere) only compares. The line of code
is what tells the rank that hangs from those that wait for it: the latter are inside a collective of torch.

The thread needs Python's lock to speak. So silence means something too: the process is stopped, or stuck while it holds the lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from ...base.processes.system import DUMP
from ...config.schema import Timeouts
from .environment import REPORT, STACKS

PERIOD = 1.0  # seconds between two signs of life
AGAIN = 5.0  # times the longest so far is not too long
PLANNED = 10.0  # times what was planned, for a first step
FIRST = 2.0  # times the limit of a step, for a first step: kernels are built, memory is pinned

SECTIONS = ("setup", "data", "step", "eval", "save")
"""In the order in which a step goes through them."""


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    section: str
    step: int
    age: float  # seconds in this section
    limit: float | None
    where: str = ""  # line of code of the main thread
    waiting: bool = False  # for other ranks, as far as that line tells


class Heartbeat:
    def __init__(self, timeouts: Timeouts, carry: Callable[[Beat], None]) -> None:
        self._timeouts, self.carry = timeouts, carry
        self._longest: dict[str, float] = {}
        self._planned = 0.0
        self._now = ("setup", 0, time.monotonic(), timeouts.setup)
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="ithaca-heartbeat", daemon=True)

    def start(self) -> None:
        self.carry(self.beat(look=False))
        self._thread.start()

    def stop(self) -> None:
        """The work is done: nobody shall miss this rank."""
        self.section("done", self._now[1])
        self._ended.set()
        self._thread.join(5.0)

    def expect(self, seconds: float) -> None:
        """How long a step is planned to take."""
        self._planned = seconds

    def section(self, name: str, step: int) -> None:
        now = time.monotonic()
        before, _, since, _ = self._now
        self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._now = (name, step, now, self.limit(name))
        self.carry(self.beat(look=False))

    def limit(self, name: str) -> float | None:
        """Seconds that a section which begins now may take; None = any time."""
        kind = "step" if name == "eval" else name
        given = getattr(self._timeouts, kind, None)
        if given is None:
            return None
        if kind == "step" and "step" not in self._longest:
            return max(FIRST * given, PLANNED * self._planned)
        return max(given, AGAIN * max(self._longest.get(kind, 0.0), self._longest.get(name, 0.0)))

    def beat(self, look: bool = True) -> Beat:
        section, step, since, limit = self._now
        where, waiting = "", False
        if look and (frame := sys._current_frames().get(self._main or 0)) is not None:
            where, waiting = place(frame)
        return Beat(section, step, round(time.monotonic() - since, 3), limit, where, waiting)

    def _repeat(self) -> None:
        while not self._ended.wait(PERIOD):
            self.carry(self.beat())
        self.carry(self.beat())


def place(frame: FrameType) -> tuple[str, bool]:
    """file:line in function, and whether it is one in which a rank waits for others."""
    code = frame.f_code
    path = Path(code.co_filename)
    frames = [frame, frame.f_back] if frame.f_back is not None else [frame]
    waiting = any("torch/distributed/" in one.f_code.co_filename.replace("\\", "/") for one in frames)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {code.co_name}", waiting


# -- this process's ---------------------------------------------------------------------------------------------------------

_own: Heartbeat | None = None  # a process is one rank


def begin(
    timeouts: Timeouts, carry: Callable[[Beat], None] | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """From now on this process gives signs of life. carry: where to; None = to our launcher, if there is one."""
    global _own
    if STACKS in environ:
        faulthandler.register(DUMP, file=int(environ[STACKS]), all_threads=True, chain=False)
    if carry is None and REPORT in environ:
        os.set_blocking(int(environ[REPORT]), False)  # a launcher that is stopped must not stop us

        def to_launcher(beat: Beat) -> None:
            tell(environ, {"beat": asdict(beat)})

        carry = to_launcher
    if carry is not None and _own is None:
        _own = Heartbeat(timeouts, carry)
        _own.start()


def section(name: str, step: int = 0) -> None:
    """The main thread begins something. Nothing happens where nobody listens."""
    if _own is not None:
        _own.section(name, step)


def stop() -> None:
    global _own
    if _own is not None:
        _own.stop()
        _own = None


def expect(seconds: float) -> None:
    if _own is not None:
        _own.expect(seconds)


_speaking = threading.Lock()


def tell(environ: Mapping[str, str], message: dict[str, object], wait: bool = False) -> bool:
    """One line to the launcher. wait: it must arrive; without, it is dropped where nobody has read the last 64 KiB."""
    if REPORT not in environ:
        return False
    pipe, line = int(environ[REPORT]), json.dumps(message).encode() + b"\n"
    held = _speaking.acquire(timeout=1.0)  # not for ever: the thread that holds it may be gone
    try:
        with suppress(OSError, ValueError):
            if wait:
                os.set_blocking(pipe, True)
            while line:
                line = line[os.write(pipe, line) :]
            return True
        return False
    finally:
        if held:
            _speaking.release()
