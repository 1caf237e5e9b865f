"""Memory ran out: what the plan said, what came, and the cheapest change that would fit, as settings to add to the command."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ..base.holding import CATEGORIES
from ..base.units import format_bytes
from ..stack import PerLayer
from .plan import HOST_SHARE, Plan
from .search import fastest

ANYWAY = "lower stack.tile or stack.heads_per_stage, or set stack.store to host (ithaca plan says what fits)"
LESS = 0.9  # of what did not fit: a change must promise at least this much


def gpu_shortage(planned: Plan | None, used: int) -> str:
    """used: bytes of tensors on the GPU when it failed, as torch counted them."""
    text = f"the GPU ran out of memory with {format_bytes(used)} of tensors on it"
    if planned is None:
        return f"{text}; {ANYWAY}"
    said = planned.allocated
    text += f"; the plan had said {format_bytes(said)}"
    if used > 1.05 * said:
        text += (
            ", so something grew that it does not know: several rows of documents, another program on the GPU, or a bug"
        )
    else:
        holders = planned.memory.phases[planned.memory.peak_phase]
        largest = max(holders, key=lambda name: holders[name])
        text += f", most of it {CATEGORIES[largest]} ({format_bytes(holders[largest])})"
    if planned.predicted is None:
        return f"{text}.\n  {ANYWAY}"
    change = cheapest_change(planned, limit=int(LESS * min(planned.peak, planned.budget)))
    return f"{text}.\n  {change}"


def host_shortage(planned: Plan | None, cause: str) -> str:
    """Pinned memory ran out; `cause` says where."""
    if planned is None or planned.predicted is None or planned.stack.offload == "gpu":
        return cause
    need = planned.host if planned.stack.offload == "host" else planned.disk
    hardware = replace(planned.hardware, **{planned.stack.offload: int(LESS * need / HOST_SHARE)})
    return f"{cause}.\n  {_instead(planned, _fastest(planned, hardware))}"


def cheapest_change(planned: Plan, limit: int) -> str:
    """The fastest stack that needs no more than `limit` of the GPU."""
    smaller = replace(planned.hardware, gpu=replace(planned.hardware.gpu, memory=limit))
    return _instead(planned, _fastest(planned, smaller))


def _fastest(planned: Plan, hardware: Any) -> Plan:
    """Of the stacks that share ranks in the same way."""
    stack = planned.stack
    return fastest(planned.job, hardware, ulysses=stack.ulysses, ring=stack.ring, replicate=stack.replicate)


def _instead(planned: Plan, other: Plan) -> str:
    if not other.fits:
        return "nothing smaller would fit these GPUs; what would: " + "; ".join(other.advice)
    names = [name for name, value in asdict(other.stack).items() if value != getattr(planned.stack, name)]
    words = " ".join(f"--stack.{name} {_written(getattr(other.stack, name))}" for name in names)
    slower = other.speed.seconds / planned.speed.seconds - 1
    return f"try: {words} ({format_bytes(other.allocated)} predicted, {max(slower, 0):.0%} slower)"


def _written(value: Any) -> str:
    if isinstance(value, PerLayer):
        return f'"{value}"'
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
