"""Why did a run end? Both ends of it: a rank that fails says so to its launcher; the launcher finds the cause among many.

When one rank dies, the others fail within milliseconds because it is gone ("Connection closed by peer"), and whoever prints
first is rarely the one to blame. So the launcher collects for a moment and then chooses: a rank that a signal killed; else
a rank that failed by itself; else one whose connection broke; among equals the first in time.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...base import exits
from ...base.processes.process import signal_name
from .heartbeat import tell

_MOST = 16_000  # characters of a message: more than a screen, and a bound on what a broken rank can say


@dataclass(frozen=True)
class Failure:
    """What a rank says about its own end."""

    kind: str
    text: str  # one screen: what, where, what to do, where the traceback is
    moment: float  # time.monotonic(), one clock for all processes of a machine
    again: bool = False  # whether another try may succeed

    @classmethod
    def of(cls, error: BaseException, log: Path) -> Failure:
        moment = time.monotonic()
        if hasattr(error, "exit_code"):  # made for people: its words are enough
            text = f"{error}\ntraceback: {log}"
        else:
            from ...observe.logs import explain

            text = explain(error, log)
        return cls(type(error).__name__, text[:_MOST], moment, exits.worth_another_try(error))

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def short(self) -> str:
        """For one of many ranks that fail because another has."""
        return f"lost another rank ({self.headline[:160]}); {self.text.splitlines()[-1]}"

    @property
    def from_peers(self) -> bool:
        """It failed because another rank had."""
        return exits.from_peers(self.kind, self.headline)


def report(failure: Failure, environ: Mapping[str, str]) -> bool:
    """In a rank: tell the launcher, if it is ours."""
    return tell(environ, {"failure": vars(failure)}, wait=True)


@dataclass
class End:
    """How one rank ended."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal
    log: Path
    last_line: str = ""
    failure: Failure | None = None
    step: int = 0  # that it was in; 0 = none yet
    out_of_memory: bool = False  # the system says that it killed a process for want of memory
    moment: float = field(default_factory=time.monotonic)

    @property
    def headline(self) -> str:
        if self.failure:
            return self.failure.headline
        if self.status < 0:
            name, why = signal_name(-self.status), ""
            if self.out_of_memory:
                why = " (by the system: host memory ran out)"
            elif name == "SIGKILL":
                why = " (by the system, because memory ran out, or by somebody)"
            return f"was killed by {name}{self._at_step}{why}"
        return f"ended with exit code {self.status}{self._at_step}"

    @property
    def _at_step(self) -> str:
        return f" at step {self.step}" if self.step else ""

    @property
    def again(self) -> bool:
        """Whether another try may succeed."""
        if self.failure:
            return self.failure.again
        if self.out_of_memory or self.status > 128:  # the latter: it says itself that a signal ended it
            return False
        return self.status not in exits.TABLE or self.status in (exits.HANG, exits.LOST)

    @property
    def code(self) -> int:
        if self.out_of_memory:
            return exits.MEMORY
        return self.status if self.status in exits.TABLE or self.status > 128 else exits.LOST

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
        return f"{who}{first._at_step}: " + first.failure.text.replace("\n", "\n  ")
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
    return "".join(letter for letter in lines[-1] if letter.isprintable())[:300] if lines else ""
