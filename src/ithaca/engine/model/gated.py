"""A gated MLP that keeps less for backward, and passes over memory less often.

Autograd holds four tensors of the intermediate width for each token: gate, up, the activation, and their product, which is down's
input. The last two are elementwise functions of the first two, so they are computed again: half of what an MLP holds. On a GPU one
kernel makes the product, and another makes it again together with both gradients (token_kernels.py).

Only where the MLP is what transformers ships: its linears plain, nothing hooked or patched. Others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import module_holds
from .projection import linears
from .token_kernels import TokenKernels
from .tokenwise import HOOKS
from .unread import nothing

module_holds(__name__, "tile")

PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
SILU = ("SiLU", "SiLUActivation")  # torch's, and transformers'


def gated(mlp: Any, x: Tensor, kernels: TokenKernels, keep: bool, unread: bool = False) -> Tensor:
    """mlp(x). keep: its graph is, until backward. unread: it is only differentiated."""
    keep, fused = keep or unread, kernels.fuses(x)
    if not (keep or fused) or not _plain(mlp):
        return mlp(x)
    fused = fused and is_silu(mlp.act_fn)
    if not (keep or fused):
        return mlp(x)
    gate, up = linears(x, [(part.weight, part.bias) for part in (mlp.gate_proj, mlp.up_proj)])
    down = mlp.down_proj
    return _Down.apply(gate, up, down.weight, down.bias, mlp.act_fn, kernels if fused else None, unread)  # pyright: ignore[reportReturnType]


def is_silu(act: Any) -> bool:
    """torch's or transformers' own, which a kernel may stand for: nothing hooked or patched."""
    kind = type(act)
    own = kind.__name__ in SILU and kind.__module__.startswith(("torch.nn.modules.", "transformers.activations"))
    return own and "forward" not in vars(act) and not any(getattr(act, hooks) for hooks in HOOKS)


def _plain(mlp: nn.Module) -> bool:
    kind, forward = type(mlp), type(mlp).forward
    own = kind.__module__.startswith("transformers.models.") and forward.__module__ == kind.__module__
    parts = dict(mlp.named_children())
    return (
        own
        and forward.__qualname__ == f"{kind.__name__}.forward"
        and parts.keys() == PARTS
        and all(type(part) is nn.Linear for name, part in parts.items() if name != "act_fn")
        and type(parts["act_fn"]).__module__.startswith(("torch.nn.modules.", "transformers.activations"))
        and not any("forward" in vars(part) or any(getattr(part, hooks) for hooks in HOOKS) for part in mlp.modules())
    )


class _Down(torch.autograd.Function):
    """down(act(gate) · up)"""

    @staticmethod
    def forward(
        ctx, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: Callable[[Tensor], Tensor],
        kernels: TokenKernels | None, unread: bool,
    ):  # fmt: skip
        ctx.save_for_backward(gate, up, weight)
        ctx.act, ctx.kernels = act, kernels
        if unread:
            return nothing(gate, (*gate.shape[:-1], len(weight)))
        return F.linear(act(gate) * up if kernels is None else kernels.product(gate, up), weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weight = ctx.saved_tensors
        flat, learns = dy.flatten(0, -2), ctx.needs_input_grad
        dbias = flat.sum(0) if learns[3] else None
        if ctx.kernels is not None:
            product, dgate, dup = ctx.kernels.product_backward(gate, up, dy @ weight)
            dweight = flat.t() @ product.flatten(0, -2) if learns[2] else None
            return dgate, dup, dweight, dbias, None, None, None
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            active = ctx.act(gate)
        plain = active.detach()
        dweight = flat.t() @ (plain * up).flatten(0, -2) if learns[2] else None
        dproduct = dy @ weight
        dup = dproduct * plain
        (dgate,) = torch.autograd.grad(active, gate, dproduct.mul_(up))
        return dgate, dup, dweight, dbias, None, None, None
