"""One optimizer step: accumulation changes nothing, and a number that is not finite changes no weight."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.base.processes.pool import Workers
from ithaca.config.schema import Train
from ithaca.engine.optimizer import build_optimizer
from ithaca.training.step import NotFinite, train_step

from ..contract.tiny import prepared, tiny, tokens, whole

TRAIN = Train(steps=3, lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1, clip=0.5)


def labels_of(ids: Tensor) -> Tensor:
    """Rows with very different numbers of supervised tokens."""
    labels = ids.clone()
    for row in range(len(labels)):
        labels[row, : 4 * row] = -100
    return labels


def steps(stack: dict[str, Any], accumulation: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    run = prepared("llama3", **stack)
    optimizer = build_optimizer(run.model, TRAIN)
    losses, norms = [], []
    for step in range(TRAIN.steps):
        ids = tokens(4, 20, seed=step)
        parts = zip(ids.chunk(accumulation), labels_of(ids).chunk(accumulation), strict=True)
        batches = [run.shard(each, labels=labels) for each, labels in parts]
        done = train_step(run, optimizer, batches, TRAIN, step, range(4 * step, 4 * step + 4))
        losses.append(done.loss)
        norms.append(done.grad_norm)
        assert done.tokens == 80 and done.lr == 1e-2
    return losses, norms, {name: whole(value) for name, value in run.model.state_dict().items()}


def reference() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = tiny("llama3")
    optimizer = build_optimizer(model, TRAIN)
    losses, norms = [], []
    for step in range(TRAIN.steps):
        ids = tokens(4, 20, seed=step)
        loss = model(ids, labels=labels_of(ids)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.clip or 0.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


FOUR = dict(ulysses=2, ring=2, heads_per_stage=1, tile=3)
LAYOUTS = [(1, {}, 1), (1, {}, 4), (4, FOUR, 2)]
if os.environ.get("ITHACA_LOSSES") == "long":  # make losses
    LAYOUTS += [(1, {}, 2), (4, FOUR, 1), (4, FOUR, 4)]


@pytest.mark.parametrize(("world", "stack", "accumulation"), LAYOUTS, ids=str)
def test_follows_the_untouched_model(workers: Workers, world: int, stack: dict[str, Any], accumulation: int):
    losses, norms, weights = reference()
    start = tiny("llama3").state_dict()
    for found in workers.run(steps, stack, accumulation, world=world):
        assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(norms, rel=1e-4)
        for name, value in found[2].items():
            # of a gradient that is nearly 0 AdamW takes little but the sign, so single numbers may differ; the change may not
            change = (weights[name] - start[name]).norm()
            assert float((value - weights[name]).norm()) <= 1e-3 * float(change), name


def poisoned(stack: dict[str, Any]) -> str:
    """The last rank holds a weight that is NaN. No weight of any rank may change."""
    run = prepared("llama3", **stack)
    optimizer = build_optimizer(run.model, TRAIN)
    if run.mesh.world.rank == run.mesh.world.size - 1:
        run.decoder.norm.weight.to_local().data[-1] = float("nan")  # pyright: ignore
    before = {name: whole(p).clone() for name, p in run.model.named_parameters()}
    try:
        train_step(run, optimizer, [run.shard(tokens(2, 20))], TRAIN, 6, range(40, 42))
    except NotFinite as error:
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(whole(parameter), before[name], rtol=0, atol=0, equal_nan=True)
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("world", "stack"), [(1, {}), (2, dict(ulysses=2))], ids=str)
def test_a_gradient_that_is_not_finite_touches_no_weight(workers: Workers, world: int, stack: dict[str, Any]):
    for message in workers.run(poisoned, stack, world=world):
        assert "step 7: loss nan" in message and "Rows 40 to 41" in message
        assert "gradients on rank" in message and "first in model." in message
        assert f"The weights were not finite before this step (on rank {world - 1}" in message
        assert "first in model.norm.weight)" in message or "rank 1)" in message  # which only the rank that has it knows
