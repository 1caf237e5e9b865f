"""How fast a run is, when it will be done, and how much memory it takes.

The first steps of a run compile kernels, pin buffers and fill caches, so they are left out of the typical step as soon as there are
others. The typical step is the median of the last ones: a step beside a save does not move it. What happens between steps (data,
saves, evaluations) is added as a mean, because it does come again.

Times are of the host's clock: a step ends when its numbers are on the host, which the loss has to be anyway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..engine.mesh import Group
    from ..engine.offload.store import Store

WARM_UP = 2  # steps that are slower than those after them
WINDOW = 50  # steps that the median looks back


class StepTimer:
    """Times steps: `begin`, the step, `end`."""

    def __init__(
        self, *, warm_up: int = WARM_UP, window: int = WINDOW, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.count = 0  # steps so far
        self._cold = warm_up  # warm-up steps still to come
        self._steps: deque[float] = deque(maxlen=window)
        self._rough: float | None = None  # the last warm-up step: better than nothing
        self._between = 0.0  # seconds between warm steps, and how many times
        self._gaps = 0
        self._began: float | None = None
        self._ended: float | None = None

    def begin(self) -> None:
        self._began = self._clock()
        if self._ended is not None and self._cold == 0:
            self._between += self._began - self._ended
            self._gaps += 1

    def end(self) -> float:
        """-> seconds of the step"""
        assert self._began is not None, "end without begin"
        self._ended = self._clock()
        seconds, self._began = self._ended - self._began, None
        self.count += 1
        if self._cold:
            self._cold -= 1
            self._rough = seconds
        else:
            self._steps.append(seconds)
        return seconds

    @property
    def typical(self) -> float | None:
        """Seconds of a typical step; None before the first."""
        return median(self._steps) if self._steps else self._rough

    def eta(self, steps: int) -> float | None:
        """Seconds until so many further steps are done, saves and the like included; None before the first step."""
        if self.typical is None:
            return None
        return steps * (self.typical + (self._between / self._gaps if self._gaps else 0.0))


def tokens_per_second(tokens: int, seconds: float, devices: int) -> float:
    """Per device, of `tokens` that all devices together trained on."""
    return tokens / (seconds * devices)


class Gauge:
    """Reads memory and waiting of this rank: `begin` before a step that is logged, `read` after it.

    GPU memory is the most that torch had allocated since the last `read`, so a line also covers the steps and evaluations since the
    line before. The counts of the store begin anew with `begin`.
    """

    def __init__(self, device: torch.device, store: Store) -> None:
        self._device, self._store = device, store

    def begin(self) -> None:
        self._store.reset()

    def read(self) -> dict[str, Any]:
        """gpu_peak, host_peak, disk_peak, copy_wait of this rank, as in metrics.jsonl."""
        report = self._store.report()
        peak = None
        if self._device.type == "cuda":
            import torch

            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "gpu_peak": peak,
            "host_peak": self._store.host_bytes,
            "disk_peak": report.held_bytes if report.kind == "disk" else 0,
            "copy_wait": report.exposed_seconds,
        }


def largest(values: Mapping[str, float | None], group: Group, device: torch.device) -> dict[str, Any]:
    """The largest of each value over the ranks of a group; every rank gets them. One small all_reduce.

    None counts as less than any number. Every rank passes the same names in the same order.
    """
    if group.pg is None:
        return dict(values)
    import torch
    import torch.distributed as dist

    # float64 holds bytes exactly up to 2⁵³
    numbers = [float("-inf") if value is None else float(value) for value in values.values()]
    together = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group.pg)
    maxima: dict[str, Any] = {}
    for (name, value), most in zip(values.items(), together.tolist(), strict=True):
        maxima[name] = None if most == float("-inf") else most if isinstance(value, float) else int(most)
    return maxima
