"""Plans as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..base.holding import CATEGORIES, PHASES
from ..base.units import format_bytes, format_tokens
from ..stack import Stack
from .plan import HOST_SHARE, Plan
from .speed import Speed


def describe(
    plan: Plan, *, explain: bool = False, dry: dict[str, Any] | None = None, tried: Sequence[Plan] = ()
) -> list[str]:
    """dry: what a dry run counted. tried: contexts that were counted to find the longest, with what they hold."""
    memory = plan.memory
    lines = [
        f"{plan.model.name} ({plan.model.weights / 1e9:.2f}B parameters), {trained(plan)}, at {format_tokens(plan.context)} tokens "
        f"on {plan.hardware.words}: {verdict(plan)}",
        f"  GPU     {format_bytes(plan.peak)} of {format_bytes(plan.budget)} in {memory.peak_phase} (of it tensors "
        f"{format_bytes(plan.allocated)})",
    ]
    holders = plan.phases[memory.peak_phase]
    least = (0.02 if explain else 0.04) * plan.peak
    rows = [
        (nbytes, CATEGORIES[name])
        for name, nbytes in sorted(holders.items(), key=lambda item: -item[1])
        if nbytes >= least
    ]
    rest = sum(nbytes for nbytes in holders.values() if nbytes < least)
    rows += [(rest, "everything else")] if rest else []
    lines += [f"            {format_bytes(nbytes):>9}  {words}" for nbytes, words in rows]
    if plan.host:
        parts = {
            "kept activations": memory.host - memory.offloaded,
            "weights, gradients and states": memory.offloaded,
            "the copy a checkpoint is written from": memory.snapshot,
        }
        split = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in parts.items() if nbytes)
        room = f"of {format_bytes(plan.host / HOST_SHARE)} or more: {HOST_SHARE:.0%} may be pinned"
        near = ", and what the disk store keeps near where there is room" if memory.near else ""
        besides = f"besides {format_bytes(plan.besides)} for its process{near}"
        lines.append(f"  host    {format_bytes(plan.host)} a machine, {room}; a GPU: {split}; {besides}")
    if plan.disk:
        lines.append(f"  disk    {format_bytes(memory.disk)} a GPU, {format_bytes(plan.disk)} a machine")
    if plan.executed:
        lines.append(
            f"  counted by a dry run of the model's own code ({plan.executed} of {plan.model.layers} layers executed, the others "
            "are alike); no arithmetic, so no time is predicted"
        )
    elif plan.predicted is None:
        lines.append(f"  time    not predicted: {plan.untimed}")
    else:
        lines += _time(plan, plan.predicted)
    lines += [f"  assumed {assumption}" for assumption in plan.assumed]
    if plan.too_long:
        lines.append(f"  rotary  {plan.too_long}")
    lines.append("  stack")
    width = max((len(f"{name}: {_value(value)}") for name, value, _ in plan.reasons), default=0)
    lines += [f"    {f'{name}: {_value(value)}':{width}}  {why}" for name, value, why in plan.reasons]
    if explain:
        lines += ["  memory by phase", *table(plan)]
    if dry is not None:
        lines += _dry(plan, dry)
    for trial in tried:
        outcome = (
            f"does not fit: {', '.join(trial.shortages)}" if trial.excess else f"fits in {format_bytes(trial.peak)}"
        )
        lines.append(f"  counted {format_tokens(trial.context)}: {outcome}")
    if plan.advice:
        lines += ["  what would fit", *(f"    {suggestion}" for suggestion in plan.advice)]
    return lines


def _time(plan: Plan, speed: Speed) -> list[str]:
    gpu = plan.hardware.gpu
    parts = ", ".join(f"{name} {seconds(time)}" for name, time in speed.parts.items() if time > 0.005 * speed.seconds)
    said = f"{seconds(speed.seconds)} a step, {speed.tokens_per_second:,.0f} tokens/s per GPU"
    notes = [] if gpu.measured else [f"rates were measured on an H200 and scaled to {gpu.name}"]
    notes += [plan.hardware.about_links] if plan.hardware.about_links else []
    lines = [f"  time    {said}; bound by {speed.bound_by} ({parts})"]
    return lines + ([f"          {'; '.join(notes)}"] if notes else [])


def trained(plan: Plan) -> str:
    """What is trained, and how numbers are kept."""
    if not plan.job.lora:
        return "all weights in bf16 over fp32"
    return f"{'QLoRA' if plan.job.quantize else 'LoRA'} rank {plan.job.lora} in bf16{' on NF4' if plan.job.quantize else ''}"


def verdict(plan: Plan) -> str:
    """Whether it fits, and on what condition that nobody has checked."""
    if not plan.fits:
        return f"does not fit: {', '.join(plan.shortages)}"
    return f"fits, {format_bytes(plan.budget - plan.peak)} to spare{condition(plan)}"


def condition(plan: Plan, remedy: bool = True) -> str:
    """What a plan that fits rests on beside what was said. remedy: name the option that says it."""
    needs = {"host": (plan.host / HOST_SHARE, "of host memory"), "disk": (plan.disk, "of scratch space")}
    unsaid = [
        f"{format_bytes(need)} {what} (assumed {format_bytes(getattr(plan.hardware, name))}{f'; give --{name}' if remedy else ''})"
        for name, (need, what) in needs.items()
        if need and name in plan.hardware.assumed
    ]
    return f", if a machine has {' and '.join(unsaid)}" if unsaid else ""


def table(plan: Plan) -> list[str]:
    """Bytes of each holder in each phase."""
    names = [name for name in CATEGORIES if any(by.get(name, 0) > 1e6 for by in plan.phases.values())]
    phases = [phase for phase in PHASES if phase in plan.phases]
    rows = [["", *phases]]
    rows += [[name, *(format_bytes(plan.phases[phase].get(name, 0)) for phase in phases)] for name in names]
    rows.append(["all", *(format_bytes(sum(plan.phases[phase].values())) for phase in phases)])
    return columns(rows)


def side_by_side(first: Plan, second: Plan) -> list[str]:
    fields = {**asdict(first.stack)}
    changed = [name for name, value in fields.items() if value != getattr(second.stack, name)]
    rows = [["", "this", "that"], ["fits", *("yes" if plan.fits else "no" for plan in (first, second))]]
    rows += [[name, _field(first.stack, name), _field(second.stack, name)] for name in changed]
    numbers = {
        "GPU": lambda p: format_bytes(p.peak),
        "host a machine": lambda p: format_bytes(p.host),
        "disk a machine": lambda p: format_bytes(p.disk),
    }
    if first.predicted and second.predicted:
        numbers |= {
            "step": lambda p: seconds(p.speed.seconds),
            "tokens/s per GPU": lambda p: f"{p.speed.tokens_per_second:,.0f}",
            "bound by": lambda p: p.speed.bound_by,
        }
    rows += [[name, read(first), read(second)] for name, read in numbers.items()]
    rows += [
        [f"  {name}", *(format_bytes(plan.phases[plan.memory.peak_phase].get(name, 0)) for plan in (first, second))]
        for name in CATEGORIES
        if any(plan.phases[plan.memory.peak_phase].get(name, 0) > 1e6 for plan in (first, second))
    ]
    head = f"{first.model.name} at {format_tokens(first.context)} tokens on {first.hardware.words}"
    return [head, *columns(rows)]


def _dry(plan: Plan, dry: dict[str, Any]) -> list[str]:
    said = f"  dry run {format_bytes(dry['peak'])} of tensors in {dry['peak_phase']}, {dry['executed']} layers executed"
    if dry["executed"] < dry["layers"]:
        said += f", {dry['layers'] - dry['executed']} alike added"
    if dry["layers"] == plan.model.layers:
        said += f"; the plan says {format_bytes(plan.memory.peak)} ({plan.memory.peak / dry['peak'] - 1:+.1%})"
    lines = sorted(dry["lines"][dry["peak_phase"]].items(), key=lambda item: -item[1])
    return [said, *(f"            {format_bytes(nbytes):>9}  {line}" for line, nbytes in lines[:8])]


def _field(stack: Stack, name: str) -> str:
    return _value(stack.words(name))


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def beside(plan: Plan, peak: int, took: float, longest: int) -> str:
    """What was planned for a step, beside what came. longest: tokens of the longest document in it."""
    memory, planned = plan.allocated, plan.seconds
    if planned is None:
        return f"plan: {format_bytes(memory)}; measured: {format_bytes(peak)} ({peak / memory - 1:+.1%}) and {seconds(took)} a step"
    short = f"; planned for documents of {plan.context:,} tokens, here the longest has {longest:,}"
    return (
        f"plan: {format_bytes(memory)} and {seconds(planned)} a step; measured: {format_bytes(peak)} "
        f"({peak / memory - 1:+.1%}) and {seconds(took)} ({took / planned - 1:+.1%}){short if longest < 0.9 * plan.context else ''}"
    )


def seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def columns(rows: Iterable[list[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "    "
        + row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
