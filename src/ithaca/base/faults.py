"""Faults on demand, so that users can rehearse on their own cluster what a bad day will do to a run.

    ITHACA_ALLOW_FAULTS=1 ithaca train run.yaml --fault kill@1:41 --fault stop@2:60:bwd

A fault is `kind[=value]@rank:step[:point][!]`: what happens, on which rank, in which step (the one being trained, counted from 1,
as messages count; 0 is everything before the first), and where in it. The code that may fail calls `reach(point)`, which does
nothing unless a fault is armed for this rank.

A fault fires once per run folder. Otherwise the run that is restarted because of it would meet it again for ever; a name in
RUN/faults/ remembers that it has fired, written before it does. With `!` at the end it fires each time: that is how a crash
loop is rehearsed. The same fault given twice fires twice. `slow` begins at its step and stays.

No torch here: storage calls it too. docs/reference/reliability.md has the guide.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALLOW = "ITHACA_ALLOW_FAULTS"

POINTS = {
    "fwd": "in the forward, between the last layer and the loss",
    "bwd": "in the backward, between the loss and the last layer",
    "optim": "before the optimizer changes a weight",
    "data": "while the rows of the step are read",
    "eval": "before a batch of an evaluation after the step",
    "save.begin": "before a checkpoint of the step is begun",
    "save.after_shard": "after the rank has written its part",
    "save.before_manifest": "rank 0, all parts written",
    "save.before_rename": "rank 0, before the checkpoint is published",
    "save.before_latest": "rank 0, published, LATEST not yet",
    "load": "before a checkpoint is loaded (step 0)",
}

KINDS = {
    "kill": "SIGKILL",
    "term": "SIGTERM: the run saves and stops",
    "stop": "SIGSTOP: the process freezes",
    "segv": "reads address 0",
    "raise": "a RuntimeError",
    "oom": "a MemoryError",
    "exit": "ends the process with exit code VALUE (1)",
    "hang": "sleeps for VALUE seconds (for ever)",
    "gil": "sleeps for VALUE seconds (for ever) and holds Python's lock",
    "nan": "the rank's loss is NaN",
    "slow": "from this step on, what the rank does alone takes VALUE (3) times as long",
}

_FORM = re.compile(
    r"(?P<kind>[a-z]+)(=(?P<value>[0-9.]+))?@(?P<rank>\d+):(?P<step>\d+)(:(?P<point>[a-z_.]+))?(?P<again>!)?"
)
_EVER = 1e9  # seconds


class FaultRaised(RuntimeError):
    """What `raise` raises."""


@dataclass(frozen=True)
class Fault:
    text: str
    kind: str
    rank: int
    step: int
    point: str
    value: float | None
    again: bool  # fires whenever it is reached
    nth: int = 1  # of faults with the same text

    @property
    def mark(self) -> str:
        return self.text if self.nth == 1 else f"{self.text}#{self.nth}"


def parse(text: str) -> Fault:
    """ValueError says what is wrong and what could stand there."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--fault {text!r} is not of the form kind[=value]@rank:step[:point][!], such as kill@1:41:bwd"
        )
    kind, point = match["kind"], match["point"] or "fwd"
    if kind not in KINDS:
        raise ValueError(f"--fault {text!r}: there is no kind {kind!r}; there are {', '.join(KINDS)}")
    if point not in POINTS:
        raise ValueError(f"--fault {text!r}: there is no point {point!r}; there are {', '.join(POINTS)}")
    if kind in ("nan", "slow") and match["point"] not in (None, "fwd"):
        raise ValueError(f"--fault {text!r}: {kind} has no other point than fwd; leave :{point} out")
    if point == "load" and int(match["step"]) != 0:
        raise ValueError(f"--fault {text!r}: a checkpoint is loaded before the first step of a process; write :0:load")
    value = None
    if match["value"] is not None:
        if kind not in ("exit", "hang", "gil", "slow"):
            raise ValueError(f"--fault {text!r}: {kind} takes no value; leave ={match['value']} out")
        try:
            value = float(match["value"])
        except ValueError:
            raise ValueError(f"--fault {text!r}: {match['value']!r} is not a number") from None
    return Fault(text, kind, int(match["rank"]), int(match["step"]), point, value, bool(match["again"]))


