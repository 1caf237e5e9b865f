"""What is to be measured, as plain values that another process can be told, and what the planner expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..planner.config import hf_config
from ..planner.dry_run import Case, shortened_stack
from ..planner.model import sliced
from ..planner.plan import Plan
from ..planner.search import OPTIMIZERS, plan
from ..stack import PER_LAYER, Stack

ROOM = 0.7  # of the memory that is available, for what runs on a CPU


@dataclass(frozen=True, kw_only=True)
class Wanted:
    model: str  # as `ithaca plan` takes it
    stack: Stack
    context: int
    world: int = 1  # as rank 0 of so many
    rows: int = 1
    optimizer: str = "adamw"
    lora: int = 0
    layers: int | None = None  # run so many only
    states: bool = False  # hold weights and states of all layers all the same
    steps: int = 2  # that are timed
    cpu: bool = False
    limit: int | None = None  # bytes that torch's allocator may have

    @classmethod
    def of(cls, found: Plan, model: str, **more: Any) -> Wanted:
        """What a plan is about. model: the name that it was asked with."""
        return cls(
            model=model, stack=found.stack, context=found.context, world=found.hardware.count, rows=found.rows,
            optimizer=found.optimizer, lora=found.lora, **more,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.cpu else torch.device("cuda", 0)

    def case(self) -> Case:
        from ..config.schema import Lora

        return Case(
            hf_config(self.model), self.stack, self.context, world=self.world, rows=self.rows,
            lora=Lora(rank=self.lora) if self.lora else None, optimizer_bytes=OPTIMIZERS[self.optimizer],
        )  # fmt: skip

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Wanted:
        stack = dict(given["stack"])
        stack |= {name: tuple(stack[name]) for name in PER_LAYER if isinstance(stack[name], list)}
        return cls(**{**given, "stack": Stack(**stack)})


def expected(found: Plan, wanted: Wanted, kernel: str) -> Plan:
    """The plan of exactly what is run: its layers, and the attention kernel that the machine has."""
    sizes = sliced(found.model, wanted.layers)
    stack = shortened_stack(wanted.stack, sizes.layers)
    common: dict[str, Any] = dict(
        gpus=found.hardware, context=found.context, rows=found.rows, optimizer=found.optimizer, lora=found.lora,
        kernel=kernel,
    )  # fmt: skip
    part = plan(sizes, stack=stack, **common)
    if wanted.states and sizes.layers < found.model.layers:
        whole = plan(found.model, stack=found.stack, **common).memory.phases["step"]
        more = {
            name: whole[name] - part.memory.phases["step"][name] for name in ("parameters", "optimizer", "gradients")
        }
        for phase, by in part.memory.phases.items():
            for name, nbytes in more.items():
                if name != "gradients" or phase in ("backward", "step"):
                    by[name] = by.get(name, 0) + nbytes
    return replace(part, reasons=found.reasons, around=not wanted.cpu)


def tensors(plan: Plan) -> dict[str, dict[str, int]]:
    """What a plan says that torch will have allocated in each phase, by category."""
    beyond = ("slack", "context")
    return {phase: {name: each for name, each in by.items() if name not in beyond} for phase, by in plan.phases.items()}
