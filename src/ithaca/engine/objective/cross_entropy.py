"""lm_head and cross-entropy by tiles: the logits of one tile are the only logits that ever exist.

At 5M tokens and a vocabulary of 128K whole logits would be 1.3 TB. Here a tile of hidden states goes through the final norm,
the head and the cross-entropy, and its gradients are taken at once, so forward leaves just dx [s, d] and the weight
gradients (summed over tiles in fp32). The result is a sum over this rank's supervised tokens times `scale`, one over the
global count (DESIGN: one loss); a rank with no supervised token gets 0. The scale goes in before the gradients are taken:
scaling bf16 gradients afterwards would round them twice.

Label smoothing and z-loss (penalty on log²Z, PaLM) are optional; both count per supervised token.
Why not `torch.nn.functional.linear_cross_entropy`: docs/decisions/0004-loss.md.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.holding import module_holds
from ..model.linear import BoundLinear
from ..tiling import Gradients, differentiate, tiles

log = logging.getLogger("ithaca")
IGNORE = -100
TileLoss = tuple[Tensor, Tensor, Tensor]  # the loss of a tile, what to differentiate, and its gradient
module_holds(__name__, "loss")


@dataclass(frozen=True)
class LossTerms:
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_cap: float | None = None

    def violations(self) -> list[str]:
        problems = []
        if not 0.0 <= self.label_smoothing <= 1.0:
            problems.append(f"label_smoothing={self.label_smoothing} must be between 0 and 1; use 0.0 to switch it off")
        if not 0.0 <= self.z_loss < float("inf"):
            problems.append(f"z_loss={self.z_loss} must be finite and not negative; use 0.0 to switch it off")
        return problems


class LossKernel:
    """Loss and gradient of a tile of logits from one kernel (kernel.py), and where it is used. A dry run has one that only
    allocates."""

    def fuses(self, device: torch.device, dtype: torch.dtype, terms: LossTerms) -> bool:
        able = device.type == "cuda" and dtype in (torch.bfloat16, torch.float32) and terms.logit_cap is None
        return able and importlib.util.find_spec("triton") is not None

    def __call__(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None, terms: LossTerms, scale: float, learn: bool
    ) -> TileLoss:
        """It writes the gradient over the logits, which the head's backward has no use for."""
        from .kernel import cross_entropy_in_place

        flat = logits.detach().flatten(0, -2)
        loss = cross_entropy_in_place(
            flat, labels.flatten(), None if weights is None else weights.flatten(), scale=scale,
            label_smoothing=terms.label_smoothing, z_loss=terms.z_loss, ignore=IGNORE, learn=learn,
        )  # fmt: skip
        return loss, logits, flat.view(logits.shape)

    def scale(self, gradient: Tensor, by: Tensor) -> Tensor:
        """In place."""
        from .kernel import scale_in_place

        if not gradient.is_contiguous():
            return gradient.mul_(by)
        scale_in_place(gradient, by)
        return gradient

    def adds_products(self, x: Tensor) -> bool:
        """Whether `add_product` is for such tensors."""
        return x.is_cuda and x.dtype is torch.bfloat16 and _adds_right(x.device)

    def add_product(self, total: Tensor | None, rows: Tensor, x: Tensor) -> Tensor:
        """total + rowsᵀ · x in float32, inside of the product: of a head it is as large as a tile's logits, and need not be written
        in bf16 and added then."""
        if total is None:
            return torch.mm(rows.t(), x, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
        return torch.addmm(total, rows.t(), x, out_dtype=torch.float32, out=total)  # pyright: ignore[reportCallIssue]

    def numbers(self, logits: Tensor, labels: Tensor, temperature: float, out: Tensor) -> None:
        """Of log_probs.py: logits [t, V], labels [t] -> out [4, t]."""
        from .kernel import numbers

        numbers(logits, labels, temperature, out)

    def gradient_in_place(self, logits: Tensor, labels: Tensor, temperature: float, slopes: list[Tensor]) -> None:
        from .kernel import gradient_in_place

        gradient_in_place(logits, labels, temperature, slopes)


def tiled_loss(
    x: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    parameters: list[Tensor],
    *,
    tile: int | None,
    terms: LossTerms,
    scale: float,
    weights: Tensor | None = None,
    kernel: LossKernel | None = None,
    linear: BoundLinear | None = None,
) -> Tensor:
    """Scaled sum of cross-entropies. x [B, s, d], labels [B, s] already shifted, and their weights; head [B, t, d] -> [B, t, V], in
    which `linear` makes the logits, if that is given."""
    learn = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
    kernel = kernel or LossKernel()
    result = _LossFunction.apply(x, labels, weights, head, tile, terms, scale, learn, kernel, linear, *parameters)
    assert isinstance(result, Tensor)
    return result


def cross_entropy_sum(logits: Tensor, labels: Tensor, terms: LossTerms, weights: Tensor | None = None) -> Tensor:
    """Plain, untiled definition of what a token costs, in fp32 at least."""
    logits = logits.flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = labels.flatten()
    losses = F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=terms.label_smoothing
    )
    if terms.z_loss:
        log_z = torch.logsumexp(logits, -1)
        losses = losses + terms.z_loss * torch.where(labels != IGNORE, log_z**2, 0.0)
    return losses.sum() if weights is None else (losses * weights.flatten()).sum()


