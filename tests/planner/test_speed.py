"""What of the communication cannot hide behind computation, counted from the stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ithaca.engine.cost import RankCost
from ithaca.engine.job import Job
from ithaca.engine.limits import HOST_CACHE
from ithaca.engine.model.sizes import read_sizes
from ithaca.planner.hardware import parse_gpus
from ithaca.planner.speed import LINK, _links, estimate
from ithaca.stack import Stack

HARDWARE = parse_gpus("8xh100")
EVER = 1e9  # seconds of computation: whatever can hide does


def seconds(stack: Stack, context: int = 2**18, compute: float = EVER, **more) -> float:
    job = replace(Job(read_sizes("llama3_8b"), stack, context, world=stack.ulysses * stack.ring), **more)
    return _links(RankCost(job), HARDWARE, compute)


def exchanged(stack: Stack, context: int = 2**18) -> float:
    rank = RankCost(Job(read_sizes("llama3_8b"), stack, context, world=8))
    sent = sum(rank.attention.exchanged(stack.recompute_of(layer)) for layer in range(rank.model.layers))
    return sent * 7 / 8 / (HARDWARE.gpu.nvlink * LINK)


def summed() -> float:
    """Of gradients, where all ranks have whole weights: there and back."""
    trained = Job(read_sizes("llama3_8b"), Stack(), 1).trained
    return 2 * 4 * trained * 7 / 8 / (HARDWARE.gpu.nvlink * LINK)


@pytest.mark.parametrize(("heads_per_stage", "stages"), [(None, 1), (2, 2), (1, 4)])
def test_the_first_stage_waits_and_the_last_comes_home_alone(heads_per_stage: int | None, stages: int):
    stack = Stack(ulysses=8, heads_per_stage=heads_per_stage, shard_parameters=False)
    assert seconds(stack) == pytest.approx(exchanged(stack) / stages + summed() / 32)


def test_stages_too_large_to_overlap_hide_nothing():
    stack, long = Stack(ulysses=8, heads_per_stage=1, shard_parameters=False), 2**23
    assert seconds(stack, long) == pytest.approx(exchanged(stack, long) + summed() / 32)


def test_nothing_hides_where_nothing_is_computed():
    stack = Stack(ulysses=8, heads_per_stage=1, shard_parameters=False)
    assert seconds(stack, compute=0.0) == pytest.approx(exchanged(stack) + summed())


def test_of_a_ring_the_sums_on_their_last_hop():
    stack = Stack(ring=8, shard_parameters=False)
    rank = RankCost(Job(read_sizes("llama3_8b"), stack, 2**18, world=8))
    tokens, kv_bytes = 2**18 // 8, 2 * 4 * rank.model.kv_heads * rank.model.head_dim  # k and v, fp32
    assert seconds(stack) == pytest.approx(32 * tokens * kv_bytes / (HARDWARE.gpu.nvlink * LINK) + summed() / 32)


def test_of_the_weights_one_layer():
    both = Stack(ulysses=8, heads_per_stage=1), Stack(ulysses=8, heads_per_stage=1, shard_parameters=False)
    with_weights, without = map(seconds, both)
    job = Job(read_sizes("llama3_8b"), both[0], 2**18, world=8)
    gathered = 2 * (2 * job.model.weights - job.model.embedding_weights - job.model.hidden)
    moved = (gathered + 4 * job.trained) * 7 / 8 / (HARDWARE.gpu.nvlink * LINK)
    assert with_weights - without == pytest.approx((moved - summed()) / 32)


def test_what_a_disk_store_was_given_last_is_not_read_back():
    model, context, slow = read_sizes("llama32_1b"), 2**16, 1000.0
    stack = Stack(store="disk", recompute="keep_attention", tile=16384)
    found = estimate(Job(model, stack, context), replace(parse_gpus("1xh200"), disk_rate=slow))
    kept = model.layers * context * (model.hidden + model.heads * model.head_dim) * 2
    waited = found.parts["disk"] + found.parts["attention"] + found.parts["matmul"] + found.parts["other"]
    assert kept > HOST_CACHE
    assert waited == pytest.approx((2 * kept - HOST_CACHE) / slow)
