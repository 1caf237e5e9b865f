"""The order of a step on real ranks, from a trace: what was queued when, and when it ran.

Names are given to what the host queues (record_function); a kernel has the name under which it was queued. One rank comes late to
chosen exchanges, so that whoever waits for them too early is seen to wait."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ithaca.engine.attention.stages import StagedAttention
from ithaca.verify.case import Case, Session

LATE = 0.2  # seconds: a hundred times an attention of this size


@dataclass(frozen=True)
class Kernel:
    name: str
    label: str  # "", or what of which stage it was queued for
    queued: float  # microseconds, as all times
    start: float
    end: float
    stream: int

    @property
    def exchange(self) -> bool:
        return "nccl" in self.name and "SendRecv" in self.name

    @property
    def gather(self) -> bool:
        return "nccl" in self.name and "AllGather" in self.name

    @property
    def computes(self) -> bool:
        return "nccl" not in self.name


def traced(case: Case, late_stage: int | None) -> list[Kernel]:
    """One step of `case`; the last rank comes late to every exchange of `late_stage`. Collective; kernels of this rank."""
    session = Session(case)
    data = session.data()
    for _ in range(2):
        session.measure([data])
    late = dist.get_rank() == dist.get_world_size() - 1
    torch.cuda.synchronize()
    dist.barrier()
    with (
        named(late_stage if late else None),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
    ):
        session.measure([data])
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(), strict=False)["traceEvents"])


@contextmanager
def named(late_stage: int | None) -> Iterator[None]:
    """Every stage of attention under its own name."""
    own = {name: getattr(StagedAttention, name) for name in ("_bring", "_bring_outputs", "_attend", "_attend_backward")}

    def named_as(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: StagedAttention, *args: Any) -> Any:
            stage = args[2] if what.startswith("_bring") else self.schedule.index(args[0])
            if what.startswith("_bring") and stage == late_stage:
                time.sleep(LATE)
            with record_function(f"{what} {stage}"):
                return call(self, *args)

        return method

    for name, call in own.items():
        setattr(StagedAttention, name, named_as(name, call))
    try:
        yield
    finally:
        for name, call in own.items():
            setattr(StagedAttention, name, call)


def read(events: list[dict[str, Any]]) -> list[Kernel]:
    """Kernels in the order in which they were queued."""
    queued = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    labels = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("_")]
    kernels = []
    for event in events:
        if event.get("cat") != "kernel" or event["args"].get("correlation") not in queued:
            continue
        call = queued[event["args"]["correlation"]]
        at = call["ts"]
        around = [e for e in labels if e["ts"] <= at <= e["ts"] + e["dur"] and e["tid"] == call["tid"]]
        label = max(around, key=lambda e: e["ts"])["name"] if around else ""
        kernels.append(
            Kernel(event["name"], label, at, event["ts"], event["ts"] + event["dur"], event["args"]["stream"])
        )
    return sorted(kernels, key=lambda kernel: kernel.queued)


@dataclass(frozen=True)
class Part:
    """What was queued under one name, one behind the other."""

    what: str
    stage: int
    kernels: list[Kernel]

    @property
    def exchanges(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.exchange]

    @property
    def computes(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.computes]


def parts(kernels: list[Kernel]) -> list[Part]:
    found: list[Part] = []
    for kernel in kernels:
        if not kernel.label:
            continue
        what, stage = kernel.label.split()
        if not found or (found[-1].what, found[-1].stage) != (what, int(stage)):
            found.append(Part(what, int(stage), []))
        found[-1].kernels.append(kernel)
    return found


def ahead(kernels: list[Kernel]) -> list[tuple[Part, Part]]:
    """(attention of a stage, how the next stage was brought), of all stages that have a next one, in all layers, both ways."""
    found, pairs = parts(kernels), []
    for number, part in enumerate(found):
        if part.what.startswith("_attend"):
            bring = "_bring_outputs" if part.what == "_attend_backward" else "_bring"
            before = [
                other
                for other in found[max(0, number - 3) : number]
                if (other.what, other.stage) == (bring, part.stage + 1)
            ]
            pairs += [(part, other) for other in before]
    return pairs
