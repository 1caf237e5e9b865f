"""What a plan says: a stack, what it holds and how long it takes, whether that fits, and why it is so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.kernels import KERNELS
from ..base.units import format_bytes
from ..engine.job import Job, Memory
from ..engine.model.sizes import ModelSizes, extension
from ..stack import Stack
from .hardware import Hardware
from .speed import HOST_RATE, Speed

CONTEXT = 1.2e9  # bytes of the CUDA context and of NCCL's buffers
WORKSPACE = 0.1e9  # of matrix products
SLACK = 0.03  # of the peak, that the allocator holds in holes between blocks
HOST_SHARE = 0.85  # of a machine's memory that may be pinned
PROCESS = int(2e9)  # bytes of a process that trains: Python, torch, CUDA and kernels; 1.5 to 2.0 GB on an H200


@dataclass
class Plan:
    job: Job  # what was asked
    hardware: Hardware
    memory: Memory
    predicted: Speed | None  # None: a model without arithmetic here, or a GPU without a rate (`untimed` says which)
    fits: bool
    reasons: list[tuple[str, Any, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    around: bool = True  # count what surrounds tensors on a GPU; CPU tensors have nothing around them
    may_offload: bool = False  # nobody has said where weights and states wait
    executed: int = 0  # layers that a dry run has executed to count this; 0 = arithmetic

    @property
    def model(self) -> ModelSizes:
        return self.job.model

    @property
    def stack(self) -> Stack:
        return self.job.stack

    @property
    def speed(self) -> Speed:
        """Where it is predicted; what cannot be done without it is refused by name."""
        if self.predicted is None:
            raise ValueError(
                f"{self.untimed}, so no time is predicted, and this cannot be done without one; "
                "`ithaca plan` says what it holds, and `ithaca profile` measures it"
            )
        return self.predicted

    @property
    def untimed(self) -> str | None:
        """Why there is no time, if there is none."""
        if self.predicted is not None:
            return None
        if self.executed:
            return f"{self.model.name} has no arithmetic here"
        return f"nobody has run this on {self.hardware.gpu.name}: its attention kernels have no known rate"

    @property
    def seconds(self) -> float | None:
        """Of a step, where they are predicted."""
        return self.predicted and self.predicted.seconds

    @property
    def context(self) -> int:
        return self.job.context

    @property
    def rows(self) -> int:
        return self.job.rows

    @property
    def budget(self) -> int:
        return self.hardware.gpu.memory

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes by phase and holder, with what surrounds our own tensors."""
        if not self.around:
            return {phase: dict(by) for phase, by in self.memory.phases.items()}
        phases = {}
        for phase, by in self.memory.phases.items():
            whole = dict(by)
            whole["workspace"] = whole.get("workspace", 0) + int(WORKSPACE)
            whole["slack"] = int(SLACK * sum(by.values()))
            whole["context"] = int(CONTEXT)
            phases[phase] = whole
        return phases

    @property
    def peak(self) -> int:
        return max(sum(by.values()) for by in self.phases.values())

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated will say."""
        return self.memory.peak + (int(WORKSPACE) if self.around else 0)

    @property
    def host(self) -> int:
        """Bytes of a machine's memory: the store, what is offloaded, and copies for a checkpoint that is being written."""
        return (self.memory.host + self.memory.snapshot) * self.hardware.ranks_per_node

    @property
    def besides(self) -> int:
        """Bytes of host memory that a GPU's process takes besides: what is not pinned, and what a disk store keeps near where there
        is room."""
        return PROCESS + self.memory.near

    @property
    def disk(self) -> int:
        """Bytes of a machine's scratch space."""
        return self.memory.disk * self.hardware.ranks_per_node

    @property
    def shares(self) -> dict[str, float]:
        """What the plan takes of each budget there is: more than 1 does not fit."""
        shares = {"GPU memory": self.peak / self.budget}
        if self.hardware.host is not None:
            shares["host memory"] = _share(self.host, HOST_SHARE * self.hardware.host)
        if self.hardware.disk is not None:
            shares["disk"] = _share(self.disk, self.hardware.disk)
        return shares

    @property
    def misplaced(self) -> float:
        """Bytes of a rank for which the host or the disk has no room."""
        host, disk, ranks = self.hardware.host, self.hardware.disk, self.hardware.ranks_per_node
        short = 0.0 if host is None else max(0.0, self.host - HOST_SHARE * host)
        return (short + (0.0 if disk is None else max(0, self.disk - disk))) / ranks

    @property
    def assumed(self) -> list[str]:
        """What the answer rests on that nobody has said, or measured."""
        job, hardware = self.job, self.hardware
        assumptions = []
        if "host" in hardware.assumed:
            assumptions.append(
                f"{format_bytes(hardware.host or 0)} of host memory a machine, as usual with {hardware.gpu.name} (--host)"
            )
        if "disk" in hardware.assumed:
            assumptions.append(f"{format_bytes(hardware.disk or 0)} of scratch space a machine (--disk)")
        if hardware.gpu.probed is None:  # nobody has looked whether they are there
            kernels = {job.kernel_of(layer) for layer in range(job.model.layers)}
            assumptions += [KERNELS[name].condition for name in sorted(kernels) if KERNELS[name].condition]
        if not hardware.gpu.cuda:
            assumptions.append(
                f"torch for ROCm holds on {hardware.gpu.name} what torch for CUDA holds on an H200: not measured, nor has anything "
                "here been run on it"
            )
        # of one GPU the link is slower than any host's memory
        if job.offload and self.predicted and hardware.ranks_per_node > 1:
            assumptions.append(
                f"states come from host memory and go back at {format_bytes(HOST_RATE)} a second a machine, all its ranks together"
            )
        if job.processors and self.predicted:
            assumptions.append("deterministic kernels are as fast as others, which they are not")
        if any("layers." in target for target in job.targets) and job.lora:
            assumptions.append("adapters in every layer, though lora targets name some of them")
        return assumptions

    @property
    def too_long(self) -> str | None:
        """What a run needs for a context that the model was not made for."""
        longest, pretrained = self.model.longest, self.model.pretrained
        if longest is None or pretrained is None or self.context <= longest:
            return None
        return (
            f"{self.model.name} was made for {longest:,} positions: a run at {self.context:,} needs "
            f"{extension(self.context, pretrained, self.model.family)}"
        )

    @property
    def excess(self) -> float:
        return sum(max(0.0, share - 1) for share in self.shares.values())

    @property
    def shortages(self) -> list[str]:
        """What does not fit, in words."""
        words = {
            "GPU memory": lambda: f"{format_bytes(self.peak)} of {format_bytes(self.budget)}",
            "host memory": lambda: (
                f"{format_bytes(self.host)} a machine, of {'an assumed ' * ('host' in self.hardware.assumed)}"
                f"{format_bytes(self.hardware.host or 0)} at most {HOST_SHARE:.0%}"
            ),
            "disk": lambda: (
                f"{format_bytes(self.disk)} a machine of {'an assumed ' * ('disk' in self.hardware.assumed)}"
                f"{format_bytes(self.hardware.disk or 0)}"
            ),
        }
        return [f"{name} ({words[name]()})" for name, share in self.shares.items() if share > 1]

    def json(self) -> dict[str, Any]:
        gpu = self.hardware.gpu
        return {
            "plan": 1,
            "model": self.model.json(),
            "hardware": {
                "gpus": self.hardware.count, "gpu": gpu.name, "gpu_memory": gpu.memory,
                "host_memory": self.hardware.host, "disk": self.hardware.disk, "rates": self.hardware.rates,
                "links": self.hardware.about_links,
            },
            "context": self.context, "rows": self.rows, "accumulation": self.job.accumulation,
            "optimizer": self.job.optimizer, "offload_optimizer": self.job.offload, "lora": self.job.lora,
            "lora_targets": list(self.job.targets) if self.job.lora else [], "quantize": self.job.quantize,
            "stack": asdict(self.stack),
            "assumed": self.assumed, "too_long": self.too_long,
            "fits": self.fits, "budget": self.budget, "spare": self.budget - self.peak,
            "phases": self.phases, "peak": self.peak, "peak_phase": self.memory.peak_phase,
            "allocated": self.allocated, "host": self.memory.host, "disk": self.memory.disk,
            "snapshot": self.memory.snapshot, "host_besides": self.besides,
            "counted_by": f"a dry run of its own code, {self.executed} layers executed" if self.executed else "arithmetic",
            "untimed": self.untimed,
            "time": self.predicted and {
                "step": self.speed.seconds, "tokens_per_second": self.speed.tokens_per_second,
                "parts": self.speed.parts, "bound_by": self.speed.bound_by,
            },
            "reasons": [{"field": name, "value": value, "why": why} for name, value, why in self.reasons],
            "advice": self.advice,
        }  # fmt: skip


def _share(need: float, room: float) -> float:
    return need / room if room else float("inf") if need else 0.0
