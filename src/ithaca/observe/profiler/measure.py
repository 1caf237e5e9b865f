"""Runs the steps and measures them: time and peak as they are, then one step under torch's profiler, one under our own count.

Each instrument gets a step of its own, because each disturbs what another measures. The first step warms up (kernels are built,
host memory is pinned), the next ones run as in training, then one is traced, and the last one is counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.exits import MEMORY, Failed
from ...engine.offload.host import HostBuffer
from ...engine.offload.store import GpuStore, StoreReport
from ...planner.config import hf_config
from ...planner.dry_run.run import loss_phase
from .journal import Account, Journal, read
from .steps import Steps, ready
from .trace import busy, by_time, copies_alone, read_spans
from .wanted import Wanted
from .where import Names, tell_gradients, tell_residents, told_by_module

SNAPSHOT, TRACE = "memory.pickle", "trace.json.gz"
ENTRIES = 500_000  # of the memory history that is kept: a step has tens of thousands


@dataclass
class Measured:
    device: str  # "NVIDIA H200", or "CPU"
    kernels_of: str  # attention kernel that ran
    steps: list[dict[str, float | int | None]]
    account: Account
    store: StoreReport  # of the last step that ran undisturbed
    tokens: int  # of a step on this rank
    allocated: int | None = None  # torch's own maximum in the counted step; None on a CPU
    around: dict[str, int] = field(default_factory=dict)  # slack and context, of a GPU
    kernels: list[dict[str, Any]] = field(default_factory=list)
    busy: float | None = None  # seconds of the traced step in which a kernel ran
    copies: tuple[float, float] | None = None  # seconds of copies by the trace, and those beside which no kernel ran
    files: dict[str, str] = field(default_factory=dict)


class OutOfMemory(Failed):
    """used: bytes of tensors on the GPU at most; 0 where nobody counted."""

    def __init__(self, text: str, used: int) -> None:
        super().__init__(MEMORY, text)
        self.used = used


def measure(wanted: Wanted, folder: Path | None = None, say: Callable[[str], object] = lambda line: None) -> Measured:
    """folder: where trace and snapshot go; None = neither is made."""
    try:
        return _measure(wanted, folder, say)
    except (MemoryError, RuntimeError) as error:
        message = str(error).splitlines()[0] if str(error) else "out of memory"
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "can't allocate memory" not in message and "out of memory" not in message:  # as others say it
            raise
        used = torch.cuda.max_memory_allocated(wanted.device) if not wanted.cpu else 0
        raise OutOfMemory(message, used) from error


def _measure(wanted: Wanted, folder: Path | None, say: Callable[[str], object]) -> Measured:
    device, gpu = wanted.device, wanted.device.type == "cuda"
    if gpu:
        gc.collect()  # a model measured before is a circle of objects, and would be counted with this one
        torch.cuda.empty_cache()
        torch.cuda.set_device(device)
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (wanted.limit or whole) / whole), device)
    if wanted.job.processors:
        torch.use_deterministic_algorithms(True)
    with ready(wanted.job, hf_config(wanted.model), device, wanted.layers, wanted.states) as step:
        say("warm-up")
        step()
        steps = []
        for index in range(wanted.steps):
            say(f"step {index + 1} of {wanted.steps}")
            step.run.report()
            steps.append(timed(step, gpu))
        store = step.run.report()["store"]
        beside = around(device) if gpu else {}
        measured = Measured(
            torch.cuda.get_device_name(device) if gpu else "CPU",
            next(iter(step.run.kernels.chosen.values())).name,
            steps,
            Account(0, "", {}, [], [], {}, {}),
            store,
            step.tokens,
            around=beside,
        )
        if folder is not None:
            say("a step under torch's profiler")
            _trace(step, device, folder, measured)
        say("a step whose memory is counted")
        journal = _count(step, device)
        measured.account = read(journal)
        measured.allocated = journal.allocated if gpu else None
    return measured


def timed(step: Steps, gpu: bool) -> dict[str, float | int | None]:
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    if gpu:
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begin, "peak": torch.cuda.max_memory_allocated() if gpu else None}


def around(device: torch.device) -> dict[str, int]:
    """What the allocator held beyond what was in use at the peak, and what the device lost before it."""
    free, whole = torch.cuda.mem_get_info(device)
    return {
        "slack": torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device),
        "context": whole - free - torch.cuda.memory_reserved(device),
    }


def _trace(step: Steps, device: torch.device, folder: Path, measured: Measured) -> None:
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    with (
        _snapshot(folder / SNAPSHOT) if gpu else nullcontext(),
        profile(activities=activities, acc_events=True) as profiler,
    ):
        step()
        if gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / TRACE))
    measured.files["trace"] = TRACE
    if gpu:
        measured.files["snapshot"] = SNAPSHOT
    spans = read_spans(profiler, device.type)
    measured.kernels = by_time(spans)
    if gpu:
        measured.busy, measured.copies = busy(spans), copies_alone(spans)


@contextmanager
def _snapshot(path: Path) -> Iterator[None]:
    """torch's own record of the allocator, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _count(step: Steps, device: torch.device) -> Journal:
    run, names = step.run, Names(step.run)
    device = run.mesh.device
    gc.collect()
    journal = Journal(device)
    everything = gc.get_objects()
    for buffer in (obj for obj in everything if type(obj) is HostBuffer):
        journal.ignore(buffer.bytes)
    batch = [value for value in vars(step.batch).values() if isinstance(value, Tensor)]
    kept = [obj for obj in everything if type(obj) is Tensor and obj.device == device]
    kept = [tensor for tensor in kept if tensor.untyped_storage().nbytes()]  # FSDP2 has empty ones to fill later
    tell_residents(run, journal, names, step.optimizer, {"kept between steps": kept, "the batch": batch})
    del everything, kept, batch
    for name, tensor in step.held.items():
        journal.see(tensor, name, line="of the layers that are not run")
    if device.type == "cuda":
        torch.cuda.synchronize()
        journal.hold("workspace", max(0, torch.cuda.memory_allocated(device) - journal.total), "held by libraries")

    def begin(phase: str) -> None:
        if phase == "backward" and "gradients" in step.held:
            journal.see(step.held["gradients"], "gradients", line="of the layers that are not run")
        if phase == "step":
            tell_gradients(run, journal, names)
        journal.begin(phase)

    with (
        journal.watching(),
        told_by_module(run, journal, names),
        loss_phase(run, journal),
        _kept(run.on_device, journal),
    ):
        journal.begin("load")
        step(begin)
    if device.type == "cuda":
        torch.cuda.synchronize()
    journal.finish()
    return journal


@contextmanager
def _kept(store: GpuStore, journal: Journal) -> Iterator[None]:
    """A store on the device keeps references: what it holds is no longer part of what made it."""
    keep = store._keep

    def labelled(tensors: list[Tensor]) -> Any:
        for tensor in tensors:
            journal.see(tensor, "kept")
        return keep(tensors)

    store._keep = labelled
    try:
        yield
    finally:
        del store._keep
