"""What a GPU does to each token in one kernel, where Hugging Face writes several: a residual sum and its RMSNorm, rotary positions,
the product of a gated MLP.

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
from .unread import nothing

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

    def add_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x + update, its norm, and a number a row for `norm_backward`."""
        from .token_triton import add_norm

        return add_norm(x, update, weight, epsilon)

    def norm_backward(
        self, total: Tensor, weight: Tensor, scales: Tensor, dnormed: Tensor, dtotal: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the sum, by its norm and by itself; and of the weight."""
        from .token_triton import norm_backward

        return norm_backward(total, weight, scales, dnormed, dtotal, learn)

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
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: TokenKernels, unread: bool = False) -> Tensor:
        ctx.cos, ctx.sin, ctx.kernels = cos, sin, kernels
        return nothing(x, x.shape) if unread else kernels.rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore
        return ctx.kernels.rotate(grad, ctx.cos, ctx.sin, back=True), None, None, None, None


class GatedProduct(torch.autograd.Function):
    """silu(gate) · up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: TokenKernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.product(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        _, dgate, dup = ctx.kernels.product_backward(*ctx.saved_tensors, grad.clone())  # which is written over
        return dgate, dup, None


class AddedNorm(torch.autograd.Function):
    """x + update (x, where there is none) and its RMSNorm. The sum goes on beside its norm, and in backward the gradients of both
    meet in the kernel that makes the norm's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, kernels: TokenKernels
    ) -> tuple[Tensor, Tensor]:
        total, normed, scales = kernels.add_norm(x, update, weight, epsilon)
        ctx.save_for_backward(total, weight, scales)
        ctx.adds, ctx.kernels = update is not None, kernels
        ctx.set_materialize_grads(False)
        return total.view_as(total), normed

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None):  # pyright: ignore
        total, weight, scales = ctx.saved_tensors
        if dnormed is None:
            return dtotal, dtotal if ctx.adds else None, None, None, None
        dx, dweight = ctx.kernels.norm_backward(total, weight, scales, dnormed, dtotal, ctx.needs_input_grad[2])
        return dx, dx if ctx.adds else None, dweight, None, None


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
    total, weight = gate + up, up[0, 0, 0]
    with torch.enable_grad():
        # in float32: where two gradients cancel, the rounding of one is all there is
        leaves = total.float().requires_grad_(), weight.float().requires_grad_()
        normed = F.rms_norm(leaves[0], weight.shape, leaves[1], 1e-5)
    dtotal, dweight = torch.autograd.grad(normed, leaves, grad.float())
    wanted = [
        total, normed.detach(), grad + dtotal, dweight, normed.detach(), dtotal,
        rotate(gate, cos.unsqueeze(2), sin.unsqueeze(2)), rotate(gate, cos.unsqueeze(2), -sin.unsqueeze(2)), active * up,
        active * up, *(gradients := (torch.ops.aten.silu_backward(grad * up, gate), grad * active)),
        (active * up).view(30, 64), torch.cat(gradients, -1).view(30, 128),
    ]  # fmt: skip
    try:
        added, normed, scales = kernels.add_norm(gate, up, weight, 1e-5)
        found = [added, normed, *kernels.norm_backward(added, weight, scales, grad, grad, True)]
        _, alone, scales = kernels.add_norm(total, None, weight.float(), 1e-5)  # as norms of 1 + weight have it
        found += [alone, kernels.norm_backward(total, weight.float(), scales, grad, None, False)[0]]
        found += [kernels.rotate(gate, cos, sin, back) for back in (False, True)]
        wide, whole = torch.cat((gate, up), -1).view(30, 128), gate.new_ones(30)
        both = kernels.expert_backward(wide, grad.reshape(30, 64), whole)[:2]  # before grad is written over
        found += [kernels.product(gate, up), *kernels.product_backward(gate, up, grad), *both]
        why = None if all(map(_alike, found, wanted)) else "they do not answer what the operators do"
    except Exception as error:  # Triton's compiler, or the one of C that it calls
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if why is not None:
        log.warning("norms, rotary positions and gated products run by operators, a little slower: %s", why)
    return why is None


def _alike(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=1e-3)
