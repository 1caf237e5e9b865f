"""Why did a run end? Both ends of it: a rank that fails says so to its launcher; the launcher finds the cause among many.

When one rank dies, the others fail within milliseconds because it is gone ("Connection closed by peer"), and whoever prints
first is rarely the one to blame. So the launcher collects for a moment and then chooses: a rank that a signal killed; else
a rank that failed by itself; else one whose connection broke; among equals the first in time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .environment import REPORT

_FROM_PEERS = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|TCPStore|lost rank 0", re.IGNORECASE)
_FROM_PEERS_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_MOST = 16_000  # characters of a message; a pipe takes 64 KiB without anybody reading


@dataclass(frozen=True)
class Failure:
    """What a rank says about its own end."""

    kind: str
    text: str  # one screen: what, where, what to do, where the traceback is
    moment: float  # time.monotonic(), one clock for all processes of a machine

    @classmethod
    def of(cls, error: BaseException, log: Path) -> Failure:
        moment = time.monotonic()
        if hasattr(error, "exit_code"):  # made for people: its words are enough
            text = f"{error}\ntraceback: {log}"
        else:
            from ..observe.logs import explain

            text = explain(error, log)
        return cls(type(error).__name__, text[:_MOST], moment)

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def from_peers(self) -> bool:
        """It failed because another rank had."""
        return self.kind in _FROM_PEERS_KINDS or bool(_FROM_PEERS.search(self.headline))


def report(failure: Failure, environ: Mapping[str, str]) -> bool:
    """In a rank: tell the launcher, if it is ours."""
    if REPORT not in environ:
        return False
    with suppress(OSError, ValueError):
        os.write(int(environ[REPORT]), json.dumps(vars(failure)).encode())
        return True
    return False


def read_report(pipe: int) -> Failure | None:
    """In the launcher: what a rank that has ended said, if anything."""
    with suppress(OSError, ValueError, TypeError):
        return Failure(**json.loads(os.read(pipe, 65536)))  # one short write arrives in one read
    return None


@dataclass
class End:
    """How one rank ended."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal
    log: Path
    last_line: str = ""
    failure: Failure | None = None
    moment: float = field(default_factory=time.monotonic)

    @property
    def headline(self) -> str:
        if self.failure:
            return self.failure.headline
        if self.status < 0:
            name = _signal_name(-self.status)
            why = " (by the system, because memory ran out, or by somebody)" if name == "SIGKILL" else ""
            return f"was killed by {name}{why}"
        return f"ended with exit code {self.status}"

    @property
    def weight(self) -> tuple[int, float]:
        """Causes first."""
        if self.failure:
            return (3 if self.failure.from_peers else 1), self.failure.moment
        if self.status < 0:  # a watchdog of NCCL aborts when a peer is gone
            return (2 if -self.status == signal.SIGABRT else 0), self.moment
        return 1, self.moment


def root(ends: Sequence[End]) -> End:
    return min(ends, key=lambda end: end.weight)


def describe(ends: Sequence[End], world: int) -> str:
    """The cause in words; its first line says who and what."""
    first = root(ends)
    alike = [end for end in ends if end.headline == first.headline]
    if len(alike) == world > 1:
        who = f"all {world} ranks"
    else:
        who = f"rank {first.rank} (pid {first.pid})"
    if first.failure:
        return f"{who}: " + first.failure.text.replace("\n", "\n  ")
    said = f'\n  last line of its log: "{first.last_line}"' if first.last_line else ""
    return f"{who} {first.headline}{said}\n  log: {first.log}"


def last_line(log: Path, start: int) -> str:
    """The last line that was written to `log` after byte `start`, without what terminals draw with."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return "".join(each for each in lines[-1] if each.isprintable())[:300] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
