"""One training step as a plan sees it, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..stack import Stack
from .model import ModelSizes

HALF, FULL = 2, 4  # bytes of bf16 and fp32
# Of the code, which cannot be imported here without torch; a test compares them.
PROJECTION_TILES, TILES_PER_PIECE = 4, 8
HOLD_BYTES, OVERLAP_BYTES, IN_FLIGHT, TABLE_BYTES = 2**30, 2**29, 2**30, 2**27


@dataclass(frozen=True)
class Job:
    """One training step, as a rank sees it."""

    model: ModelSizes
    stack: Stack
    context: int
    world: int = 1
    rows: int = 1
    kernel: str = "fa4"
    optimizer_bytes: float = 8.0  # for each trained weight
    lora: int = 0  # rank of adapters on all linear layers; 0 = all weights are trained


@dataclass
class Memory:
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    host: int = 0
    disk: int = 0

    @property
    def peak(self) -> int:
        return max(sum(each.values()) for each in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
