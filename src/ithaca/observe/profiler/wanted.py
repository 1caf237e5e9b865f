"""What is to be measured, as plain values that another process can be told, and what the planner expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, get_type_hints

import torch

from ...base.kernels import with_windows
from ...engine.job import Job
from ...engine.model.shrink import depth_of
from ...engine.model.sizes import sliced
from ...planner.config import hf_config
from ...planner.dry_run.run import shortened, shortened_stack
from ...planner.own import counted, own_sizes
from ...planner.plan import Plan
from ...planner.search import look

ROOM = 0.7  # of the memory that is available, for what runs on a CPU


@dataclass(frozen=True, kw_only=True)
class Wanted:
    job: Job  # this machine stands for rank 0 of job.world
    model: str  # of the job, as `ithaca plan` takes it
    layers: int | None = None  # run so many only
    states: bool = False  # hold weights and states of all layers all the same
    steps: int = 2  # that are timed
    cpu: bool = False
    limit: int | None = None  # bytes that torch's allocator may have

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.cpu else torch.device("cuda", 0)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Wanted:
        return _read(cls, given)


def _read(cls: Any, given: Mapping[str, Any]) -> Any:
    """The record that `asdict` and JSON were made of: sections are records again, lists are tuples."""
    kinds = get_type_hints(cls)
    return cls(**{
        name: _read(kinds[name], value) if is_dataclass(kinds[name]) else tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    })  # fmt: skip


def expected(plan: Plan, wanted: Wanted, kernel: str) -> Plan:
    """The plan of exactly what is run: its layers, and the attention kernel that the machine has."""
    whole = replace(wanted.job, kernel=kernel, windowed=with_windows(kernel))
    if plan.executed:
        return _expected_own(plan, wanted, whole)
    sizes = sliced(whole.model, wanted.layers)
    part = look(replace(whole, model=sizes, stack=shortened_stack(whole.stack, sizes.layers)), plan.hardware)
    if wanted.states and sizes.layers < whole.model.layers:
        held = look(whole, plan.hardware).memory.phases["step"]
        more = {
            name: held.get(name, 0) - part.memory.phases["step"].get(name, 0)
            for name in ("parameters", "optimizer", "gradients")
        }
        for phase, by in part.memory.phases.items():
            for name, nbytes in more.items():
                if name != "gradients" or phase in ("backward", "step"):
                    by[name] = by.get(name, 0) + nbytes
    return replace(part, reasons=plan.reasons, around=not wanted.cpu)


def _expected_own(plan: Plan, wanted: Wanted, job: Job) -> Plan:
    """The same by a dry run."""
    if wanted.states:
        raise ValueError(
            f"--states adds up weights of layers by arithmetic, which there is none of for {plan.model.name}; leave it out"
        )
    config = shortened(hf_config(wanted.model), wanted.layers)
    sizes = plan.model if depth_of(config) == plan.model.layers else own_sizes(config, plan.model.name)
    part = counted(replace(job, model=sizes, stack=shortened_stack(job.stack, sizes.layers)), plan.hardware, config)
    return replace(part, reasons=plan.reasons, around=not wanted.cpu)


def tensors(plan: Plan) -> dict[str, dict[str, int]]:
    """What a plan says that torch will have allocated in each phase, by category."""
    beyond = ("slack", "context")
    return {phase: {name: size for name, size in by.items() if name not in beyond} for phase, by in plan.phases.items()}
