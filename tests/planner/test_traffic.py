"""Bytes that a step sends, against those that a plan counts: all-to-alls, ring, FSDP2's gathers and reductions. Exactly."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ithaca.engine.cost import RankCost
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import sizes_of
from ithaca.planner.speed import sharded_bytes
from ithaca.stack import Stack
from ithaca.verify.case import Case, Session
from ithaca.verify.presets import config_of

LENGTH = 96
EVEN = (("vocab_size", 256),)  # FSDP2 pads rows that ranks do not divide


class Gather(DefaultAllGather):
    sent: Counter

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent["gathered"] += output_tensor.nbytes
        return super().__call__(output_tensor, *args, **kwargs)


class Reduce(DefaultReduceScatter):
    sent: Counter

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent["reduced"] += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def sent_by(case: Case) -> dict[str, int]:
    """Of one step, by this rank; what it sends to itself included, as the plan counts it."""
    session = Session(case)
    batch = session.shard(session.data())
    sent: Counter[str] = Counter()
    all_to_all, shift, sum_up = dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce

    def counted(out: torch.Tensor, send: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["exchanged"] += send.nbytes
        return all_to_all(out, send, *args, **kwargs)

    def shifted(operations: list[Any]) -> Any:
        sent["passed"] += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return shift(operations)

    def summed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1:  # else it is the loss
            sent["summed"] += tensor.nbytes
        return sum_up(tensor, *args, **kwargs)

    for module in session.run.decoder.model.modules():
        if isinstance(module, FSDPModule):
            for make, put in ((Gather, module.set_custom_all_gather), (Reduce, module.set_custom_reduce_scatter)):
                collective = make()
                collective.sent = sent
                put(collective)
    dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce = counted, shifted, summed
    try:
        session.run.loss(batch).backward()
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce = all_to_all, shift, sum_up
    return dict(sent)


STEPS = [
    ("llama3", Stack(ulysses=2, heads_per_stage=1, recompute=("layer", "keep_attention"), store="host")),
    ("llama3", Stack(ulysses=2, heads_per_stage=2, recompute="none", tile=None, engine="composed")),
    ("qwen2_28", Stack(ulysses=4, heads_per_stage=3)),
    ("llama3", Stack(ring=2)),
    ("qwen3", Stack(ulysses=2, ring=2, heads_per_stage=1, store="host")),
    ("llama3", Stack(ulysses=2, shard_parameters=False)),
    ("llama3", Stack(ulysses=2, replicate=2)),
]
if os.environ.get("ITHACA_PLANS") == "long":  # make plans
    STEPS += [
        ("llama3", Stack(ulysses=4)),
        ("llama3", Stack(ulysses=4, heads_per_stage=1, recompute="layer")),
        ("llama3", Stack(ring=4)),
        ("llama3", Stack(ring=2, recompute="layer", engine="composed")),
    ]


@pytest.mark.parametrize(("model", "stack"), STEPS, ids=str)
def test_what_is_sent_is_what_is_planned(workers, model: str, stack: Stack):
    world = stack.context_ranks * stack.replicate
    case = Case(model, stack, world, dtype="bfloat16", length=LENGTH, changes=EVEN)
    sent = workers.run(sent_by, case, world=world)[0]
    sizes = sizes_of(config_of(model, False, **dict(EVEN)).to_dict(), model)
    rank = RankCost(Job(sizes, stack, LENGTH, world, rows=world // stack.context_ranks))
    kinds = [stack.recompute_of(layer) for layer in range(rank.model.layers)]
    planned = {
        "exchanged": sum(map(rank.attention.exchanged, kinds)) if stack.ulysses > 1 else 0,
        "passed": sum(map(rank.attention.passed_around, kinds)) if stack.ring > 1 else 0,
        **sharded_bytes(rank),
    }
    assert sent == {name: nbytes for name, nbytes in planned.items() if nbytes}
