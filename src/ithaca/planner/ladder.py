"""The ladder: what each technique takes away, rung by rung, and what appears behind it.

Every rung adds one technique to the one before, on the same model, GPUs and context. Rungs that cannot be expressed as a stack are
left out: where there is one GPU there is nothing to shard or share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..stack import Stack
from .categories import CATEGORIES
from .hardware import parse_gpus
from .search import Plan, plan

# Rungs end with what the user's GPU cannot shrink any more; these words say what to look at.
STANDING = ("slack", "context", "workspace")


@dataclass
class Rung:
    name: str
    adds: str
    plan: Plan

    @property
    def largest(self) -> str:
        """The largest holder at the peak, of those that a technique could shrink."""
        holders = {name: each for name, each in self.holders.items() if name not in STANDING}
        return max(holders, key=lambda name: holders[name])

    @property
    def holders(self) -> dict[str, int]:
        return self.plan.phases[self.plan.memory.peak_phase]

    def json(self) -> dict[str, Any]:
        whole = self.plan.json()
        return {
            "name": self.name, "adds": self.adds, "stack": whole["stack"], "peak": whole["peak"],
            "phases": whole["phases"], "holders": self.holders, "largest": self.largest,
            "tokens_per_second": whole["time"]["tokens_per_second"], "fits": whole["fits"], "measured": None,
        }  # fmt: skip


@dataclass
class Ladder:
    rungs: list[Rung]
    sweeps: dict[str, list[tuple[int, Plan]]]

    def json(self) -> dict[str, Any]:
        first = self.rungs[0].plan.json()
        return {
            "ladder": 1, "model": first["model"], "hardware": first["hardware"], "context": first["context"],
            "rungs": [rung.json() for rung in self.rungs],
            "sweeps": {
                name: [
                    {
                        "value": value, "peak": each.peak, "fits": each.fits,
                        "tokens_per_second": each.speed.tokens_per_second,
                    }
                    for value, each in points
                ]
                for name, points in self.sweeps.items()
            },
        }  # fmt: skip


def ladder(model: str, *, gpus: str, context: int | str, **options: Any) -> Ladder:
    """The rungs at one context, and what heads_per_stage and tile trade at the top."""
    count = parse_gpus(gpus).count

    def look(stack: Stack) -> Plan:
        return plan(model, gpus=gpus, context=context, stack=stack, **options)

    rungs = [Rung(name, adds, look(stack)) for name, adds, stack in _rungs(model, gpus, count, context, options)]
    top = rungs[-1].plan.stack
    per_rank = -(-rungs[-1].plan.model.heads // top.ulysses)
    heads = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    tokens = rungs[-1].plan.context // top.context_ranks
    sweeps = {
        "heads_per_stage": [(n, look(replace(top, heads_per_stage=n))) for n in heads],
        "tile": [(n, look(replace(top, tile=n))) for n in (1024, 2048, 4096, 8192, 16384, 32768) if n <= tokens],
    }
    return Ladder(rungs, sweeps)


def _rungs(
    model: str, gpus: str, count: int, context: Any, options: dict[str, Any]
) -> Iterator[tuple[str, str, Stack]]:
    best = plan(model, gpus=gpus, context=context, advise=False, **options).stack
    # without context parallelism every GPU holds a row of its own
    stack = Stack(
        engine="composed", recompute="none", tile=None, shard_parameters=False, ulysses=best.ulysses, ring=best.ring
    )
    alone = replace(stack, ulysses=1, ring=1)
    if count > 1:
        yield "plain", "the model as it is, weights and states whole on every GPU", alone
        yield (
            "+FSDP",
            "weights, gradients and states sharded over all GPUs",
            (alone := replace(alone, shard_parameters=True)),
        )
        yield "+Ulysses", "the GPUs share the sequence", (stack := replace(stack, shard_parameters=True))
    else:
        yield (
            "plain",
            "the model as it is, bf16 compute and fp32 masters",
            (stack := replace(stack, shard_parameters=True)),
        )
    yield (
        "+checkpointing",
        "only the input of a layer is kept, the rest computed again",
        (stack := replace(stack, recompute="layer")),
    )
    yield "+offload", "layer inputs wait in host memory", (stack := replace(stack, store="host"))
    yield "+tiling", "norms, MLP and loss by tiles: logits never exist whole", (stack := replace(stack, tile=4096))
    if -(-plan(model, gpus=gpus, context=context, stack=stack, **options).model.heads // stack.ulysses) > 1:
        yield (
            "+Untied Ulysses",
            "attention over one head of a GPU at a time",
            (stack := replace(stack, heads_per_stage=1)),
        )
    yield (
        "+streamed layer",
        "no tensor of a whole sequence but residual and gradient; attention is not computed again",
        (replace(stack, engine="auto", recompute="keep_attention", hold=False)),
    )


def describe(found: Ladder) -> list[str]:
    from ..config.sizes import format_bytes, format_tokens

    first = found.rungs[0].plan
    lines = [
        f"{first.model.name} at {format_tokens(first.context)} tokens on {first.hardware.words} "
        f"({format_bytes(first.budget)} each), predicted"
    ]
    most = max(len(rung.name) for rung in found.rungs)
    for rung in found.rungs:
        verdict = "fits" if rung.plan.fits else "no"
        held = rung.holders[rung.largest]
        rate = f"{rung.plan.speed.tokens_per_second:>7,.0f} tokens/s"
        lines.append(
            f"  {rung.name:{most}}  {format_bytes(rung.plan.peak):>9}  {verdict:4}  {rate}  "
            f"largest: {format_bytes(held)} {CATEGORIES[rung.largest]}"
        )
    for name, points in found.sweeps.items():
        told = ", ".join(f"{value}: {format_bytes(each.peak)}" for value, each in points)
        lines.append(f"  {name} at the top  {told}")
    return lines
