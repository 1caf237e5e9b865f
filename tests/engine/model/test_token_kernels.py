"""Where heads are rotated and sums are normed by a kernel, and that whole models then learn the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ithaca
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.rope import rotate
from ithaca.engine.model.token_kernels import AddedNorm, Rotated
from ithaca.verify.presets import build

from .operators import Operators


def test_a_rotation_and_its_derivative():
    x = torch.randn(2, 9, 3, 16, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(2, 9, 8, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    found, wanted = Rotated.apply(x, cos, sin, Operators()), rotate(x, cos.unsqueeze(2), sin.unsqueeze(2))
    assert isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    grad = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(out, x, grad)[0] for out in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_sum_beside_its_norm(adds: bool, used: str):
    x, update = (torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(16, dtype=torch.float64, requires_grad=True)
    inputs, wanted = [x, weight, *[update] * adds], x + update if adds else x * 1.0
    outputs = [wanted, F.rms_norm(wanted, (16,), weight, 1e-6)]
    ours: Any = AddedNorm.apply(x, update if adds else None, weight, 1e-6, Operators())
    some = {"both": slice(None), "norm": slice(1, 2), "sum": slice(0, 1)}[used]
    grads = [torch.randn_like(x) for _ in "ab"][some]
    found, theirs = (
        torch.autograd.grad(made[some], inputs, grads, allow_unused=True) for made in (list(ours), outputs)
    )
    for a, b in zip([*ours, *found], [*outputs, *theirs], strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("preset", "turns"), [("tiny_llama3", True), ("tiny_qwen3_moe", True), ("tiny_glm4", False)])
@pytest.mark.parametrize("stack", [dict(recompute="none", tile=None), dict(heads_per_stage=1, tile=16)], ids=str)
def test_a_model_learns_the_same(preset: str, turns: bool, stack: dict[str, Any]):
    model: Any = build(preset_config(preset), seed=3)
    untouched: Any = copy.deepcopy(model)
    run = ithaca.prepare(model, ithaca.Stack(shard_parameters=False, **stack), device="cpu")
    kernels = Operators()
    for layer in run.decoder.layers:
        layer.projector.token_kernels = kernels
        for part in layer.module.modules():
            if hasattr(part, "_kernels_of_ithaca"):
                part._kernels_of_ithaca = kernels
    ids = torch.randint(0, model.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(0))
    loss, wanted = run.loss(run.shard(ids)), untouched(input_ids=ids, labels=ids).loss
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert ("rotate" in kernels.calls) == turns
    assert kernels.calls.count("norm_backward") >= 2 * model.config.num_hidden_layers
    for (name, ours), theirs in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name
