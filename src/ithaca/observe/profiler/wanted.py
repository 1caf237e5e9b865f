"""What is to be measured, as plain values that another process can be told, and what the planner expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...base.kernels import with_windows
from ...config.schema import LINEARS, Lora
from ...engine.model.sizes import sliced
from ...planner.config import hf_config
from ...planner.dry_run.run import Case, shortened_stack
from ...planner.plan import Plan
from ...planner.search import again
from ...stack import PER_LAYER, Stack

ROOM = 0.7  # of the memory that is available, for what runs on a CPU


@dataclass(frozen=True, kw_only=True)
class Wanted:
    model: str  # as `ithaca plan` takes it
    stack: Stack
    context: int
    world: int = 1  # as rank 0 of so many
    rows: int = 1
    optimizer: str = "adamw"
    offload: bool = False
    lora: int = 0
    targets: tuple[str, ...] = LINEARS
    accumulation: int = 1
    deterministic: bool = False
    layers: int | None = None  # run so many only
    states: bool = False  # hold weights and states of all layers all the same
    steps: int = 2  # that are timed
    cpu: bool = False
    limit: int | None = None  # bytes that torch's allocator may have

    @classmethod
    def of(cls, found: Plan, model: str, **more: Any) -> Wanted:
        """What a plan is about. model: the name that it was asked with."""
        job = found.job
        return cls(
            model=model, stack=job.stack, context=job.context, world=job.world, rows=job.rows, optimizer=job.optimizer,
            offload=job.offload, lora=job.lora, targets=job.targets, accumulation=job.accumulation,
            deterministic=bool(job.processors), **more,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.cpu else torch.device("cuda", 0)

    def case(self) -> Case:
        return Case(
            hf_config(self.model), self.stack, self.context, world=self.world, rows=self.rows // self.accumulation,
            lora=Lora(rank=self.lora, targets=self.targets) if self.lora else None, optimizer=self.optimizer,
            offload=self.offload, accumulation=self.accumulation,
        )  # fmt: skip

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Wanted:
        stack = dict(given["stack"])
        stack |= {name: tuple(stack[name]) for name in PER_LAYER if isinstance(stack[name], list)}
        return cls(**{**given, "stack": Stack(**stack), "targets": tuple(given["targets"])})


def expected(found: Plan, wanted: Wanted, kernel: str) -> Plan:
    """The plan of exactly what is run: its layers, and the attention kernel that the machine has."""
    sizes = sliced(found.model, wanted.layers)
    stack = shortened_stack(replace(wanted.stack, attention="auto"), sizes.layers)
    ran = replace(found.job, kernel=kernel, windowed=with_windows(kernel))
    part = again(replace(ran, model=sizes), found.hardware, stack=stack)
    if wanted.states and sizes.layers < found.model.layers:
        whole = again(ran, found.hardware, stack=replace(found.stack, attention="auto")).memory.phases["step"]
        more = {
            name: whole.get(name, 0) - part.memory.phases["step"].get(name, 0)
            for name in ("parameters", "optimizer", "gradients")
        }
        for phase, by in part.memory.phases.items():
            for name, nbytes in more.items():
                if name != "gradients" or phase in ("backward", "step"):
                    by[name] = by.get(name, 0) + nbytes
    job = replace(part.job, stack=shortened_stack(wanted.stack, sizes.layers))
    return replace(part, job=job, reasons=found.reasons, around=not wanted.cpu)


def tensors(plan: Plan) -> dict[str, dict[str, int]]:
    """What a plan says that torch will have allocated in each phase, by category."""
    beyond = ("slack", "context")
    return {phase: {name: each for name, each in by.items() if name not in beyond} for phase, by in plan.phases.items()}
