"""Plans of models without arithmetic here: a dry run of their own code counts what a stack takes (dry_run/run.py).

A dry run takes seconds where arithmetic takes microseconds, and tells no time. So there is no search: a short list of stacks, those
that compute and copy least first, is tried from its top until one fits. What shares the sequence is not tried but chosen: Ulysses
as far as heads and a machine go, a ring between machines, and rows side by side where a step has several.

What is refused when such a model is prepared is refused here, for the same reason: a dry run begins with the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from ..base.units import format_bytes, format_tokens
from ..engine.job import Job
from ..engine.model.sizes import ModelSizes
from ..stack import Stack
from .flops import head_sizes, layer_windows
from .hardware import Hardware
from .plan import HOST_SHARE, Plan
from .reasons import reasons_of

GUESSES = 6  # of the longest context; behind them it is halved
SHORT = 2**14  # tokens of a rank up to which it is worth a try to keep everything
Say = Callable[[str], object]


def own_sizes(config: Any, name: str) -> ModelSizes:
    """What can be said of a model by its config and its parts, built without numbers. ValueError for one that cannot be run."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..engine.own import read_own
    from ..engine.proof import require_proof

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    decoder, text = read_own(model), _widest(config.get_text_config())
    require_proof(decoder)
    layers, heads = len(decoder.layers), _largest(text.num_attention_heads)
    head_dim, windows = attention_of(config)
    return ModelSizes(
        name=name,
        family=config.model_type,
        layers=layers,
        hidden=text.hidden_size,
        intermediate=_largest(getattr(text, "intermediate_size", None) or 0),
        heads=heads,
        kv_heads=_largest(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        vocabulary=text.vocab_size,
        tied=decoder.tied,
        windows=(*windows, *[None] * layers)[:layers],
        longest=getattr(text, "max_position_embeddings", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def attention_of(config: Any) -> tuple[int, list[int | None]]:
    """What its attention kernels are asked for, as far as the config names it: the size of a head, and the window of each layer."""
    text = _widest(config.get_text_config())
    if not getattr(text, "num_attention_heads", None):
        raise ValueError(
            f"the config of {config.model_type} names no attention heads, so it cannot run with our attention"
        )
    return max(head_sizes(text)), layer_windows(text)


def _widest(text: Any) -> Any:
    """The same config, with one size of each kind: the largest, where layers have sizes of their own (Gemma 4)."""
    layers = (text.to_dict().get("per_layer_config") or {}).values()
    sizes = {name: value for layer in layers for name, value in layer.items() if isinstance(value, int)}
    if not sizes:
        return text
    text = deepcopy(text)
    text.allow_global_per_layer_attribute_access = True
    for name in sizes:
        own = [layer[name] for layer in layers if name in layer]
        setattr(text, name, max([getattr(text, name, None) or 0, *own]))
    return text


def _largest(value: Any) -> int:
    """Of a size that some models have one of for each layer."""
    return max(value) if isinstance(value, (list, tuple)) else value


def counted(job: Job, hardware: Hardware, config: Any) -> Plan:
    """What a job takes with the stack it has."""
    from .dry_run.run import dry_run

    memory = dry_run(job, config)
    plan = Plan(job, hardware, memory, None, False, executed=memory.executed)
    plan.fits = not plan.excess
    return plan


def first_that_fits(
    job: Job,
    hardware: Hardware,
    config: Any,
    pinned: dict[str, Any],
    *,
    kernel: str | None = None,
    only_fit: bool = False,
    say: Say = lambda line: None,
) -> Plan:
    """only_fit: whether something fits, so the leanest alone is asked."""
    stacks = list(own_stacks(job, hardware, pinned))
    if not stacks:
        raise ValueError(
            f"no stack is possible for {hardware.count} GPUs and rows={job.batch} with what is given; free a field of the stack, "
            "or use another number of GPUs or rows"
        )

    def look(stack: Stack) -> Plan:
        plan = counted(replace(job, stack=stack), hardware, config)
        verdict = "fits" if plan.fits else f"does not fit: {', '.join(plan.shortages)}"
        words = f"{_words(stack)}{' states on the host' if job.offload else ''}"
        say(f"dry run at {format_tokens(job.context)}, {words}: {format_bytes(plan.peak)}, {verdict}")
        return plan

    found = _first(stacks, look, only_fit)
    found.reasons = reasons_of(found, pinned, kernel)
    why = f"no arithmetic here for {config.model_type}: its own code runs, with our attention"
    found.reasons.insert(0, ("engine", "module", "given" if "engine" in pinned else why))
    if not found.fits:
        found.advice = [
            "not tried: more GPUs, a shorter context (--max-context finds the longest), --host, --disk, --optimizer adamw8bit, "
            "--offload-optimizer, --lora 16"
        ]
    return found


def _first(stacks: list[Stack], look: Callable[[Stack], Plan], only_fit: bool) -> Plan:
    """Each count takes seconds: where two do not fit, the leanest says whether any can."""
    if only_fit:
        return look(stacks[-1])
    *others, last = stacks
    leanest: Plan | None = None
    for tried in range(len(others)):
        if not others:
            break
        plan = look(others.pop(0))
        if plan.fits or _hopeless(plan):
            return plan
        if _held_by_all(plan) > plan.budget:
            others = [stack for stack in others if not _keeps_alike(stack, plan.stack)]
        if tried == 1 and others and not (leanest := look(last)).fits and leanest.shares["GPU memory"] > 1:
            break
    return leanest or look(last)


def _held_by_all(plan: Plan) -> int:
    """What stacks that keep the same on the GPU all hold when backward begins."""
    if plan.stack.offload != "gpu":
        return 0
    return sum(plan.memory.phases["loss"].get(name, 0) for name in ("parameters", "optimizer", "kept"))


def _hopeless(plan: Plan) -> bool:
    """Whether no stack can help: weights, gradients and states, and the copy of a checkpoint, are the same with each."""
    memory, host = plan.memory, plan.hardware.host
    held = sum(memory.phases.get("step", {}).get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    away = (memory.offloaded + memory.snapshot) * plan.hardware.ranks_per_node
    return held > plan.budget or (host is not None and away > HOST_SHARE * host)


def _keeps_alike(stack: Stack, other: Stack) -> bool:
    return (stack.recompute, stack.store) == (other.recompute, other.store)


def own_stacks(job: Job, hardware: Hardware, pinned: dict[str, Any]) -> Iterator[Stack]:
    """Those that compute and copy least first; each takes less of the GPU than those before it, or less of the host."""
    shared = _shared(job, hardware, pinned)
    if shared is None:
        return
    tokens = job.batch * job.context // hardware.count
    per_rank = -(-job.model.heads // shared["ulysses"])
    few, one = max(1, per_rank // 4), 1
    rows: list[tuple[str, str, int | None, int | None]] = [("none", "gpu", None, None)] if tokens <= SHORT else []
    keep, again = "keep_attention", "layer"
    rows += [(keep, "gpu", 16384, None), (keep, "gpu", 4096, None), (keep, "gpu", 4096, few), (keep, "gpu", 4096, one)]
    rows += [(keep, "host", 4096, few), (keep, "host", 4096, one)]
    rows += [(keep, "disk", 4096, one)] if hardware.disk else []
    rows += [(again, "gpu", 4096, one), (again, "host", 4096, one), (again, "host", 2048, one)]
    rows += [(again, "disk", 2048, one)] if hardware.disk else []
    seen: set[Stack] = set()
    for recompute, store, tile, heads in rows:
        fields: dict[str, Any] = {
            "recompute": recompute,
            "store": store,
            "tile": None if tile is None or tile >= tokens else tile,
            "heads_per_stage": None if heads == per_rank else heads,
        }
        stack = Stack(**{**fields, **shared, **pinned, "engine": "module"})
        if stack not in seen and not stack.violations(hardware.count):
            seen.add(stack)
            yield stack


def _shared(job: Job, hardware: Hardware, pinned: dict[str, Any]) -> dict[str, int] | None:
    """How GPUs share a sequence: as few as rows of a micro-batch allow, each row with a group of its own; in a group by heads as
    far as those and a machine go, then by a ring."""
    world, most = hardware.count, min(hardware.ranks_per_node, job.model.heads)
    ways = [
        (ulysses, ring)
        for ulysses in ([pinned["ulysses"]] if "ulysses" in pinned else range(1, most + 1))
        for ring in ([pinned["ring"]] if "ring" in pinned else range(1, world // ulysses + 1))
        if world % (ulysses * ring) == 0 and job.batch % (world // (ulysses * ring)) == 0
    ]
    if not ways:
        return None
    ulysses, ring = min(ways, key=lambda way: (way[0] * way[1], way[1]))
    return {"ulysses": ulysses, "ring": ring}


def _words(stack: Stack) -> str:
    names = ("recompute", "store", "tile", "heads_per_stage")
    return " ".join(f"{name}={stack.words(name)}" for name in names)


def longest(look: Callable[[int], Plan], ranks: int, step: int, away: Callable[[int], Plan] | None = None) -> Plan:
    """The plan of the longest context that fits, in multiples of `step`. away: the same with weights and states on the host, asked
    where the GPU has no room for a step more."""
    look = cache(look)
    never = away is not None and _hopeless(look(ranks * step))
    tried = {} if never else _searched(look, ranks, step)
    fits = max((n for n, plan in tried.items() if plan.fits), default=0)
    beyond = tried.get(fits + 1)
    if away is not None and (never or (beyond is not None and beyond.shares["GPU memory"] > 1)):
        further = _searched(away, ranks if never else fits + 1, step, fits, tried)
        most = max((n for n, plan in further.items() if plan.fits), default=None)
        if most is not None:
            return further[most]
    return tried[fits] if fits else look(step)


def _searched(
    look: Callable[[int], Plan], first: int, step: int, fits: int = 0, others: Mapping[int, Plan] = MappingProxyType({})
) -> dict[int, Plan]:
    """Plans at multiples of `step`: memory grows evenly with it, so two counts tell where it meets the budget, and the last two
    show that it fits there and not one step further. fits: known to. others: plans of the same that grow as these do."""
    tried: dict[int, Plan] = {}
    at = first
    while at not in tried:
        tried[at] = look(at * step)
        fits = max((n for n, plan in tried.items() if plan.fits), default=fits)
        fails = min((n for n, plan in tried.items() if not plan.fits), default=None)
        if fails is not None and fails - fits <= 1:
            break
        most = 2**30 // step if fails is None else fails - 1
        at = (fits + most + 1) // 2 if len(tried) > GUESSES else min(max(_guess(tried, others), fits + 1), most)
    return tried


def _guess(tried: Mapping[int, Plan], others: Mapping[int, Plan]) -> int:
    """Where the first of the budgets is full, by lines through the shortest and the longest."""
    last, drawn = max(tried), tried if len(tried) > 1 else others
    a, b, shares, full = min(drawn, default=0), max(drawn, default=0), tried[last].shares, list[float]()
    for budget, share in shares.items() if a < b else ():
        slope = (drawn[b].shares[budget] - drawn[a].shares[budget]) / (b - a)
        if 0 < slope < float("inf"):
            full.append(last + (1 - share) / slope)
    if not full:
        return 4 * last if max(shares.values()) <= 1 else last // 4
    return int(min(full))
