"""The learning rate, the groups, and clipping by the norm of the whole gradient on any layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.base.processes.pool import Workers
from ithaca.config.schema import Train
from ithaca.engine.optimizer import (
    build_optimizer,
    clip,
    global_norm,
    gradients,
    learning_rate,
    parameter_groups,
    warmup_steps,
)

from ..contract.tiny import prepared, tiny, tokens, whole


def rates(**settings: Any) -> list[float]:
    train = Train(**settings)
    return [learning_rate(train, step) for step in range(train.steps)]


def test_warm_up_then_cosine_to_the_end():
    found = rates(steps=11, lr=1.0, min_lr=0.1, warmup=2, schedule="cosine")
    assert found[:3] == pytest.approx([0.5, 1.0, 1.0]) and found[-1] == pytest.approx(0.1)
    assert found[6] == pytest.approx(0.55) and found == sorted(found[:3]) + sorted(found[3:], reverse=True)


def test_linear_and_constant():
    assert rates(steps=5, lr=1.0, warmup=0, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(steps=4, lr=1.0, warmup=2, schedule="constant") == pytest.approx([0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0, 1, 0.5])
def test_short_runs(schedule, steps, warmup):
    found = rates(steps=steps, lr=1.0, warmup=warmup, schedule=schedule)
    assert all(0.0 <= rate <= 1.0 and math.isfinite(rate) for rate in found) and max(found) == 1.0


def test_beyond_the_last_step_it_stays():
    train = Train(steps=5, lr=1.0, min_lr=0.2, warmup=0)
    assert learning_rate(train, 10) == pytest.approx(0.2)


def test_a_share_of_the_steps():
    assert warmup_steps(Train(steps=30, warmup=0.1)) == 3 and warmup_steps(Train(steps=30, warmup=7)) == 7


def test_only_matrices_decay():
    model = tiny("qwen2")
    decayed, plain = parameter_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = tiny("llama3")
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert group["params"] == [model.lm_head.weight]


def test_eight_bits_without_the_package_say_so():
    try:
        import torchao  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(ValueError, match="adamw8bit needs the package torchao"):
            build_optimizer(tiny("llama3"), Train(steps=1, optimizer="adamw8bit"))


def clipped(stack: dict[str, Any], most: float | None) -> tuple[float, dict[str, Tensor]]:
    run = prepared("llama3", **stack)
    run.loss(run.shard(tokens(8, 20))).backward()
    grads = gradients(run.model)
    norm = global_norm(grads)
    clip(grads, norm, most)
    return float(norm), {name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("most", [None, 0.25, 1e9])
@pytest.mark.parametrize(
    ("world", "stack"),
    [
        (1, dict(shard_parameters=False)),
        (2, dict(ulysses=2)),
        (4, dict(ulysses=2, ring=2)),
        (4, dict(ulysses=2, replicate=2)),
        (4, dict(ulysses=2, shard_parameters=False)),
        (3, dict(ulysses=3)),
    ],
    ids=str,
)
def test_the_norm_is_that_of_the_whole_gradient(
    workers: Workers, world: int, stack: dict[str, Any], most: float | None
):
    model, ids = tiny("llama3"), tokens(8, 20)
    model(ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if most is None else most)
    for norm, grads in workers.run(clipped, stack, most, world=world):
        assert norm == pytest.approx(float(expected), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-7)
