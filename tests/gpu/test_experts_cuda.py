"""Experts on a GPU: grouped products and kernels against transformers' own path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ithaca.engine.model.experts import _agree, use_grouped_experts
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.token_kernels import TokenKernels
from ithaca.verify.presets import build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("preset", ["tiny_qwen3_moe", "tiny_mixtral", "tiny_qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_numbers_are_those_of_plain_experts(preset: str, dtype: torch.dtype):
    model: Any = build(preset_config(preset), seed=3).to("cuda")
    experts = next(module for module in model.modules() if hasattr(module, "has_gate"))
    random = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(500, experts.hidden_dim, device="cuda", generator=random)
    scores = torch.rand(500, experts.num_experts, device="cuda", generator=random)
    up = torch.randn(500, experts.hidden_dim, device="cuda", generator=random)

    def ran(implementation: str | None, dtype: torch.dtype) -> list[torch.Tensor]:
        experts.to(dtype)
        if implementation is None:
            use_grouped_experts([experts], TokenKernels())
        else:
            experts.config._experts_implementation_internal = implementation
        top = scores.topk(2)
        given = [t.to(dtype).detach().requires_grad_() for t in (x, top.values)]
        y = experts(given[0], top.indices, given[1])
        return [y.detach(), *torch.autograd.grad(y, [*given, *experts.parameters()], up.to(dtype))]

    wanted = ran("eager", torch.float32)
    theirs, ours = ran("grouped_mm", dtype), ran(None, dtype)
    assert _agree(x.device, adapted=False) and _agree(x.device, adapted=True)
    for mine, other, exact in zip(ours, theirs, wanted, strict=True):
        off, usual = ((t.float() - exact).norm() / exact.norm() for t in (mine, other))
        assert off <= max(1.5 * usual, 1e-5)
