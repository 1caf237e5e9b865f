"""Experts in grouped products: transformers' own numbers, from less memory, and nobody else's model changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.engine.model.experts import NAME, use_grouped_experts
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.token_kernels import TokenKernels
from ithaca.verify.presets import build

from .operators import Operators

MIXTURES = ["tiny_qwen3_moe", "tiny_mixtral", "tiny_olmoe", "tiny_qwen2_moe"]


def experts_of(preset: str) -> Any:
    model: Any = build(preset_config(preset), seed=3)
    return next(module for module in model.modules() if hasattr(module, "has_gate"))


def ran(experts: Any, tokens: int, top: int = 2) -> tuple[list[Tensor], int]:
    """-> output and all gradients, and bytes that were kept beside weights"""
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(
        tokens, experts.down_proj.shape[-1 if experts.is_transposed else 1], generator=random
    ).requires_grad_()
    # not the first expert: one that nobody goes to has a gradient of zero
    scores = torch.rand(tokens, experts.num_experts - 1, generator=random)
    index = scores.topk(top, -1).indices + 1
    weights = scores.topk(top, -1).values.requires_grad_()
    own = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own and t.is_floating_point():
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = experts(x, index, weights)
    inputs = [x, weights, *(p for p in experts.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(y, inputs, torch.randn(y.shape, generator=random))
    return [y.detach(), *grads], sum(kept.values())


@pytest.mark.parametrize("kernels", [TokenKernels(), Operators()], ids=["operators", "kernels"])
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("preset", MIXTURES)
def test_the_numbers_are_those_of_plain_experts(preset: str, tokens: int, kernels: TokenKernels):
    experts = experts_of(preset)
    experts.config._experts_implementation_internal = "eager"
    wanted, _ = ran(experts, tokens)
    experts.config._experts_implementation_internal = "grouped_mm"
    _, theirs = ran(experts, tokens)
    use_grouped_experts([experts], kernels)
    assert experts.config._experts_implementation == NAME
    found, kept = ran(experts, tokens)
    assert len(found) == 5 and found[3][0].abs().max() == 0
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() <= 1e-6 * exact.norm()
    # tokens, gate and up of their copies, and a weight for each
    assert kept == 4 * tokens * (experts.hidden_dim + 2 * 2 * experts.intermediate_dim + 2) <= 0.6 * theirs


def test_frozen_experts_have_no_gradient():
    experts = experts_of("tiny_qwen3_moe").requires_grad_(False)
    wanted, _ = ran(experts, 20)
    use_grouped_experts([experts], TokenKernels())
    found, _ = ran(experts, 20)
    assert len(found) == 3 and all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True)
    )


def test_a_model_that_shares_its_config_keeps_its_own():
    one = experts_of("tiny_qwen3_moe")
    other = copy.deepcopy(one)
    other.config = one.config
    use_grouped_experts([one], TokenKernels())
    assert (one.config._experts_implementation, other.config._experts_implementation) == (NAME, "grouped_mm")


def test_what_was_chosen_stays():
    experts = experts_of("tiny_qwen3_moe")
    experts.config._experts_implementation_internal = "eager"
    use_grouped_experts([experts], TokenKernels())
    assert experts.config._experts_implementation == "eager"


@pytest.mark.parametrize("change", ["hook", "gate", "forward"])
def test_what_somebody_changed_runs_as_it_is(change: str):
    experts, kernels = experts_of("tiny_qwen3_moe"), Operators()
    plain, _ = ran(experts, 30)
    if change == "hook":
        experts.act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    elif change == "gate":
        experts._apply_gate = lambda wide: wide.chunk(2, -1)[1]
    else:
        experts.act_fn.forward = lambda x: 3 * x
    wanted, _ = ran(experts, 30)
    use_grouped_experts([experts], kernels)
    found, _ = ran(experts, 30)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and not kernels.calls
    assert not torch.equal(found[0], plain[0])


def test_experts_with_biases_run_as_they_are():
    experts, kernels = experts_of("tiny_gpt_oss"), Operators()
    wanted, _ = ran(experts, 30)
    use_grouped_experts([experts], kernels)
    found, _ = ran(experts, 30)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and not kernels.calls