def parse_all(texts: Sequence[str], environ: Mapping[str, str]) -> list[Fault]:
    """The faults of a command line. Refused unless the environment allows them: a typo must not break a real run."""
    if texts and environ.get(ALLOW) != "1":
        raise ValueError(
            f"--fault {texts[0]} would break this run on purpose; set {ALLOW}=1 in the environment of every rank if that is wanted"
        )
    seen: dict[str, int] = {}
    faults = []
    for text in texts:
        seen[text] = seen.get(text, 0) + 1
        fault = parse(text)
        faults.append(Fault(**{**vars(fault), "nth": seen[text]}))
    return faults


# A process is one rank of one run, so what is armed belongs to the process, like signal handlers do.
_armed: list[Fault] = []
_marks: Path | None = None
_step = 0


def arm(faults: Sequence[Fault], rank: int, folder: Path | None) -> None:
    """In a rank: from now on these may fire, except those of other ranks. folder: the run folder; None = nothing is remembered."""
    global _armed, _marks, _step
    _armed = [fault for fault in faults if fault.rank == rank]
    _marks, _step = None if folder is None else folder / "faults", 0


def armed() -> bool:
    return bool(_armed)


def at(step: int) -> None:
    """The step that begins."""
    global _step
    _step = step


def reach(point: str, step: int | None = None) -> None:
    """Called where a fault may be wanted. step: of what is done here, where that is not the step of `at`."""
    if not _armed:
        return
    for fault in list(_armed):
        if (
            fault.point == point
            and fault.kind not in ("nan", "slow")
            and _fires(fault, _step if step is None else step)
        ):
            _ACTS[fault.kind](fault)


def spoil(loss: Any) -> Any:
    """The loss of this rank, NaN if a fault wants it so."""
    if _armed and any([_fires(fault, _step) for fault in list(_armed) if fault.kind == "nan"]):
        return loss * float("nan")
    return loss


def slows() -> bool:
    """Whether this rank is to be slow now."""
    return any(fault.kind == "slow" and _step >= fault.step for fault in _armed)


def drag(seconds: float) -> None:
    """After work that took so long: longer, if this rank is to be slow."""
    for fault in _armed:
        if fault.kind == "slow" and _step >= fault.step:
            time.sleep(seconds * max(0.0, (fault.value or 3.0) - 1.0))


def _fires(fault: Fault, step: int) -> bool:
    if fault.step != step:
        return False
    if not fault.again:
        _armed.remove(fault)
        if _marks is not None:
            _marks.mkdir(parents=True, exist_ok=True)
            try:
                os.close(os.open(_marks / fault.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                return False  # in an earlier attempt
    print(f"fault: {fault.text}", file=sys.stderr, flush=True)  # into the rank's log: nobody shall search for its cause
    return True


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def _raise(fault: Fault) -> None:
    raise FaultRaised(f"fault {fault.text}")


def _out_of_memory(fault: Fault) -> None:
    raise MemoryError(f"fault {fault.text}")


def _hold_lock(fault: Fault) -> None:
    seconds = int(min(fault.value or _EVER, 2**31 - 1))
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL calls without giving up the lock, CDLL does not


_ACTS = {
    "kill": lambda fault: _send(signal.SIGKILL),
    "term": lambda fault: _send(signal.SIGTERM),
    "stop": lambda fault: _send(signal.SIGSTOP),
    "segv": lambda fault: ctypes.string_at(0),
    "raise": _raise,
    "oom": _out_of_memory,
    "exit": lambda fault: os._exit(int(1 if fault.value is None else fault.value)),
    "hang": lambda fault: time.sleep(_EVER if fault.value is None else fault.value),
    "gil": _hold_lock,
}
