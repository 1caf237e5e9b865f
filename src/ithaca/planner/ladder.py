"""The ladder: what each technique takes away, rung by rung, and what appears behind it.

Every rung adds one technique to the one before, on the same model, GPUs and context. Rungs that cannot be expressed as a stack are
left out: where there is one GPU there is nothing to shard or share. At the top, two fields that trade memory for speed are swept.

What is here is predicted; observe/profiler/rungs.py measures it and writes into `measured`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ..base.holding import CATEGORIES
from ..base.units import format_bytes, format_tokens
from ..engine.model.sizes import ModelSizes, read_sizes, sliced
from ..stack import Stack
from .hardware import Hardware, parse_gpus
from .plan import Plan
from .search import plan
from .text import columns

TILES = (1024, 2048, 4096, 8192, 16384, 32768)  # values of the sweep, as far as a rank has so many tokens
# Rungs end with what the user's GPU cannot shrink any more; these words say what to look at.
STANDING = ("slack", "context", "workspace")


@dataclass
class Measurable:
    plan: Plan
    measured: dict[str, Any] | None = (
        None  # peak, tensors, planned (the same, predicted), tokens_per_second, problem, ...
    )


@dataclass(kw_only=True)
class Rung(Measurable):
    name: str
    adds: str

    @property
    def largest(self) -> str:
        """The largest holder at the peak, of those that a technique could shrink."""
        holders = {name: nbytes for name, nbytes in self.holders.items() if name not in STANDING}
        return max(holders, key=lambda name: holders[name])

    @property
    def holders(self) -> dict[str, int]:
        return self.plan.phases[self.plan.memory.peak_phase]

    def json(self) -> dict[str, Any]:
        whole = self.plan.json()
        return {
            "name": self.name, "adds": self.adds, "stack": whole["stack"], "peak": whole["peak"],
            "phases": whole["phases"], "holders": self.holders, "largest": self.largest,
            "tokens_per_second": whole["time"]["tokens_per_second"], "fits": whole["fits"],
            "measured": self.measured,
        }  # fmt: skip


@dataclass(kw_only=True)
class Point(Measurable):
    """One value of a sweep."""

    value: int

    def json(self) -> dict[str, Any]:
        return {
            "value": self.value, "peak": self.plan.peak, "fits": self.plan.fits,
            "tokens_per_second": self.plan.speed.tokens_per_second, "measured": self.measured,
        }  # fmt: skip


@dataclass
class Ladder:
    rungs: list[Rung]
    sweeps: dict[str, list[Point]]
    whole: ModelSizes  # of which the rungs may have a few layers only

    def json(self) -> dict[str, Any]:
        first = self.rungs[0].plan.json()
        return {
            "ladder": 1, "model": self.whole.json(), "hardware": first["hardware"],
            "context": first["context"], "layers": first["model"]["layers"],
            "assumed": first["assumed"], "too_long": first["too_long"],
            "rungs": [rung.json() for rung in self.rungs],
            "sweeps": {name: [point.json() for point in points] for name, points in self.sweeps.items()},
        }  # fmt: skip


def ladder(what: str, *, gpus: str | Hardware, context: int | str, layers: int | None = None, **options: Any) -> Ladder:
    """The rungs at one context, and what heads_per_stage and tile trade at the top. layers: of a slice of the model. options: of
    `plan`; fields of the stack among them are so on every rung."""
    whole = read_sizes(what)
    model = sliced(whole, layers)
    hardware = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    found = plan(model, gpus=hardware, context=context, advise=False, **options)
    _ = found.speed  # a GPU without a rate is refused here: a ladder is of memory and time
    best = found.stack
    options["offload_optimizer"] = found.job.offload  # the same on every rung
    pinned = {field.name: options.pop(field.name) for field in fields(Stack) if field.name in options}

    def look(stack: Stack) -> Plan:
        return plan(model, gpus=hardware, context=context, stack=stack, **options)

    rungs = [
        Rung(name=name, adds=adds, plan=look(stack)) for name, adds, stack in _rungs(model, hardware, best, pinned)
    ]
    top = rungs[-1].plan.stack
    per_rank = -(-rungs[-1].plan.model.heads // top.ulysses)
    heads = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    tokens = rungs[-1].plan.context // top.context_ranks
    sweeps = {
        "heads_per_stage": [Point(value=n, plan=look(replace(top, heads_per_stage=n))) for n in heads],
        "tile": [Point(value=n, plan=look(replace(top, tile=n))) for n in TILES if n <= tokens],
    }
    swept = {name: points for name, points in sweeps.items() if len(points) > 1 and name not in pinned}
    return Ladder(rungs, swept, whole)


def _rungs(
    model: ModelSizes, hardware: Hardware, best: Stack, pinned: dict[str, Any]
) -> Iterator[tuple[str, str, Stack]]:
    """best: says how ranks share a sequence. pinned: fields that no rung changes; one that adds nothing then, or cannot be, is left
    out."""
    shared = {"ulysses": best.ulysses, "ring": best.ring}
    plain: dict[str, Any] = {"engine": "composed", "recompute": "none", "tile": None}
    steps: list[tuple[str, str, dict[str, Any]]]
    if hardware.count > 1:  # without context parallelism every GPU holds a row of its own
        plain["shard_parameters"] = False
        steps = [
            ("plain", "the model as it is, weights and states whole on every GPU", {}),
            ("+FSDP", "weights, gradients and states sharded over all GPUs", {"shard_parameters": True}),
            ("+Ulysses", "the GPUs share the sequence", shared),
        ]
    else:
        steps = [("plain", "the model as it is, bf16 compute and fp32 masters", shared)]
    steps += [
        ("+checkpointing", "only the input of a layer is kept, the rest computed again", {"recompute": "layer"}),
        ("+offload", "layer inputs wait in host memory", {"store": "host"}),
        ("+tiling", "norms and MLP by tiles, as the logits are anyway", {"tile": Stack().tile}),
    ]
    if -(-model.heads // best.ulysses) > 1:
        steps.append(("+Untied Ulysses", "attention over one head of a GPU at a time", {"heads_per_stage": 1}))
    everything = "no tensor of a whole sequence but residual and gradient; attention is not computed again"
    streamed = {"engine": "auto", "recompute": "keep_attention", "hold": False}
    steps.append(("+streamed layer", everything, streamed))
    stack, below = Stack(**{**plain, **pinned}), None
    for name, adds, changes in steps:
        if Stack(**{**changes, **pinned}).violations():
            continue  # what is pinned has no use for it
        stack = replace(stack, **{**changes, **pinned})
        if not stack.violations() and _done(stack) != below:
            below = _done(stack)
            yield name, adds, stack


def _done(stack: Stack) -> Stack:
    """What a stack does, however it was asked for: two that are equal here compute the same."""
    engine = stack.engine_of(0)
    holds = engine == "streamed" and stack.offload != "gpu"
    return replace(stack, engine=engine, hold=stack.hold if holds else None)


def describe(ladder: Ladder) -> list[str]:
    first = ladder.rungs[0].plan
    measured = [rung.measured for rung in ladder.rungs if rung.measured]
    layers = "" if ladder.whole == first.model else f", {first.model.layers} of {ladder.whole.layers} layers"
    device = next((result["device"] for result in measured if not result["problem"]), None)
    how = f"predicted, and measured on {device}" if device else "predicted"
    lines = [
        f"{first.model.name} at {format_tokens(first.context)} tokens on {first.hardware.words} "
        f"({format_bytes(first.budget)} each){layers}, {how}"
    ]
    lines += _measured(ladder, gpu=device != "CPU") if measured else _predicted(ladder)
    lines += [f"  assumed {assumption}" for assumption in first.assumed]
    lines += [f"  rotary  {first.too_long}"] if first.too_long else []
    for name, points in ladder.sweeps.items():
        lines += [f"  {name} at the top", *_sweep(points)]
    return lines


def _predicted(ladder: Ladder) -> list[str]:
    most = max(len(rung.name) for rung in ladder.rungs)
    lines = []
    for rung in ladder.rungs:
        verdict = "fits" if rung.plan.fits else "no"
        held = rung.holders[rung.largest]
        rate = f"{rung.plan.speed.tokens_per_second:>7,.0f} tokens/s"
        lines.append(
            f"  {rung.name:{most}}  {format_bytes(rung.plan.peak):>9}  {verdict:4}  {rate}  "
            f"largest: {format_bytes(held)} {CATEGORIES[rung.largest]}"
        )
    return lines


def _measured(ladder: Ladder, gpu: bool) -> list[str]:
    """Tensors on the GPU beside each other: what surrounds them is not the stack's doing."""
    rows = [["", "predicted", "measured", "off", *(["tokens/s", "measured"] if gpu else ["tokens/s"]), "largest"]]
    for rung in ladder.rungs:
        result = rung.measured
        if result is None:
            continue
        planned = format_bytes(result["planned"])
        rate = [f"{rung.plan.speed.tokens_per_second:,.0f}"] if gpu else []
        if result["problem"]:
            rows.append([rung.name, planned, _short(result["problem"]), "", *rate, "", rung.largest])
            continue
        off = f"{result['tensors'] / result['planned'] - 1:+.1%}"
        largest = max(result["categories"], key=result["categories"].__getitem__)
        rate.append(f"{result['tokens_per_second']:,.0f}")
        rows.append([rung.name, planned, format_bytes(result["tensors"]), off, *rate, largest])
    return columns(rows)


def _sweep(points: list[Point]) -> list[str]:
    rows = [["", "peak", "fits", "tokens/s"]]
    measured = [point.measured for point in points if point.measured]
    rows[0] += ["tensors", "measured", "tokens/s"] if measured else []
    for point in points:
        row = [str(point.value), format_bytes(point.plan.peak), "yes" if point.plan.fits else "no"]
        row.append(f"{point.plan.speed.tokens_per_second:,.0f}")
        if result := point.measured:
            row.append(format_bytes(result["planned"]))
            row += [_short(result["problem"]), ""] if result["problem"] else [
                format_bytes(result["tensors"]), f"{result['tokens_per_second']:,.0f}",
            ]  # fmt: skip
        rows.append(row)
    return columns(rows)


def _short(words: str) -> str:
    """For a column; JSON has all of it."""
    return words if len(words) <= 40 else f"{words[:37]}..."
