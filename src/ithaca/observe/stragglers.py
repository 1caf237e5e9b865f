"""Which rank is slow? Own times of all ranks (own_time.py), step by step, and a word when one of them stands out.

A single step says little: a page fault, a neighbour on the machine. So a rank is compared by the median of its last steps with the
median of all ranks, and named when it is half as slow again and the difference is felt in the step. Named once; again only
after it has recovered, or when another one is slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 9  # steps; odd, so that the median is a step that was
SLOWER = 1.5  # times the median
FELT = 0.02  # of a step


@dataclass(frozen=True)
class Straggler:
    rank: int
    ratio: float  # its time over the median
    seconds: float  # of its own, a step
    usual: float  # of the others

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is {self.ratio:.1f}× slower than the median: {self.seconds:.3g} s instead of {self.usual:.3g} s "
            f"for the same work, over the last {WINDOW} steps; all ranks wait for it. Look at its GPU (clocks, temperature, other "
            "programs), its disk and its host"
        )


class Stragglers:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._named: int | None = None

    def add(self, own: Sequence[float], step: float) -> Straggler | None:
        """own: seconds of each rank in this step; step: of the whole step. -> one to speak about"""
        self._steps.append(tuple(own))
        if len(own) < 3 or len(self._steps) < WINDOW:  # of two ranks, who is the slow one?
            return None
        medians = [median(times) for times in zip(*self._steps, strict=True)]
        usual = median(medians)
        rank = max(range(len(medians)), key=medians.__getitem__)
        if usual <= 0 or medians[rank] < SLOWER * usual or medians[rank] - usual < FELT * step:
            self._named = None
            return None
        if rank == self._named:
            return None
        self._named = rank
        return Straggler(rank, medians[rank] / usual, medians[rank], usual)
