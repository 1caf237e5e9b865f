"""Kernels of the per-token work against torch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from ithaca.engine.model.gated import gated
from ithaca.engine.model.norm import epsilon_of, fused_norm
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.rope import rotate
from ithaca.engine.model.token_kernels import Rotated, TokenKernels
from ithaca.verify.presets import build

pytestmark = pytest.mark.gpu
KERNELS = TokenKernels()


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(len(shape) + sum(shape))
    return (scale * torch.randn(shape, device="cuda", generator=random)).bfloat16()


@pytest.mark.parametrize("shape", [(2, 37, 3, 64), (1, 500, 32, 128), (2, 9, 5, 96), (1, 20, 1, 16)], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_rotated_bit_for_bit(shape: tuple[int, ...], heads_first: bool, shared: bool):
    rows, tokens, heads, size = shape
    x = bf16(heads, rows, tokens, size).permute(1, 2, 0, 3) if heads_first else bf16(*shape)
    angles = 3 * bf16(1 if shared else rows, tokens, size // 2).float().repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    x.requires_grad_()
    grad = bf16(heads, rows, tokens, size, scale=2.0).permute(1, 2, 0, 3)
    wanted, found = rotate(x, cos.unsqueeze(2), sin.unsqueeze(2)), Rotated.apply(x, cos, sin, KERNELS)
    assert KERNELS.fuses(x) and isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (found, wanted)))


@pytest.mark.parametrize("shape", [(2, 37, 64), (1, 3000, 2048), (5, 4096), (3, 7, 5376)], ids=str)
@pytest.mark.parametrize("adds", [True, False])
def test_a_sum_and_its_norm(shape: tuple[int, ...], adds: bool):
    x, update, weight = bf16(*shape), bf16(1, *shape)[0], bf16(shape[-1])
    dtotal, dnormed = bf16(1, 1, *shape)[0, 0], bf16(1, 1, 1, *shape)[0, 0, 0]
    total, normed, scales = KERNELS.add_norm(x, update if adds else None, weight, 1e-5)
    assert torch.equal(total, x + update if adds else x)
    exact = total.double().requires_grad_(), weight.double().requires_grad_()
    wanted = F.rms_norm(exact[0], weight.shape, exact[1], 1e-5)
    dx, dweight = torch.autograd.grad(wanted, exact, dnormed.double())
    found = KERNELS.norm_backward(total, weight, scales, dnormed, dtotal, learn=True)
    for ours, theirs in zip((normed, *found), (wanted, dx + dtotal.double(), dweight), strict=True):
        assert ours is not None and (ours - theirs).norm() <= 2**-8 * theirs.norm()
    alone, none = KERNELS.norm_backward(total, weight, scales, dnormed, None, learn=False)
    assert none is None and (alone - dx).norm() <= 2**-8 * dx.norm()


@pytest.mark.parametrize(("kind", "plus"), [(Qwen3NextRMSNorm, 1.0), (Qwen3NextRMSNormGated, 0.0)])
def test_norms_that_add_one_or_are_gated(kind: Any, plus: float):
    """Rows of a head, as they come out of a split: not dense."""
    has_gate = kind is Qwen3NextRMSNormGated
    norm = kind(256).to("cuda", torch.bfloat16)
    norm.weight.data = bf16(256, scale=0.1) + (1.0 - plus)
    given = [t.requires_grad_() for t in bf16(2, 1, 500, 4, 512)[..., :256].unbind()[: 1 + has_gate]]
    grad, leaves = bf16(1, 500, 4, 256), [*given, norm.weight]
    found = fused_norm(norm, tuple(given), plus, KERNELS)
    assert found is not None
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = F.rms_norm(exact[0], (256,), plus + exact[-1], epsilon_of(norm)) * (F.silu(exact[1]) if has_gate else 1.0)
    pairs = zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    )
    for ours, theirs in [(found, wanted), *pairs]:
        assert (ours - theirs).norm() <= 2**-8 * theirs.norm()


def test_products_within_a_rounding():
    gate, up, grad = (
        bf16(3, 501, 777, scale=4.0),
        bf16(3, 501, 778)[..., 1:].contiguous(),
        bf16(3, 501, 779)[..., 2:].contiguous(),
    )
    gate.requires_grad_()
    up.requires_grad_()
    wanted = F.silu(gate) * up
    dgate, dup = torch.autograd.grad(wanted, [gate, up], grad)
    product = KERNELS.product(gate.detach(), up.detach())
    for found, exact in zip(
        (product, *KERNELS.product_backward(gate, up, grad)), (wanted, wanted, dgate, dup), strict=False
    ):
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=1e-6)
        assert (found != exact).float().mean() < 0.01


@pytest.mark.parametrize("keep", [False, True])
def test_an_mlp_and_its_gradients(keep: bool):
    model: Any = build(preset_config("tiny_llama"), seed=3).to("cuda", torch.bfloat16)
    mlp = model.model.layers[0].mlp
    x = bf16(2, 100, model.config.hidden_size).requires_grad_()
    grad = bf16(2, 100, model.config.hidden_size, scale=0.1)
    inputs = [x, *mlp.parameters()]
    wanted = torch.autograd.grad(mlp(x), inputs, grad)
    found = torch.autograd.grad(gated(mlp, x, KERNELS, keep), inputs, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 2**-8 * theirs.norm()
