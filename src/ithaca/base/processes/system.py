"""What every process of a run asks the operating system for: to die with its launcher, to have a name, to be told of signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..exits import LOST

DUMP = signal.SIGUSR2
"""Asks a rank for its Python stacks. Answered in C: it works while the rank waits, and while it holds Python's lock."""

LAUNCHER = "ITHACA_LAUNCHER"  # the variable with the process id of our launcher
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


@contextmanager
def catch_signals(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Collect signals instead of dying of them. One that is ignored stays so: nohup, a background job."""
    arrived: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tie_to_launcher(environ: Mapping[str, str]) -> None:
    """In a worker: die with the launcher, however it dies. Ours, or torchrun's agent."""
    die_with(int(environ[LAUNCHER]) if LAUNCHER in environ else os.getppid())


def die_with(parent: int) -> None:
    """In its child."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(LOST)


def set_name(name: str) -> None:
    """Of this process, for ps and top; at most 15 characters."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def say(text: str) -> None:
    """To the user. A terminal that was closed must not end a run that is just about to save."""
    with suppress(OSError, ValueError):
        print(f"ithaca: {text}", file=sys.stderr, flush=True)


def usable_cores() -> int:
    """Cores that this process may use: by affinity, and by the quota of a container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores
