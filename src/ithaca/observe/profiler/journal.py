"""A journal of one step: every allocation and every free, with its time, phase, category, module and line of code.

The dry run's tracker, on real tensors, that writes down what it sees instead of only its peaks. Reading the journal back gives the
largest moment and who held what in it, the largest moment of every phase, and memory over time.

Kernels also take memory inside, which no operator returns: cuDNN's backward attention sums dq in fp32 there. On a GPU torch's own
counters are read around every operator, and what was taken and given back in between counts as "workspace" for that moment.

Times are those at which the CPU asked for memory. Asking runs ahead of the GPU, and every operator is slowed down by being
watched, so the order is exact and distances are not.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...base.holding import CATEGORIES, PHASES
from ...planner.dry_run.tracker import LARGE, Held, LiveBytes
from ..report.decimate import pick_stacked

INSIDE = LARGE  # bytes inside an operator that are worth an entry
WORKING = ("residual", "attention", "exchange", "tile")  # categories of what a layer works with
MOMENTS = 2000  # of the timeline that is kept


class Journal(LiveBytes):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.allocated = 0  # torch's own maximum, of a GPU
        self.labels: list[Held] = []
        self.seconds, self.moved, self.who = array("d"), array("q"), array("l")
        self.settled = bytearray()  # 0 between the two halves of a change
        self.phases: list[tuple[int, str, float]] = []  # the entry at which each phase begins, and when that was
        self._known: dict[tuple[str, str, str], int] = {}
        self._counts = device.type == "cuda"
        self._began = time.perf_counter()

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.phases.append((len(self.seconds), phase, time.perf_counter() - self._began))

    def hold(self, name: str, nbytes: int, line: str) -> None:
        """Bytes that no tensor of ours has."""
        self._move(Held(None, name, nbytes, line), nbytes)

    def keep(self, module: str, but: torch.Tensor) -> None:
        """A layer's forward is over: what it made and what still lives waits for backward, except for its result."""
        result = id(but.untyped_storage())
        for key, held in list(self._held.items()):
            inside = held.module == module or held.module.startswith(f"{module}.")
            storage = held.reference and held.reference()
            if inside and held.category in WORKING and key != result and storage is not None:
                self._change(storage, held.nbytes, "kept", held.line, held.module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it comes again with its shards, which are what takes memory
        if not self._counts:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._peak_so_far()
        torch.cuda.reset_peak_memory_stats(self.device)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        peak, now = self._peak_so_far()
        if peak - now >= INSIDE:
            inside = Held(None, "workspace", peak - now, f"inside {func}", self.module)
            self._move(inside, inside.nbytes)
            self._move(inside, -inside.nbytes)
        return out

    def finish(self) -> None:
        if self._counts:
            self._peak_so_far()

    def _peak_so_far(self) -> tuple[int, int]:
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        self.allocated = max(self.allocated, counts["peak"])
        return counts["peak"], counts["current"]

    def _move(self, held: Held, nbytes: int, settled: bool = True) -> None:
        super()._move(held, nbytes, settled)
        key = (held.category, held.module, held.line)
        if key not in self._known:
            self._known[key] = len(self.labels)
            self.labels.append(held)
        self.seconds.append(time.perf_counter() - self._began)
        self.moved.append(nbytes)
        self.who.append(self._known[key])
        self.settled.append(settled)

    def _note(self) -> None:
        """Peaks are read from the journal."""


@dataclass
class Account:
    """What a journal says."""

    peak: int
    peak_phase: str
    categories: dict[str, int]  # at the peak
    modules: list[tuple[str, int]]  # at the peak, largest first
    lines: list[tuple[str, int]]
    phases: dict[str, dict[str, int]]  # at the largest moment of each
    timeline: dict[str, Any]  # seconds, categories: as docs/reference/report.md has it; phases: when each begins


def read(journal: Journal) -> Account:
    """The first phase is what is there before the others begin."""
    (start, phase, _), *_ = journal.phases
    names = [held.category for held in journal.labels]
    by: Counter[str] = Counter()
    begins = {entry: name for entry, name, _ in journal.phases}
    tops: dict[str, tuple[int, int, int]] = {}  # phase -> bytes, entry, point
    points: list[int] = []
    series: dict[str, array] = {name: array("q") for name in CATEGORIES if name in set(names)}
    total = 0
    for at in range(len(journal.seconds)):
        phase = begins.get(at, phase)  # where two begin at once, the later
        by[names[journal.who[at]]] += journal.moved[at]
        total += journal.moved[at]
        if at < start - 1 or not journal.settled[at]:
            continue
        points.append(at)
        for name, values in series.items():
            values.append(by[name])
        if total > tops.get(phase, (0, 0, 0))[0]:
            tops[phase] = (total, at, len(points) - 1)
    phases = {name: _column(series, tops[name][2]) for name in PHASES if name in tops}
    peak_phase = max(tops, key=lambda name: tops[name][0])
    peak, last, _ = tops[peak_phase]
    held: Counter[int] = Counter()
    for at in range(last + 1):
        held[journal.who[at]] += journal.moved[at]
    return Account(
        peak, peak_phase, phases[peak_phase],
        _ranked(held, lambda label: journal.labels[label].module or "outside of modules"),
        _ranked(held, lambda label: journal.labels[label].line),
        phases,
        _timeline(journal, series, points),
    )  # fmt: skip


def _column(series: dict[str, array], at: int) -> dict[str, int]:
    return {name: values[at] for name, values in series.items() if values[at]}


def _ranked(held: Counter[int], name: Any) -> list[tuple[str, int]]:
    totals: Counter[str] = Counter()
    for label, nbytes in held.items():
        totals[name(label)] += nbytes
    return [(key, nbytes) for key, nbytes in totals.most_common() if nbytes]


def _timeline(journal: Journal, series: dict[str, array], points: list[int]) -> dict[str, Any]:
    """The moments that show all there is: extremes of every stretch, by category and in sum."""
    kept = pick_stacked(list(series.values()), MOMENTS)
    zero = journal.phases[0][2]
    return {
        "seconds": [round(max(0.0, journal.seconds[points[at]] - zero), 6) for at in kept],
        "categories": {name: [values[at] for at in kept] for name, values in series.items()},
        "phases": [{"name": phase, "from": round(at - zero, 6)} for _, phase, at in journal.phases[1:]],
    }
