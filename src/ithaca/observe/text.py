"""Numbers as people read them, and the two texts made of them: the line of a step, and the first lines of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..base.units import format_bytes, format_tokens
from ..stack import Stack
from .record import StepRecord

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """0.42 -> '0.4s', 190 -> '3m10s', 18720 -> '5h12m', 1e6 -> '11d13h'."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def number(value: float, decimals: int) -> str:
    """2.18342 -> '2.1834', 12345.0 -> '1.23e+04': at most eight characters, nine below zero."""
    return f"{value:.{decimals}f}" if abs(value) < 100 else f"{value:.2e}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def compact(count: int) -> str:
    """8030261248 -> '8.03B'."""
    for unit, large in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= large:
            return f"{count / large:.3g}{unit}" if count < 999.5 * large else f"{count / large:.0f}{unit}"
    return str(count)


FORMS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: number(value, 4),
    "number": lambda value: number(value, 3),
    "scientific": lambda value: f"{value:.2e}",
    "rate": lambda value: f"{value:,.0f}",
    "share": share,
    "duration": lambda value: duration(value),
    "size": size,
}


def written(record: StepRecord | None, name: str) -> str:
    """A number of a step, as people read it."""
    return UNKNOWN if record is None else FORMS[record.shown()[name].form](getattr(record, name))


def plain_line(record: StepRecord, steps: int, eta: float | None = None, next_save: int | None = None) -> str:
    """A step as `key value` pairs, the same keys in the same order on every line of a run, under 160 columns.

    `-` stands for what is not known. wait is copy_wait, save the step of the next checkpoint, eta the time left; sizes and
    the rest are as in metrics.jsonl, which is the form to compute with.
    """
    numbers = {shown.short: written(record, name) for name, shown in record.shown_of(record).items() if shown.short}
    pairs = {
        "step": f"{record.step}/{steps}",
        **numbers,
        "eta": duration(eta),
        "save": UNKNOWN if next_save is None else str(next_save),
    }
    return " ".join(f"{key} {value.replace(' ', '').replace(',', '')}" for key, value in pairs.items())


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run is, for its first lines."""

    name: str  # of the run
    folder: str
    model: str  # its name, as a person would say it
    parameters: int
    trained: int  # parameters that change; fewer with LoRA
    dtype: str
    context: int  # tokens in a row
    rows: int  # per optimizer step, over all ranks
    steps: int  # of the whole run
    devices: int  # processes, one per GPU
    device: str  # name of the GPU, or CPU
    stack: Stack
    kernel: str  # of attention, as resolved; "" = of a model by its own code, which asks for it in the first step
    nodes: int = 1
    shared: int = 0  # GPUs that the processes share; 0 = each has its own
    done: int = 0  # steps that are done already
    checkpoint: str | None = None  # what the run is resumed from
    data: str = ""  # a line about the data
    save_every: int | None = None
    eval_every: int | None = None


def facts_of(run: Any, config: Any, **more: Any) -> Facts:
    """Of a prepared model and its config, and what neither knows."""
    parameters = list(run.model.parameters())
    kernels = {kernel.name for kernel in run.kernels.chosen.values()}
    return Facts(
        name=config.run.name, folder=config.run.folder, parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad), dtype=config.model.dtype, context=config.data.context,
        rows=config.train.rows, steps=config.train.steps, devices=run.mesh.world.size, stack=run.stack,
        kernel=", ".join(sorted(kernels)), nodes=config.launch.nodes, save_every=config.checkpoint.every,
        eval_every=config.eval.every, **more,
    )  # fmt: skip


def headline(facts: Facts) -> str:
    """The first lines of a run: what will happen, on what, with which stack and kernel; then a line about each part."""
    where = f"{facts.devices} × {facts.device}" + (f" on {facts.nodes} nodes" if facts.nodes > 1 else "")
    if facts.shared:
        where = (
            f"{facts.devices} ranks that share {facts.shared} × {facts.device}: a rehearsal, its speed means nothing"
        )
    steps = f"{facts.steps:,} steps"
    if facts.done >= facts.steps:
        steps = f"all {facts.steps:,} steps done"
    elif facts.done:
        steps = f"steps {facts.done + 1:,} to {facts.steps:,}"
    first = f"ithaca {__version__} trains {facts.model} at {format_tokens(facts.context)} tokens, {steps}, on {where}"
    trained = "all trained" if facts.trained == facts.parameters else f"{compact(facts.trained)} of them trained"
    rows = f"{facts.rows:,} row{'s' if facts.rows != 1 else ''} × {facts.context:,} tokens a step"
    left = max(0, facts.steps - facts.done) * facts.rows * facts.context
    often = [
        "saves at the end" if facts.save_every is None else f"saves every {facts.save_every:,} steps and at the end"
    ]
    if facts.eval_every is not None:
        often.append(f"evaluates every {facts.eval_every:,}")
    parts = {
        "stack": f"{describe_stack(facts.stack)}, kernel {facts.kernel or 'chosen in the first step'}",
        "model": f"{compact(facts.parameters)} parameters, {trained}, {facts.dtype}",
        "data": f"{rows}, {compact(left)} in all" + (f"; {facts.data}" if facts.data else ""),
        "folder": f"{facts.folder}; {', '.join(often)}",
    }
    if facts.checkpoint:
        parts["resumes"] = facts.checkpoint
    return "\n".join([first, *(f"  {name:<8}{text}" for name, text in parts.items())])


def describe_stack(stack: Stack) -> str:
    """The techniques that are on, in the words of the config."""
    named = [(name, getattr(stack, name)) for name in ("ulysses", "ring", "replicate")]
    parts = [f"{name} {value}" for name, value in named if value > 1]
    if stack.heads_per_stage is not None:
        parts.append(f"heads_per_stage {stack.heads_per_stage}")
    parts += [f"{name} {stack.words(name)}" for name in ("recompute", "store")]
    parts.append("tile none" if stack.tile is None else f"tile {stack.tile}")
    parts.append(f"engine {stack.engine}" if stack.engine != "auto" else f"engine {stack.engine_of(0)}")
    parts.append("FSDP2" if stack.shard_parameters else "parameters whole")
    return ", ".join(parts)
