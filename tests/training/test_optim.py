"""The learning rate, the groups, and clipping by the norm of the whole gradient on any layout."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.base.processes.pool import Workers
from ithaca.config.schema import Train
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import sizes_of
from ithaca.engine.muon import COEFFICIENTS, orthogonal
from ithaca.engine.optimizer import (
    build_optimizer,
    clip,
    global_norm,
    gradients,
    learning_rate,
    parameter_groups,
    warmup_steps,
)
from ithaca.planner.search import plan
from ithaca.stack import Stack

from ..contract.tiny import prepared, tiny, tokens, whole

LONG = os.environ.get("ITHACA_LOSSES") == "long"  # make losses


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


@pytest.mark.parametrize(
    ("shape", "halfway"), [("linear", 0.55), ("1-sqrt", 0.1 + 0.9 * (1 - 0.5**0.5)), ("cosine", 0.55)]
)
def test_wsd_stays_and_comes_down_in_the_last_steps(shape: str, halfway: float):
    found = rates(steps=20, lr=1.0, min_lr=0.1, warmup=2, schedule="wsd", decay=4, decay_shape=shape)
    assert found[:2] == [0.5, 1.0] and found[2:16] == [1.0] * 14
    assert found[17] == pytest.approx(halfway) and found[-1] == pytest.approx(0.1)
    assert found[15:] == sorted(found[15:], reverse=True)
    assert found == rates(steps=20, lr=1.0, min_lr=0.1, warmup=0.1, schedule="wsd", decay=0.2, decay_shape=shape)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0, 1, 0.5])
def test_short_runs(schedule, steps, warmup):
    found = rates(steps=steps, lr=1.0, warmup=warmup, schedule=schedule)
    assert all(0.0 <= rate <= 1.0 and math.isfinite(rate) for rate in found)
    assert max(found) == 1.0 or (schedule, steps) == ("wsd", 1)  # its only step is of the decay


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


class Sizes(TorchDispatchMode):
    """Of what norms are taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket.__name__ == "linalg_vector_norm":
            self.seen.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_no_copy_in_float64_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch):
    """torch makes one of whatever it adds up so: of a table of embeddings that would be gigabytes."""
    monkeypatch.setattr("ithaca.engine.optimizer.BLOCK", 7)
    grads = [torch.randn(5, 4), torch.randn(3), torch.randn(0, 4)]
    with Sizes() as sizes:
        norm = global_norm(grads)
    assert sorted(sizes.seen[:-1]) == [0, 3, 6, 7, 7] and sizes.seen[-1] == 5
    assert norm.item() == pytest.approx(torch.cat([g.flatten().double() for g in grads]).norm().item(), rel=1e-7)


NORMS: list[tuple[int, dict[str, Any]]] = [
    (1, dict(shard_parameters=False)),
    (2, dict(ulysses=2)),
    (4, dict(ulysses=2, ring=2)),
    (4, dict(ulysses=2, replicate=2)),
    (4, dict(ulysses=2, shard_parameters=False)),
    (3, dict(ulysses=3)),
]


@pytest.mark.parametrize(
    ("world", "stack", "most"),
    [(*each, most) for each in NORMS for most in (0.25, None, 1e9) if LONG or most == 0.25 or each[0] < 3],
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


# -- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 5)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape: tuple[int, int]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values, (a, b, c) = values / values.norm(), COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonal(matrix), left * values @ right)
    assert not orthogonal(torch.zeros(shape)).any()


# with the usual eps AdamW takes a gradient of 1e-8, which is rounding, for a whole step
MUON = Train(steps=9, optimizer="muon", lr=0.01, warmup=0, schedule="constant", eps=1e-4)


def updated(stack: dict[str, Any], steps: int) -> dict[str, Tensor]:
    run = prepared("qwen2", **stack)
    optimizer = build_optimizer(run.model, MUON)
    for step in range(steps):
        run.loss(run.shard(tokens(8, 20).roll(step, 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in run.model.named_parameters()}


MUON_LAYOUTS = [(2, dict(replicate=2)), (3, dict(ulysses=3)), (2, dict(shard_parameters=False))]
if LONG:
    MUON_LAYOUTS += [(2, dict(ulysses=2)), (4, dict(ulysses=2, replicate=2))]


@pytest.mark.parametrize(("world", "stack"), MUON_LAYOUTS, ids=str)
def test_muon_does_not_depend_on_the_layout(workers: Workers, world: int, stack: dict[str, Any]):
    """Against a loop over the untouched model, in which torch's AdamW has what is no matrix of a layer."""
    model = tiny("qwen2")
    layers = {p for p in model.model.layers.parameters() if p.dim() == 2}
    others = parameter_groups(model, MUON.weight_decay)
    for group in others:
        group["params"] = [p for p in group["params"] if p not in layers]
    adam = torch.optim.AdamW(others, lr=MUON.lr, betas=MUON.betas, eps=MUON.eps)
    momentum = {p: torch.zeros_like(p) for p in layers}
    for step in range(2):
        ids = tokens(8, 20).roll(step, 1)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        adam.step()
        with torch.no_grad():
            for p in layers:
                momentum[p] = 0.95 * momentum[p] + 0.05 * p.grad
                update = orthogonal(0.05 * p.grad + 0.95 * momentum[p])
                p.copy_(p * (1 - MUON.lr * MUON.weight_decay) - MUON.lr * 0.2 * max(p.shape) ** 0.5 * update)
    for found in workers.run(updated, stack, 2, world=world):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_the_planner_counts_what_muon_holds():
    model = tiny("qwen2")
    optimizer = build_optimizer(model, MUON)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")
    job = Job(sizes_of(model.config.to_dict(), "tiny"), Stack(), 64, optimizer="muon")
    assert held == pytest.approx(job.optimizer_bytes * job.trained) and 4 < job.optimizer_bytes < 8
    slow, fast = (
        plan("llama3_8b", gpus="8xH100", context="64K", stack=Stack(ulysses=8), optimizer=name).speed.parts
        for name in ("muon", "adamw")
    )
    assert slow["optimizer"] > fast["optimizer"] > 0 and slow["matmul"] == fast["matmul"]
    for more in (dict(lora=8), dict(offload_optimizer=True)):
        with pytest.raises(ValueError, match="optimizer='muon' works on whole matrices on the GPU"):
            plan("llama3_8b", gpus="8xH100", context="64K", optimizer="muon", **more)


def test_muon_has_the_matrices_of_layers_and_refuses_what_it_has_no_rule_for():
    model = tiny("qwen2")
    optimizer = build_optimizer(model, MUON)
    orthogonal = {p for group in optimizer.param_groups if group["orthogonal"] for p in group["params"]}
    assert orthogonal == {p for p in model.model.layers.parameters() if p.dim() == 2}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    with pytest.raises(ValueError, match=r"muon has no rule for model\.layers\.0\.mlp\.experts\S+, .* use adamw"):
        build_optimizer(tiny("mixtral"), MUON)
