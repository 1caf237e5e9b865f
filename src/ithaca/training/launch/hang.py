"""Which rank hangs? Ranks wait for each other, so when one of them hangs all of them stand still, and all run out of time together.

Told apart by what they last said (heartbeat.py), strongest evidence first:

    stopped      the system says so: SIGSTOP, a debugger
    silent       no sign of life for seconds, while others gave some: stuck with Python's lock held, or on a host that is cut off
    behind       an earlier step, or an earlier section of the same one
    elsewhere    in a line of code that is no collective, while the others are in one

Where nothing tells them apart, all are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .heartbeat import PERIOD, SECTIONS, Beat

QUIET = 5 * PERIOD  # no sign for so long is remarkable, when others are heard

_PLACES = {
    "setup": "while starting",
    "pack": "while packing data",
    "data": "in step {step}, waiting for data",
    "step": "in step {step}",
    "eval": "in the evaluation after step {step}",
    "save": "while saving step {step}",
}


@dataclass
class Sign:
    """What is known of one rank."""

    rank: int
    who: str  # rank 2 (pid 123), or rank 2 on host1
    heard: float  # when it was heard last, or started: time.monotonic()
    beat: Beat | None = None
    stopped: bool = False
    setup: float | None = None  # the limit of a rank that has not spoken yet

    def standing(self, now: float) -> float:
        """Seconds in its section."""
        return now - self.heard + (self.beat.age if self.beat else 0.0)

    def late(self, now: float) -> bool:
        limit = self.beat.limit if self.beat else self.setup
        return limit is not None and self.standing(now) > limit

    def silent(self, now: float, silence: float | None) -> bool:
        """No sign of life for too long. Before its first one, that is for the limit of the start to say."""
        return silence is not None and self.beat is not None and now - self.heard > silence


def hanging_ranks(signs: Sequence[Sign], now: float) -> list[Sign]:
    """The ranks that hang, of ranks that stand still. Those that others wait for, if that can be told."""
    tests: list[Callable[[Sign], bool]] = [
        lambda sign: sign.stopped,
        lambda sign: now - sign.heard > QUIET,
        lambda sign: _progress(sign) == min(map(_progress, signs)),
        lambda sign: sign.beat is None or not sign.beat.waiting,
    ]
    for test in tests:
        hanging = [sign for sign in signs if test(sign)]
        if 0 < len(hanging) < len(signs):
            return hanging
    return list(signs)


def _progress(sign: Sign) -> tuple[int, int]:
    if sign.beat is None:
        return (-1, 0)
    return (sign.beat.step, SECTIONS.index(sign.beat.section) if sign.beat.section in SECTIONS else 0)


def describe_hang(hanging: Sequence[Sign], now: float, world: int, silent: bool = False) -> str:
    """One line: who stands where, for how long. silent: it was their silence that gave them away."""
    first = hanging[0]
    if len(hanging) == world > 1:
        who = f"all {world} ranks"
    else:
        who = " and ".join(sign.who for sign in hanging[:4]) + (
            f" and {len(hanging) - 4} more" if len(hanging) > 4 else ""
        )
    place = _PLACES["setup"]
    if first.beat is not None:
        place = _PLACES.get(first.beat.section, first.beat.section).format(step=first.beat.step)
    quiet = now - first.heard
    if first.stopped:
        return (
            f"{who} {'is' if len(hanging) == 1 else 'are'} stopped (SIGSTOP?) {place}, for {first.standing(now):.0f} s"
        )
    if (silent or quiet > QUIET) and first.beat is not None:
        return f"{who} gave no sign of life for {quiet:.0f} s {place}"
    at = f", at {first.beat.where}" if first.beat and first.beat.where and len(hanging) == 1 else ""
    return f"{who} made no progress for {first.standing(now):.0f} s {place}{at}"
