"""A gated MLP that keeps less for backward, and passes over memory less often.

Autograd holds four tensors of the intermediate width for each token: gate, up, the activation, and their product, which is down's
input. The last two are elementwise functions of the first two, so they are computed again: half of what an MLP holds. On a GPU one
kernel makes the product, and another makes it again together with both gradients (token_kernels.py).

Gate and up may be one linear (Phi-3, GLM), if the activation is SiLU.

Only where the MLP is what transformers ships: its linears plain or with LoRA adapters (linear.py), nothing hooked or patched.
Others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import module_holds
from .linear import (
    Parts,
    bind_linear,
    by_input,
    by_values,
    has_adapters,
    linears,
    lowered,
    lowered_gradients,
    multiplied,
    unchanged,
)
from .token_kernels import TokenKernels
from .tokenwise import HOOKS
from .unread import nothing

module_holds(__name__, "tile")

APART, TOGETHER = {"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}
SILU = ("SiLU", "SiLUActivation")  # torch's, and transformers'


def gated(mlp: Any, x: Tensor, kernels: TokenKernels, keep: bool, unread: bool = False) -> Tensor:
    """mlp(x). keep: its graph is, until backward. unread: it is only differentiated."""
    if not _plain(mlp):
        return mlp(x)
    together = hasattr(mlp, "gate_up_proj")
    inner = [mlp.gate_up_proj] if together else [mlp.gate_proj, mlp.up_proj]
    act = mlp.activation_fn if together else mlp.act_fn
    fused = kernels.fuses(x) and is_silu(act)
    if not (keep or unread or fused or any(map(has_adapters, (*inner, mlp.down_proj)))):
        return mlp(x)
    made, down = linears(x, [bind_linear(part) for part in inner]), bind_linear(mlp.down_proj)
    if together:
        return _DownOfBoth.apply(*made, kernels, unread, down.parts, *down.values)  # pyright: ignore[reportReturnType]
    return _Down.apply(*made, act, kernels if fused else None, unread, down.parts, *down.values)  # pyright: ignore[reportReturnType]


def is_silu(act: Any) -> bool:
    """torch's or transformers' own, which a kernel may stand for: nothing hooked or patched."""
    kind = type(act)
    own = kind.__name__ in SILU and kind.__module__.startswith(("torch.nn.modules.", "transformers.activations"))
    return own and "forward" not in vars(act) and not any(getattr(act, hooks) for hooks in HOOKS)


def _plain(mlp: nn.Module) -> bool:
    kind, forward = type(mlp), type(mlp).forward
    own = kind.__module__.startswith("transformers.models.") and forward.__module__ == kind.__module__
    parts = dict(mlp.named_children())
    if not own or forward.__qualname__ != f"{kind.__name__}.forward" or parts.keys() not in (APART, TOGETHER):
        return False
    act = parts.pop("act_fn", None) or parts.pop("activation_fn")
    known = type(act).__module__.startswith(("torch.nn.modules.", "transformers.activations"))
    known = known and (len(parts) == 3 or is_silu(act))
    return known and unchanged(mlp) and all(type(part) is nn.Linear or has_adapters(part) for part in parts.values())


class _Down(torch.autograd.Function):
    """down(act(gate) · up)"""

    @staticmethod
    def forward(
        ctx, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor], kernels: TokenKernels | None, unread: bool,
        parts: Parts, *values: Tensor,
    ):  # fmt: skip
        ctx.save_for_backward(gate, up, *values)
        ctx.act, ctx.kernels, ctx.parts = act, kernels, parts
        if unread:
            return nothing(gate, (*gate.shape[:-1], len(values[parts.weight])))
        product = act(gate) * up if kernels is None else kernels.product(gate, up)
        return multiplied(product, parts, values, lowered(product, parts, values))

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, *values = ctx.saved_tensors
        parts, rows, learns = ctx.parts, dy.flatten(0, -2), ctx.needs_input_grad[6:]
        dlows = lowered_gradients(rows, parts, values)
        dvalues: list[Tensor | None] = [None] * len(values)

        def of_values(product: Tensor) -> None:
            if any(learns):
                by_values(rows, product.flatten(0, -2), lowered(product, parts, values), dlows, parts, learns, dvalues)

        if ctx.kernels is not None:
            dproduct = by_input(rows, dlows, parts, values).view(gate.shape)
            product, dgate, dup = ctx.kernels.product_backward(gate, up, dproduct)
            of_values(product)
            return dgate, dup, *[None] * 4, *dvalues
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            active = ctx.act(gate)
        plain = active.detach()
        of_values(plain * up)
        dproduct = by_input(rows, dlows, parts, values).view(gate.shape)
        dup = dproduct * plain
        (dgate,) = torch.autograd.grad(active, gate, dproduct.mul_(up))
        return dgate, dup, *[None] * 4, *dvalues


class _DownOfBoth(torch.autograd.Function):
    """down(silu(gate) · up) of [..., 2i], gate beside up: an expert that all tokens go to."""

    @staticmethod
    def forward(ctx, wide: Tensor, kernels: TokenKernels, unread: bool, parts: Parts, *values: Tensor):
        ctx.save_for_backward(wide, *values)
        ctx.kernels, ctx.parts = kernels, parts
        if unread:
            return nothing(wide, (*wide.shape[:-1], len(values[parts.weight])))
        product = product_of_both(wide, kernels)
        return multiplied(product, parts, values, lowered(product, parts, values))

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        wide, *values = ctx.saved_tensors
        parts, rows, learns = ctx.parts, dy.flatten(0, -2), ctx.needs_input_grad[4:]
        dlows = lowered_gradients(rows, parts, values)
        dproduct = by_input(rows, dlows, parts, values)
        flat, whole = wide.flatten(0, -2), wide.new_ones(len(rows))
        product, dwide, _ = backward_of_both(flat, dproduct, whole, ctx.kernels)
        dvalues: list[Tensor | None] = [None] * len(values)
        if any(learns):
            by_values(rows, product, lowered(product, parts, values), dlows, parts, learns, dvalues)
        return dwide.view(wide.shape), None, None, None, *dvalues


def product_of_both(wide: Tensor, kernels: TokenKernels) -> Tensor:
    """silu(gate) · up of [..., 2i], gate beside up"""
    gate, up = wide.chunk(2, -1)
    return kernels.product(gate, up) if kernels.fuses(wide) else F.silu(gate) * up


def backward_of_both(
    wide: Tensor, dproduct: Tensor, weight: Tensor, kernels: TokenKernels
) -> tuple[Tensor, Tensor, Tensor]:
    """dproduct: of the product that was not weighed. -> the product, weighed; gradients of `wide` and of the weights, float32"""
    if kernels.fuses(wide):
        return kernels.expert_backward(wide, dproduct, weight)
    gate, up = wide.chunk(2, -1)
    active = F.silu(gate)
    product = active * up
    dweight = (dproduct.float() * product.float()).sum(-1)
    dproduct = dproduct * weight[:, None]
    dgate = torch.ops.aten.silu_backward(dproduct * up, gate)
    return (product * weight[:, None]).to(wide.dtype), torch.cat((dgate, dproduct * active), -1).to(wide.dtype), dweight
