"""How long a rank works where it waits for nobody.

Ranks that share a sequence meet in every layer, so a step takes equally long on all of them: the slow one works, the others wait.
What tells them apart is a stretch without a collective in it. The final norm, the head and the loss are such a stretch: a rank
computes them on its own tokens, as many as any other rank has, and they are a good sample of its speed. Reading data is
another.

On a GPU two events are put around it, which cost nothing and are read after the step; on a CPU it is the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base import faults


class OwnTime:
    """Seconds since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []  # begin and end, of work that the GPU may not have done yet

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda" or not torch.cuda.is_initialized():  # the latter: a dry run on a machine without a GPU
            begin = time.perf_counter()
            yield
            faults.drag(time.perf_counter() - begin)
            self._seconds += time.perf_counter() - begin
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        if faults.slows():
            end.synchronize()
            faults.drag(begin.elapsed_time(end) / 1e3)
            end.record()
        self._events.append((begin, end))

    def take(self) -> float:
        """After a step whose numbers are on the host: everything measured is done by then."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds
