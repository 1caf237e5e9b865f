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


def ran(experts: Any, tokens: int, top: int = 2, inside: Any = None) -> tuple[list[Tensor], int]:
    """-> output and all gradients, and bytes that were kept beside weights. inside: the experts in a wrapper"""
    inside = inside or experts
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(
        tokens, inside.down_proj.shape[-1 if inside.is_transposed else 1], generator=random
    ).requires_grad_()
    # not the first expert: one that nobody goes to has a gradient of zero
    scores = torch.rand(tokens, inside.num_experts - 1, generator=random)
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


def adapted(preset: str, rank: int, names: tuple[str, ...]) -> tuple[Any, Any]:
    """PEFT's wrapper of experts, and what is inside."""
    from peft import LoraConfig, get_peft_model

    targets = [f"mlp.experts.{name}" for name in names]
    model: Any = build(preset_config(preset), seed=3)
    model = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank + 1, target_modules=[], target_parameters=targets)
    )
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # B is zero at first
                parameter.copy_(torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5)
    wrapper = next(module for module in model.modules() if type(module).__name__ == "ParamWrapper")
    return wrapper, wrapper.get_base_layer()


BOTH = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize("kernels", [TokenKernels(), Operators()], ids=["operators", "kernels"])
@pytest.mark.parametrize(("rank", "names"), [(3, BOTH), (8, BOTH), (4, BOTH[:1]), (1, BOTH[1:])])
@pytest.mark.parametrize("preset", MIXTURES)
def test_adapters_of_experts_are_products_of_their_rank(
    preset: str, rank: int, names: tuple[str, ...], kernels: TokenKernels
):
    wrapper, experts = adapted(preset, rank, names)
    experts.config._experts_implementation_internal = "eager"
    wanted, _ = ran(wrapper, 50, inside=experts)
    experts.config._experts_implementation_internal = "grouped_mm"
    _, theirs = ran(wrapper, 50, inside=experts)
    use_grouped_experts([experts], kernels)
    found, kept = ran(wrapper, 50, inside=experts)
    assert len(found) == 3 + 2 * len(names)
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() <= 2e-6 * exact.norm()
    weights = sum(getattr(experts, name).nbytes for name in names)  # which PEFT makes anew, with its adapters in them
    assert kept <= theirs - weights


def test_two_adapters_at_once_are_left_to_peft():
    wrapper, experts = adapted("tiny_qwen3_moe", 3, BOTH)
    experts.config._experts_implementation_internal = "eager"
    for part in (wrapper, wrapper.base_layer):
        for table in (part.lora_A, part.lora_B):
            table["other"] = copy.deepcopy(table["default"])
        part.scaling["other"] = 0.25
        part._active_adapter = ["default", "other"]
    wanted, _ = ran(wrapper, 50, inside=experts)
    use_grouped_experts([experts], kernels := Operators())
    found, _ = ran(wrapper, 50, inside=experts)
    assert not kernels.calls and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)
    )


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
