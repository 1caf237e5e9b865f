"""A process is asked to stop: SIGTERM, SIGINT (Ctrl-C), SIGUSR1, or SIGHUP where that is not ignored (nohup).

Every verb of the command line listens (cli/main.py). One that is stopped says so in a line, leaves nothing half written and ends
with 128 + the signal's number; `train`, which goes on where it was, with 75.

While a run trains, the signal is noted, and the run looks at the note where all ranks can act on it together: they save the
same step and end with 75. Before the first step there is nothing to save: the rank leaves at once, also with 75. A second
signal stops at once; within two seconds two count as one, because schedulers signal the launcher and its ranks together, and
the launcher passes its own on.

Our launcher starts workers with these signals blocked, and `listen` lets them in: one that comes while Python itself is still
starting is not lost, and does not kill.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..exits import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_AS_ONE = 2.0  # seconds


class StoppedEarly(BaseException):
    """Asked to stop before the first step, or where there are none. Not an Exception: nobody on the way may take it for an error to
    handle."""

    exit_code = STOPPED

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped by {name} before the first step: nothing to save; the same command goes on")
        self.name = name

    @property
    def at_once(self) -> int:
        """The exit code where nothing can be gone on with, as shells have it."""
        return 128 + signal.Signals[self.name]

    def words(self, resumes: bool) -> str:
        """resumes: whether the same command goes on where this one was."""
        return str(self) if resumes else f"stopped by {self.name}"


class StoppedAtOnce(KeyboardInterrupt):
    """Asked again."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped at once: {name} came again")
        self.exit_code = 128 + signal.Signals[name]


@dataclass
class Stop:
    """Whether this process was asked to stop, and by what."""

    name: str | None = None
    early: bool = True  # nothing to save yet
    _when: float = 0.0

    def ask(self, name: str) -> None:
        if self.name is None:
            self.name, self._when = name, time.monotonic()
            if self.early:
                raise StoppedEarly(name)
        elif time.monotonic() - self._when > _AS_ONE:
            raise StoppedAtOnce(name)


_listening: Stop | None = None


@contextmanager
def listen(to_the_end: bool = False) -> Iterator[Stop]:
    """Note signals instead of dying of them. Inside another `listen` of this process: the same note.

    to_the_end: the process ends right after this, with an exit code that says why. A signal that comes then (schedulers and
    launchers send several) must not put another in its place, so nothing is let in any more."""
    global _listening
    if _listening is not None or threading.current_thread() is not threading.main_thread():
        yield _listening or Stop()
        return
    stop = _listening = Stop()

    def handle(number: int, _: Any) -> None:
        stop.ask(signal.Signals(number).name)

    heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield stop
    finally:
        if to_the_end:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number, handler in before.items():
            signal.signal(number, handler)
        _listening = None


@contextmanager
def held_back() -> Iterator[None]:
    """For a launcher that starts a process: it begins with the signals blocked, until it calls `listen`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
