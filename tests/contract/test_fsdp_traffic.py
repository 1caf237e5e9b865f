"""FSDP2 gathers and reduces each group once, however finely a layer is tiled or staged: counted, not assumed.

The trap: a tiled layer whose tiles each touch the parameters makes FSDP gather and reduce once per tile, or deadlocks when
ranks have different numbers of tiles.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ithaca.base.processes.pool import Workers
from ithaca.engine.run import Run
from ithaca.verify.presets import add_lora

from .tiny import prepared, tiny, tokens

LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families


class CountedGather(DefaultAllGather):
    def __init__(self, counts: Counter, group: str):
        self.counts, self.group = counts, group

    def __call__(self, *args, **kwargs):
        self.counts["gather", self.group] += 1
        return super().__call__(*args, **kwargs)


class CountedReduce(DefaultReduceScatter):
    def __init__(self, counts: Counter, group: str):
        self.counts, self.group = counts, group

    def __call__(self, *args, **kwargs):
        self.counts["reduce", self.group] += 1
        return super().__call__(*args, **kwargs)


def watch(run: Run) -> Counter:
    """From now on, count the collectives of every FSDP group, by the name of its module."""
    counts: Counter = Counter()
    for name, module in run.decoder.model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountedGather(counts, name or "root"))
            module.set_custom_reduce_scatter(CountedReduce(counts, name or "root"))
    return counts


def traffic(preset: str, stack: dict[str, Any], steps: int) -> list[tuple[Counter, Counter]]:
    """(collectives of forward, collectives of backward), for each step."""
    run = prepared(preset, **stack)
    counts, found = watch(run), []
    for _ in range(steps):
        loss = run.loss(run.shard(tokens(2, 20)))
        forward = Counter(counts)
        counts.clear()
        loss.backward()
        found.append((forward, Counter(counts)))
        counts.clear()
        run.model.zero_grad()
    return found


def groups(tied: bool, layers: int = 2) -> list[str]:
    return ["root", *(f"model.layers.{i}" for i in range(layers)), *([] if tied else ["model.embed_tokens", "lm_head"])]


STACKS: dict[str, dict[str, Any]] = {
    "untiled, nothing again": dict(tile=None, recompute="none"),
    "untiled": dict(tile=None),
    "tiles of 5": dict(tile=5),
    "tiles of 3, stages of 1": dict(tile=3, heads_per_stage=1),
    "layer again": dict(tile=3, recompute="layer", store="host"),
}
TIED = [*STACKS] if LONG else ["untiled", "layer again"]


@pytest.mark.parametrize(
    ("preset", "stack"),
    [("llama3", each) for each in STACKS.values()] + [("qwen3", STACKS[name]) for name in TIED],
    ids=[*STACKS, *(f"tied, {name}" for name in TIED)],
)
def test_each_group_is_gathered_once_a_direction_and_reduced_once(workers: Workers, preset: str, stack: dict[str, Any]):
    names = groups(tied=preset == "qwen3")
    # the head and the root are used last and first again in backward: they stay gathered in between
    freed = [name for name in names if name not in ("root", "lm_head")]
    for found in workers.run(traffic, preset, dict(ulysses=2, **stack), 2, world=2):
        for forward, backward in found:
            assert forward == {("gather", name): 1 for name in names}
            assert backward == {("gather", name): 1 for name in freed} | {("reduce", name): 1 for name in names}


def test_micro_batches_reduce_once_each(workers: Workers):
    """Nothing is held back: memory of unreduced gradients would be that of the whole model."""
    for found in workers.run(traffic, "llama3", dict(ulysses=2, tile=7), 3, world=2):
        assert [sum(count for (kind, _), count in b.items() if kind == "reduce") for _, b in found] == [5, 5, 5]


def test_one_layer_of_adapters_is_reduced_by_itself(workers: Workers):
    for forward, backward in workers.run(lora_traffic, world=2):
        assert forward == {("gather", name): 1 for name in groups(tied=False)}
        reduced = [name for (kind, name), count in backward.items() if kind == "reduce" for _ in range(count)]
        assert sorted(reduced) == ["model.layers.0", "model.layers.1"], "frozen groups have nothing to reduce"


def lora_traffic() -> tuple[Counter, Counter]:
    run = prepared(add_lora(tiny(), seed=1), ulysses=2, tile=5)
    counts = watch(run)
    loss = run.loss(run.shard(tokens()))
    forward = Counter(counts)
    counts.clear()
    loss.backward()
    return forward, Counter(counts)


def evaluation_traffic() -> list[Counter]:
    run = prepared(ulysses=2, tile=5)
    counts, found = watch(run), []
    with torch.no_grad():
        for _ in range(2):
            run.loss(run.shard(tokens()))
            found.append(Counter(counts))
            counts.clear()
    return found


def test_evaluation_gathers_each_group_once_and_keeps_none(workers: Workers):
    for found in workers.run(evaluation_traffic, world=2):
        assert found == [{("gather", name): 1 for name in groups(tied=False)}] * 2


def losses_around_a_step(preset: str, grad: bool, first: str) -> list[float]:
    """A forward without backward, then new weights, then the loss again: it must be that of the new weights."""
    run = prepared(preset, ulysses=2)
    batch = run.shard(tokens())
    shards = list(run.model.parameters())  # as an optimizer holds them
    with torch.set_grad_enabled(grad):
        if first == "ours":
            run.loss(batch)
        else:
            run.model(tokens())
    if not grad:
        assert all(a is b for a, b in zip(shards, run.model.parameters(), strict=True)), (
            "an optimizer made now would miss these"
        )
    with torch.no_grad():
        for parameter in shards:
            parameter.mul_(0.5)
        return [run.loss(batch).item(), run.loss(run.shard(tokens(seed=9))).item()]


UPDATES = [("llama3", False, "ours"), ("qwen3", True, "ours"), ("qwen3", False, "theirs"), ("llama3", True, "theirs")]
MORE = [("qwen3", False, "ours"), ("llama3", True, "ours"), ("llama3", False, "theirs"), ("qwen3", True, "theirs")]


@pytest.mark.parametrize(("preset", "grad", "first"), [*UPDATES, *(MORE if LONG else [])])
def test_new_weights_count_at_once(workers: Workers, preset: str, grad: bool, first: str):
    """FSDP2 keeps the root's parameters gathered until backward; without one they would be stale from here on."""
    model = tiny(preset)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        expected = [model(ids, labels=ids).loss.item() for ids in (tokens(), tokens(seed=9))]
    for found in workers.run(losses_around_a_step, preset, grad, first, world=2):
        assert found == pytest.approx(expected, rel=1e-5)
