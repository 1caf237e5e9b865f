"""Kernels of a dry run: they allocate what those of a GPU do, in their order, and compute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.holding import holds
from ...base.kernels import KERNELS, backward_workspace, problem
from ...engine.attention.choice import Kernels, Need
from ...engine.attention.kernel import Calls
from ...engine.model.nf4 import Nf4
from ...engine.model.norm import NormKernel
from ...engine.objective.cross_entropy import LossKernel, LossTerms, TileLoss


class DryKernel:
    """Of attention."""

    packed = True

    def __init__(self, name: str, processors: int = 0) -> None:
        self.name, self.processors, self.calls = name, processors, Calls()

    def problem(self, device: Any, dtype: Any, head_dim: int, windowed: bool) -> str | None:
        return None

    @holds("workspace")
    def workspace(self, direction: str, q: Tensor, k: Tensor) -> Tensor:
        inside = (
            0 if direction == "forward" else backward_workspace(self.name, tuple(q.shape), k.shape[1], self.processors)
        )
        return q.new_empty(inside, dtype=torch.uint8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
        self.workspace("forward", q, k)
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        grads = tuple(t.new_empty(t.shape) for t in (q, k, v))
        self.workspace("backward", q, k)
        return grads

    forward_packed, backward_packed = forward, backward


@dataclass
class DryKernels(Kernels):
    """What would be chosen on the GPU is known, by name."""

    windowed: str = ""  # of layers with a window, if that is another
    processors: int = 0  # as in Job

    def _resolve(self, need: Need) -> Any:
        """As the engine: the first that can, from the one that is known on."""
        first, names = self.windowed or self.name if need.windowed else self.name, list(KERNELS)
        others = [name for name in names[names.index(first) + 1 :] if KERNELS[name].gpu]
        for name in (first, *others):
            if (
                problem(name, need.head_dim, need.windowed, softcapped=need.softcapped, value_dim=need.value_dim)
                is None
            ):
                return DryKernel(name, self.processors)
        return DryKernel(first, self.processors)


class DryNorm(NormKernel):
    def fuses(self, x: Tensor) -> bool:
        return x.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _Norm.apply(x, weight)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    """Keeps and makes what torch's fused RMSNorm does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class DryNf4(Nf4):
    """A shard that packs and unpacks nothing."""

    unpack = staticmethod(lambda packed, out: out)

    def fill(self, weight: Tensor) -> None:
        pass


class DryLoss(LossKernel):
    def fuses(self, device: Any, dtype: torch.dtype, terms: LossTerms) -> bool:
        return terms.logit_cap is None and dtype in (torch.bfloat16, torch.float32)

    def __call__(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None, terms: LossTerms, scale: float, learn: bool
    ) -> TileLoss:
        rows = torch.empty(labels.numel(), dtype=torch.float32)
        return rows.sum(), logits, logits.detach()

    def numbers(self, logits: Tensor, labels: Tensor, temperature: float, out: Tensor) -> None:
        pass

    def gradient_in_place(self, logits: Tensor, labels: Tensor, temperature: float, slopes: list[Tensor]) -> None:
        pass
