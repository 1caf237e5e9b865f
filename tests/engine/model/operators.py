"""Kernels of a GPU, by operators: what calls them is tested without one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.engine.model.rope import rotate
from ithaca.engine.model.token_kernels import TokenKernels


class Operators(TokenKernels):
    """Used everywhere; `calls` says what was."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fuses(self, x: Tensor) -> bool:
        return True

    def add_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("add_norm")
        total = x if update is None else x + update
        scales = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
        return total, total * scales * weight, scales

    def norm_backward(
        self, total: Tensor, weight: Tensor, scales: Tensor, dnormed: Tensor, dtotal: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append("norm_backward")
        unit, grad = total * scales, dnormed * weight
        dx = (grad - unit * (grad * unit).mean(-1, keepdim=True)) * scales
        dweight = (dnormed * unit).flatten(0, -2).sum(0) if learn else None
        return dx if dtotal is None else dx + dtotal, dweight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        self.calls.append("rotate")
        return rotate(x, cos.unsqueeze(2), (-sin if back else sin).unsqueeze(2))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        self.calls.append("product")
        return F.silu(gate) * up

    def product_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("product_backward")
        active = F.silu(gate)
        dgate, dup = torch.ops.aten.silu_backward(grad * up, gate), grad * active
        return active * up, grad.copy_(dgate), dup

    def expert_backward(self, wide: Tensor, dproduct: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("expert_backward")
        gate, up = wide.chunk(2, -1)
        product, dgate, dup = self.product_backward(gate, up, dproduct * weight[:, None])
        return product * weight[:, None], torch.cat((dgate, dup), -1), (dproduct * product).sum(-1)

    def combine(self, copies: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
        self.calls.append("combine")
        own = copies[place]
        return (own if weights is None else own * weights[..., None]).sum(1)
