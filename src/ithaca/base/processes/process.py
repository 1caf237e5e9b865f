"""A child process, from its start to its end: what all processes of ithaca have in common.

Each leads a session of its own: Ctrl-C in the terminal does not reach it, and what it starts can be found and ended with it. Who
started it waits for it, so how it ended is known.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


@dataclass
class Process:
    pid: int
    status: int | None = None  # exit code, or minus the signal

    def ended(self) -> bool:
        """If so, what it had started and left behind is killed."""
        if self.status is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.send(signal.SIGKILL, children=True)  # before it is reaped: until then nobody else can have its number
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status is not None

    def wait(self, seconds: float = inf) -> int | None:
        """Its status; None if it is still there by then."""
        until, pause = time.monotonic() + seconds, 0.0005
        while not self.ended() and time.monotonic() < until:
            time.sleep(pause := min(2 * pause, 0.05))
        return self.status

    def send(self, number: int, children: bool = False) -> None:
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if children else os.kill)(self.pid, number)


def how_it_ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile, processes whose parent ends become children of this one, not of the system's first process."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap(session: int, seconds: float = 0.0) -> None:
    """What a process of this number had started and left behind has become ours; it has been killed."""
    until = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while os.waitid(os.P_PGID, session, os.WEXITED | os.WNOHANG) or time.monotonic() < until:
            time.sleep(0.001)
