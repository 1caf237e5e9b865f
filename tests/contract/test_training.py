"""A few optimizer steps on several ranks follow the untouched model on one: the loop that users will write."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.engine.model.weights import cast_parameters

from .tiny import gradients, prepared, tiny, tokens, whole

STEPS = 2


def batches() -> list[Tensor]:
    return [tokens(4, 20, seed=step) for step in range(STEPS)]


def train(preset: str, stack: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW with clipped gradients; evaluates between the steps, as trainers do."""
    run = prepared(preset, **stack)
    with torch.no_grad():
        run.loss(run.shard(tokens(4, 20, seed=99)))  # before the optimizer is made: it must still find the shards
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    losses = []
    for ids in batches():
        loss = run.loss(run.shard(ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        with torch.no_grad():
            run.loss(run.shard(tokens(4, 20, seed=99)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(run.loss(run.shard(tokens(4, 20, seed=99))).item())
    return losses, {name: whole(value) for name, value in run.model.state_dict().items()}


def reference(preset: str) -> tuple[list[float], dict[str, Tensor]]:
    model = tiny(preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches():
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = tokens(4, 20, seed=99)
    with torch.no_grad():
        losses.append(model(last, labels=last).loss.item())
    return losses, model.state_dict()


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1 plain": ("llama3", 1, dict(shard_parameters=False)),
    "2 tied": ("qwen3", 2, dict(ulysses=2)),
    "4 replicated": ("llama3", 4, dict(ulysses=2, replicate=2, store="host", tile=8)),
    "4 whole, tied": ("qwen3", 4, dict(ring=2, shard_parameters=False)),
}
if os.environ.get("ITHACA_LOSSES") == "long":  # make losses
    LAYOUTS |= {"1 tied": ("qwen3", 1, dict()), "2 data": ("llama3", 2, dict(store="host", tile=8))}


@pytest.mark.parametrize(("preset", "world", "stack"), LAYOUTS.values(), ids=LAYOUTS)
def test_training_follows_the_untouched_model(workers: Workers, preset: str, world: int, stack: dict[str, Any]):
    losses, state = reference(preset)
    before = tiny(preset).state_dict()
    moved = min(float((value - before[name]).norm() / before[name].norm()) for name, value in state.items())
    assert moved > 1e-2, "the weights must move for this to prove anything"
    for ours, theirs in workers.run(train, preset, stack, world=world):
        assert ours == pytest.approx(losses, rel=1e-4)
        assert theirs.keys() == state.keys()
        # Adam divides by the size of a gradient, so the tiny ones follow less closely
        for name, value in state.items():
            assert float((theirs[name] - value).norm() / value.norm()) < 1e-3, name


def same_step_twice() -> list[bool]:
    found = []
    for _ in range(2):
        run = prepared("mixtral", ulysses=2, heads_per_stage=1, tile=8, store="disk")
        loss = run.loss(run.shard(tokens(2)))
        loss.backward()
        found.append((loss.detach(), gradients(run)))
    (loss, grads), (again, grads_again) = found
    return [torch.equal(loss, again), *(torch.equal(grads[name], grads_again[name]) for name in grads)]


def test_a_step_is_the_same_to_the_bit_when_repeated(workers: Workers):
    for same in workers.run(same_step_twice, world=2):
        assert len(same) > 10 and all(same)


def scaled(factor: float) -> dict[str, Tensor]:
    run = prepared("mixtral", ulysses=2)
    (run.loss(run.shard(tokens(2))) * factor).backward()
    return gradients(run)


def test_a_loss_may_be_scaled_before_backward(workers: Workers):
    one, eight = (workers.run(scaled, factor, world=2)[0] for factor in (1.0, 8.0))
    for name, grad in one.items():
        torch.testing.assert_close(eight[name], 8 * grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["loss", "logits"])
def test_modes_in_which_a_forward_goes_wrong_later_are_refused(what: str):
    run = prepared()
    batch, compute = run.shard(tokens()), getattr(run, what)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError) as caught:
        compute(batch)
    assert "torch.autocast is on" in str(caught.value) and "prepare(dtype=...)" in str(caught.value)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"torch.inference_mode is on, .* use torch.no_grad\(\)"),
    ):
        compute(batch)
    compute(batch).sum().backward()


def test_half_precision_without_range_is_refused():
    with pytest.raises(ValueError, match=r"dtype=torch.float16 is not supported: .* use torch.bfloat16"):
        ithaca.prepare(tiny(), device="cpu", dtype=torch.float16)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda' was asked for, but torch sees no GPU; use device='cpu'"):
        ithaca.prepare(tiny(), device="cuda")


def masters(dtype: torch.dtype | None) -> tuple[Any, ...]:
    run = ithaca.prepare(cast_parameters(tiny(), torch.bfloat16), ithaca.Stack(ulysses=2), device="cpu", dtype=dtype)
    loss = run.loss(run.shard(tokens()))
    loss.backward()
    parameters = list(run.model.parameters())
    return (
        run.dtype,
        loss.dtype,
        {p.dtype for p in parameters},
        {p.grad.dtype for p in parameters if p.grad is not None},
    )


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_bf16_model_trains_on_float32_masters(workers: Workers, dtype: torch.dtype | None):
    for compute, loss, kept, grads in workers.run(masters, dtype, world=2):
        assert compute == (dtype or torch.bfloat16)
        assert loss == torch.float32 and kept == {torch.float32} and grads == {torch.float32}