def cap(logits: Tensor, limit: float | None) -> Tensor:
    """Gemma's soft cap on the final logits."""
    return logits if limit is None else torch.tanh(logits / limit) * limit


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, labels: Tensor, weights: Tensor | None, head, tile, terms: LossTerms, scale, learn, kernel,
        linear: BoundLinear | None, *parameters: Tensor,
    ):  # fmt: skip
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        gradients, dx = Gradients(), torch.empty_like(x) if learn else None
        fused = kernel.fuses(x.device, x.dtype, terms)
        of_tile, ctx.scaled = (kernel, kernel.scale) if fused else (_plain, Tensor.mul_)
        every = tiles(x.shape[1], tile)
        if linear is not None and learn and fused and len(every) > 1:
            _sum_products(linear, kernel, x, gradients, parameters)
        for at in every:
            with torch.set_grad_enabled(learn):
                leaf = x[:, at].detach().requires_grad_(learn)
                weight = None if weights is None else weights[:, at]
                loss, output, grad = of_tile(head(leaf), labels[:, at], weight, terms, scale, learn)
            total += loss
            if dx is not None:
                derivatives = differentiate([output], [grad], [leaf, *parameters])
                dx[:, at] = derivatives[0]  # pyright: ignore[reportArgumentType]
                gradients.add(parameters, derivatives[1:])
                del derivatives  # or the head's gradient of this tile would live on beside the next one's
            del output, grad  # likewise the logits
        if linear is not None:
            linear.sink = None
        ctx.dx, ctx.grads = dx, [gradients.take(p) for p in parameters]
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.dx is None:
            raise RuntimeError("this loss was already differentiated; call run.loss again for another backward")
        # in place, as they are needed once; `scale` is 1 unless the caller scales the loss, and 1 rounds nothing
        dx, grads = ctx.scaled(ctx.dx, scale), [None if g is None else ctx.scaled(g, scale) for g in ctx.grads]
        ctx.dx = ctx.grads = None
        return dx if ctx.needs_input_grad[0] else None, *[None] * 9, *grads


@cache
@torch.no_grad()
def _adds_right(device: torch.device) -> bool:
    """Whether torch has such a product for this GPU, and it answers what a product and a sum do."""
    kernel, random = LossKernel(), torch.Generator(device).manual_seed(0)
    rows, x = torch.randn(2, 64, 48, device=device, generator=random).bfloat16()
    product = rows.float().t() @ x.float()
    try:
        first = kernel.add_product(None, rows, x)
        right = torch.allclose(first, product, rtol=1e-3, atol=1e-3)
        right = right and torch.allclose(kernel.add_product(first, rows, x), 2 * product, rtol=1e-3, atol=1e-3)
        why = None if right else "it does not answer what a product and a sum do"
    except Exception as error:  # an older torch, or not for this GPU
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if why is not None:
        log.info("the head's gradient is added tile by tile, a little slower and 2 bytes a weight larger: %s", why)
    return why is None


def _sum_products(
    linear: BoundLinear, kernel: LossKernel, x: Tensor, gradients: Gradients, parameters: tuple[Tensor, ...]
) -> None:
    """The gradient of the head's weight grows inside of its products."""
    if not linear.plain or not kernel.adds_products(x):
        return
    weight, _ = linear.plain_parameters()
    if weight.dtype == x.dtype and any(weight is parameter for parameter in parameters):
        linear.sink = lambda rows, h: gradients.grow(weight, lambda total: kernel.add_product(total, rows, h))


def _plain(
    logits: Tensor, labels: Tensor, weights: Tensor | None, terms: LossTerms, scale: float, learn: bool
) -> TileLoss:
    loss = cross_entropy_sum(cap(logits, terms.logit_cap), labels, terms, weights) * scale
    return loss.detach(), loss, torch.ones_like(loss)
