"""Where the time of one step goes, from torch's profiler: kernels, and copies that nothing hid.

On a GPU its kernels are counted; on a CPU, operators, each without those it calls. A copy between device and host is hidden while
a kernel runs beside it; what is left is the time in which the GPU did nothing but copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[int, int]


@dataclass(frozen=True)
class Span:
    name: str
    start: int  # nanoseconds
    end: int
    lane: int = 0  # stream or thread: spans of one lane lie one behind the other, or inside each other


def read_spans(profiler: Any, device: str) -> list[Span]:
    """The spans of a torch.profiler.profile that has ended. device: "cuda" or "cpu"."""
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    spans = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != wanted or event.is_user_annotation():  # names that code gave to stretches of time
            continue
        start = event.start_ns()
        lane = event.device_resource_id() if device == "cuda" else event.start_thread_id()
        spans.append(Span(event.name(), start, start + event.duration_ns(), lane))
    return spans


def is_copy(span: Span) -> bool:
    """Between device and host; what moves inside the device is a kernel like others."""
    return span.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))


def by_time(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Seconds and calls by name, the most first. Time inside of a span that another one covers is the other's alone."""
    lanes: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    own: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for lane in lanes.values():
        around: list[Span] = []
        for span in sorted(lane, key=lambda span: (span.start, -span.end)):
            while around and around[-1].end <= span.start:
                around.pop()
            own[span.name][0] += span.end - span.start
            own[span.name][1] += 1
            if around:
                own[around[-1].name][0] -= min(span.end, around[-1].end) - span.start
            around.append(span)
    rows = [{"name": name, "seconds": spent / 1e9, "calls": calls} for name, (spent, calls) in own.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def copies_alone(spans: Iterable[Span]) -> tuple[float, float]:
    """Seconds of copies, and those of them in which no kernel ran."""
    spans = list(spans)
    copies = _union((span.start, span.end) for span in spans if is_copy(span))
    kernels = _union((span.start, span.end) for span in spans if not is_copy(span))
    whole = sum(end - start for start, end in copies)
    return whole / 1e9, (whole - _overlap(copies, kernels)) / 1e9


def busy(spans: Iterable[Span]) -> float:
    """Seconds in which at least one kernel ran."""
    return sum(end - start for start, end in _union((s.start, s.end) for s in spans if not is_copy(s))) / 1e9


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _overlap(first: list[Interval], second: list[Interval]) -> int:
    """Of two unions."""
    total = at = 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        look = at
        while look < len(second) and second[look][0] < end:
            total += min(end, second[look][1]) - max(start, second[look][0])
            look += 1
    return total
