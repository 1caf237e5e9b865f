"""A linear with adapters: PEFT's own numbers, in fewer passes; what somebody changed runs as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ithaca.engine.model.linear import apply_linear, bind_linear, has_adapters, linears

INPUTS, TOKENS = 40, 21


class Two(nn.Module):
    """Two linears of one input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, 24, bias), nn.Linear(INPUTS, 32, bias)


def adapted(bias: bool = False, adapters: int = 1, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = Two(bias)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["first", "second"], **more)
    model = get_peft_model(model, config)
    for name in range(1, adapters):
        model.add_adapter(str(name), copy.deepcopy(config))
    model.base_model.set_adapter(["default", *map(str, range(1, adapters))])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # B is zero at first
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.base_model.model.to(dtype)


def by_peft(x: Tensor, parts: list[Any]) -> tuple[Tensor, ...]:
    return tuple(part(x) for part in parts)


def by_ours(x: Tensor, parts: list[Any]) -> tuple[Tensor, ...]:
    return linears(x, [bind_linear(part) for part in parts])


def ran(
    model: Any, function: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype, wide: bool = False
) -> list[Tensor]:
    """-> outputs, and gradients of the input and of all that learns. wide: numbers of `dtype`, computed in float64"""
    random = torch.Generator().manual_seed(1)
    given = [torch.randn(2, TOKENS, width, generator=random).to(dtype) for width in (INPUTS, 24, 32)]
    if wide:
        model, given = copy.deepcopy(model).double(), [t.double() for t in given]
    x, *ups = given
    x.requires_grad_()
    outs = function(x, [model.first, model.second])
    learn = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(outs, [x, *learn], ups, allow_unused=True)
    return [*outs, *(g for g in grads if g is not None)]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"bias": True},
        {"bias": True, "lora_bias": True},
        {"adapters": 2},
        {"use_rslora": True},
        {"modules_to_save": []},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_peft(case: dict[str, Any]):
    model = adapted(**case)
    theirs, ours = (ran(model, function, torch.float32) for function in (by_peft, by_ours))
    assert len(ours) >= 3 + 4
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_in_bf16_they_are_no_farther_from_the_exact_ones():
    model = adapted(bias=True, dtype=torch.bfloat16)
    exact = ran(model, by_peft, torch.bfloat16, wide=True)
    theirs, ours = (ran(model, function, torch.bfloat16) for function in (by_peft, by_ours))
    far = [[(a.double() - e).norm() / e.norm() for a, e in zip(found, exact, strict=True)] for found in (ours, theirs)]
    assert sum(far[0]) <= sum(far[1]) and max(far[0]) < 0.02


def test_without_gradients_and_with_adapters_switched_off():
    model, x = adapted(bias=True), torch.randn(3, INPUTS)
    for off in (False, True):
        for part in (model.first, model.second):
            part.enable_adapters(not off)
        with torch.no_grad():
            assert torch.allclose(bind_linear(model.first)(x), model.first(x), rtol=1e-5, atol=1e-6)
        assert bind_linear(model.first).plain == off


def test_only_what_gradients_need_is_kept():
    model, x = adapted(), torch.randn(2, TOKENS, INPUTS, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    weights = sum(p.numel() for p in model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        by_ours(x, [model.first, model.second])
    assert sum(kept.values()) == weights + x.numel() + 2 * 2 * TOKENS * 3  # and what comes out of each A
    kept.clear()
    model.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        by_ours(x, [model.first, model.second])
    assert sum(kept.values()) == weights + 2 * 2 * TOKENS * 3


def test_what_is_unread_has_the_same_gradients():
    model = adapted(bias=True)

    def unread(x: Tensor, parts: list[Any]) -> tuple[Tensor, ...]:
        return linears(x, [bind_linear(part) for part in parts], unread=True)

    wanted, found = (ran(model, function, torch.float32) for function in (by_ours, unread))
    assert all(out.isnan().all() for out in found[:2])
    assert all(torch.equal(a, b) for a, b in zip(found[2:], wanted[2:], strict=True))


@pytest.mark.parametrize("where", ["first", "first.base_layer", "first.lora_B.default"])
def test_what_is_hooked_runs_as_it_is(where: str):
    model, x = adapted(), torch.randn(3, INPUTS)
    plain = model.first(x)
    model.get_submodule(where).register_forward_hook(lambda module, args, out: 2 * out)
    assert torch.equal(apply_linear(model.first, x), model.first(x)) and not torch.equal(model.first(x), plain)


def test_what_is_not_lora_on_a_linear_runs_as_it_is():
    convolution = nn.Conv1d(4, 4, 1)
    x = torch.randn(1, 4, 5)
    assert torch.equal(apply_linear(convolution, x), convolution(x))
    assert not has_adapters(nn.Linear(2, 2)) and not has_adapters(adapted(use_dora=True).first)
    assert has_adapters(adapted().first)
