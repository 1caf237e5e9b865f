"""A gated MLP keeps gate and up alone, gives the same bits, and leaves alone what somebody changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.engine.model.gated import gated
from ithaca.engine.model.presets import TINY
from ithaca.engine.model.token_kernels import TokenKernels

from .operators import Operators

KERNELS = TokenKernels()
GATED = [
    "tiny_llama3",
    "tiny_gemma3",
    "tiny_qwen3",
    "tiny_olmo2",
    "tiny_granite",
    "tiny_smollm3",
    "tiny_phi3",
    "tiny_glm4",
]

BACKWARD = {"tiny_phi3": "expert_backward", "tiny_glm4": "expert_backward"}  # of gate and up in one


def mlp_of(preset: str, dtype: torch.dtype = torch.float32) -> Any:
    fields = dict(TINY[preset])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    return model.model.layers[0].mlp.to(dtype)


def ran(mlp: Any, function: Callable[[Tensor], Tensor], given: torch.dtype = torch.float32) -> tuple[list[Tensor], int]:
    """-> output and all gradients, and bytes that were kept beside input and weights. given: what the input is rounded to"""
    dtype = next(mlp.parameters()).dtype
    x, up = torch.randn(2, 2, 33, 64, generator=torch.Generator().manual_seed(1)).to(given).to(dtype)
    x.requires_grad_()
    mlp.zero_grad(set_to_none=True)
    others = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in mlp.parameters())}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = function(x)
    y.backward(up)
    found = [y.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]
    return found, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", GATED)
def test_the_same_bits_from_half_of_what_is_kept(preset: str, dtype: torch.dtype):
    mlp = mlp_of(preset, dtype)
    theirs, whole = ran(mlp, mlp)
    ours, kept = ran(mlp, lambda x: gated(mlp, x, KERNELS, keep=True))
    exact, _ = ran(mlp.double(), mlp, given=dtype)
    assert len(ours) >= 4
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # gradients of the input by gate and up add up before they are rounded
        nearer = (a - exact[1]).norm() <= (b - exact[1]).norm() + 1e-7 * exact[1].norm() if at == 1 else None
        assert torch.equal(a, b) if nearer is None else nearer
    assert kept == 2 * 2 * 33 * 96 * ours[0].element_size() <= whole / 2


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("preset", GATED)
def test_by_kernels_where_the_activation_is_silu(preset: str, keep: bool):
    mlp, kernels = mlp_of(preset), Operators()
    theirs, whole = ran(mlp, mlp)
    ours, kept = ran(mlp, lambda x: gated(mlp, x, kernels, keep))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    silu = preset != "tiny_gemma3"
    assert kernels.calls[:2] == (["product", BACKWARD.get(preset, "product_backward")] if silu else [])
    assert kept == (2 * 2 * 33 * 96 * 4 if silu or keep else whole)


@pytest.mark.parametrize("kernels", [KERNELS, Operators()])
def test_frozen_weights_have_no_gradient(kernels: TokenKernels):
    mlp = mlp_of("tiny_llama3").requires_grad_(False)
    theirs, _ = ran(mlp, mlp)
    ours, _ = ran(mlp, lambda x: gated(mlp, x, kernels, keep=True))
    assert len(ours) == 2 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def with_adapters(preset: str, names: list[str]) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    mlp = mlp_of(preset)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6, target_modules=names), mlp)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            if "lora_" in name:  # B is zero at first
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    return mlp


@pytest.mark.parametrize("kernels", [KERNELS, Operators()], ids=["operators", "kernels"])
@pytest.mark.parametrize("names", [["gate_proj", "up_proj", "down_proj"], ["up_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("preset", GATED[:2])
def test_with_adapters_it_keeps_as_little(preset: str, names: list[str], kernels: TokenKernels):
    mlp = with_adapters(preset, names)
    theirs, whole = ran(mlp, mlp)
    for keep, unread in ((True, False), (False, False), (False, True)):
        ours, kept = ran(mlp, lambda x, keep=keep, unread=unread: gated(mlp, x, kernels, keep, unread))
        assert len(ours) == 2 + 2 * len(names)
        if unread:
            assert ours[0].isnan().all()
        for a, b in zip(ours[unread:], theirs[unread:], strict=True):
            assert (a - b).norm() <= 2e-6 * b.norm()
        low = 4 * 2 * 33 * 4 * sum(name != "down_proj" for name in names)  # what comes out of the first matrices
        assert kept == 2 * 2 * 33 * 96 * 4 + low < whole


@pytest.mark.parametrize("preset", ["tiny_llama3", "tiny_phi3"])
def test_parts_are_found_by_their_names(preset: str):
    mlp = mlp_of(preset)
    theirs, _ = ran(mlp, mlp)
    mlp._modules = dict(sorted(mlp._modules.items(), reverse=True))  # up before gate
    ours, _ = ran(mlp, lambda x: gated(mlp, x, KERNELS, keep=True))
    assert torch.equal(ours[0], theirs[0])


def hooked(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.down_proj.register_forward_hook(lambda module, args, out: 2 * out)


def replaced(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.act_fn = torch.nn.Sequential(torch.nn.ReLU())


def shadowed(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.forward = lambda x: 3 * x


def patched(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))


@pytest.mark.parametrize("change", [hooked, replaced, shadowed, patched])
def test_what_somebody_changed_runs_as_it_is(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    mlp = mlp_of("tiny_llama3")
    before = gated(mlp, torch.ones(1, 1, 64), Operators(), keep=True)
    change(mlp, monkeypatch)
    after = gated(mlp, torch.ones(1, 1, 64), Operators(), keep=True)
    assert torch.equal(after, mlp(torch.ones(1, 1, 64))) and not torch.equal(after, before)


@pytest.mark.parametrize("preset", ["tiny_arcee", "tiny_starcoder2", "tiny_qwen3_moe"])
def test_others_run_as_they_are(preset: str):
    mlp = mlp_of(preset)
    x = torch.randn(1, 5, 64)
    assert torch.equal(gated(mlp, x, KERNELS, keep=True), mlp(x))
