"""What a GPU does to each token in one kernel, where Hugging Face writes several: RMSNorm, rotary positions, the product of a gated
MLP.

All are bound by memory. Written as operators they read and write a tile five to fifteen times, which in short contexts is a tenth
of a step. In bf16 on a GPU they are torch's `rms_norm` and the Triton kernels of token_triton.py; elsewhere the operators run.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.holding import CALLER, module_holds
from .rope import rotate

log = logging.getLogger("ithaca")
module_holds(__name__, CALLER)


class TokenKernels:
    """The kernels, and where they are used. A dry run has some that only allocate."""

    def fuses_norm(self, x: Tensor) -> bool:
        return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def fuses(self, x: Tensor) -> bool:
        """The others."""
        return x.is_cuda and x.dtype is torch.bfloat16 and _agree(x.device)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        """x [B, t, heads, D], cos and sin [B or 1, t, D], both halves of D alike. back: by the opposite angle."""
        from .token_triton import rotate

        return rotate(x, cos, sin, back)

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up of [..., i], whose rows may lie apart."""
        from .token_triton import product

        return product(gate, up)

    def product_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The product, and the gradients of gate and up. That of gate is written over `grad`."""
        from .token_triton import product_backward

        return product_backward(gate, up, grad)

    def expert_backward(self, wide: Tensor, dproduct: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of experts.py."""
        from .token_triton import expert_backward

        return expert_backward(wide, dproduct, weight)

    def combine(self, copies: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
        """Of experts.py."""
        from .token_triton import combine

        return combine(copies, place, weights)


class Rotated(torch.autograd.Function):
    """rope.py's `rotate` of whole heads, with the same roundings. Its derivative is a rotation back, so it keeps no heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: TokenKernels) -> Tensor:
        ctx.cos, ctx.sin, ctx.kernels = cos, sin, kernels
        return kernels.rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return ctx.kernels.rotate(grad, ctx.cos, ctx.sin, back=True), None, None, None


@cache
@torch.no_grad()
def _agree(device: torch.device) -> bool:
    """Whether the kernels can be built here, and answer what operators do."""
    if importlib.util.find_spec("triton") is None:
        return False
    kernels, random = TokenKernels(), torch.Generator(device).manual_seed(0)
    gate, up, grad = torch.randn(3, 1, 6, 5, 64, device=device, generator=random).bfloat16()
    angles = torch.randn(1, 6, 32, device=device, generator=random).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    active = F.silu(gate)
    wanted = [
        rotate(gate, cos.unsqueeze(2), sin.unsqueeze(2)), rotate(gate, cos.unsqueeze(2), -sin.unsqueeze(2)), active * up,
        active * up, torch.ops.aten.silu_backward(grad * up, gate), grad * active,
    ]  # fmt: skip
    try:
        found = [kernels.rotate(gate, cos, sin, back) for back in (False, True)]
        found += [kernels.product(gate, up), *kernels.product_backward(gate, up, grad)]
        why = None if all(map(_alike, found, wanted)) else "they do not answer what the operators do"
    except Exception as error:  # Triton's compiler, or the one of C that it calls
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if why is not None:
        log.warning("rotary positions and gated products run by operators, a little slower: %s", why)
    return why is None


def _alike(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=1e-3)
