"""What a plan says: a stack, what it holds and how long it takes, whether that fits, and why it is so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..config.sizes import format_bytes
from ..stack import Stack
from .hardware import Hardware
from .job import Memory
from .model import ModelSizes
from .speed import Speed

CONTEXT = 1.2e9  # bytes of the CUDA context and of NCCL's buffers
WORKSPACE = 0.1e9  # of matrix products
SLACK = 0.03  # of the peak, that the allocator holds in holes between blocks
HOST_SHARE = 0.85  # of a machine's memory that may be pinned


@dataclass
class Plan:
    model: ModelSizes
    hardware: Hardware
    context: int
    rows: int
    stack: Stack
    memory: Memory
    speed: Speed
    fits: bool
    optimizer: str = "adamw"
    lora: int = 0
    reasons: list[tuple[str, Any, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    around: bool = True  # count what surrounds tensors on a GPU; CPU tensors have nothing around them

    @property
    def budget(self) -> int:
        return self.hardware.gpu.memory

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes by phase and holder, with what surrounds our own tensors."""
        if not self.around:
            return {phase: dict(by) for phase, by in self.memory.phases.items()}
        found = {}
        for phase, by in self.memory.phases.items():
            whole = dict(by)
            whole["workspace"] = whole.get("workspace", 0) + int(WORKSPACE)
            whole["slack"] = int(SLACK * sum(by.values()))
            whole["context"] = int(CONTEXT)
            found[phase] = whole
        return found

    @property
    def peak(self) -> int:
        return max(sum(by.values()) for by in self.phases.values())

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated will say."""
        return self.memory.peak + (int(WORKSPACE) if self.around else 0)

    @property
    def shares(self) -> dict[str, float]:
        """What the plan takes of each budget there is: more than 1 does not fit."""
        ranks = self.hardware.ranks_per_node
        found = {"GPU memory": self.peak / self.budget}
        if self.hardware.host:
            found["host memory"] = self.memory.host * ranks / (HOST_SHARE * self.hardware.host)
        if self.hardware.disk:
            found["disk"] = self.memory.disk * ranks / self.hardware.disk
        return found

    @property
    def excess(self) -> float:
        return sum(max(0.0, share - 1) for share in self.shares.values())

    @property
    def shortages(self) -> list[str]:
        """What does not fit, in words."""
        ranks, host, disk = self.hardware.ranks_per_node, self.hardware.host or 0, self.hardware.disk or 0
        words = {
            "GPU memory": lambda: f"{format_bytes(self.peak)} of {format_bytes(self.budget)}",
            "host memory": lambda: (
                f"{format_bytes(self.memory.host * ranks)} pinned a machine, of {format_bytes(host)} at most {HOST_SHARE:.0%}"
            ),
            "disk": lambda: f"{format_bytes(self.memory.disk * ranks)} a machine of {format_bytes(disk)}",
        }
        return [f"{name} ({words[name]()})" for name, share in self.shares.items() if share > 1]

    def json(self) -> dict[str, Any]:
        gpu = self.hardware.gpu
        return {
            "plan": 1,
            "model": self.model.json(),
            "hardware": {
                "gpus": self.hardware.count, "gpu": gpu.name, "gpu_memory": gpu.memory,
                "host_memory": self.hardware.host, "disk": self.hardware.disk,
            },
            "context": self.context, "rows": self.rows, "optimizer": self.optimizer, "lora": self.lora,
            "stack": asdict(self.stack),
            "fits": self.fits, "budget": self.budget, "spare": self.budget - self.peak,
            "phases": self.phases, "peak": self.peak, "peak_phase": self.memory.peak_phase,
            "allocated": self.allocated, "host": self.memory.host, "disk": self.memory.disk,
            "time": {
                "step": self.speed.seconds, "tokens_per_second": self.speed.tokens_per_second,
                "parts": self.speed.parts, "bound_by": self.speed.bound_by,
            },
            "reasons": [{"field": name, "value": value, "why": why} for name, value, why in self.reasons],
            "advice": self.advice,
        }  # fmt: skip
