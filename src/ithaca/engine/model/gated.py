"""A gated MLP that keeps less for backward.

Where a layer keeps the graph of its MLP (recompute="none"), autograd holds four tensors of the intermediate width for each token:
gate, up, the activation, and their product, which is down's input. The last two are elementwise functions of the first two, so they
are computed again: half of what an MLP holds, for two passes over memory.

Only where the MLP is what transformers ships: its linears plain, nothing hooked or patched. Others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import module_holds
from .tokenwise import HOOKS

module_holds(__name__, "tile")

PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def gated(mlp: Any, x: Tensor) -> Tensor:
    """mlp(x), with the same numbers."""
    if not _plain(mlp):
        return mlp(x)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return _Down.apply(gate, up, mlp.down_proj.weight, mlp.down_proj.bias, mlp.act_fn)  # pyright: ignore[reportReturnType]


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
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: Callable[[Tensor], Tensor]):
        ctx.save_for_backward(gate, up, weight)
        ctx.act = act
        return F.linear(act(gate) * up, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weight = ctx.saved_tensors
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            active = ctx.act(gate)
        plain, flat = active.detach(), dy.flatten(0, -2)
        dweight = flat.t() @ (plain * up).flatten(0, -2) if ctx.needs_input_grad[2] else None
        dbias = flat.sum(0) if ctx.needs_input_grad[3] else None
        dproduct = dy @ weight
        dup = dproduct * plain
        (dgate,) = torch.autograd.grad(active, gate, dproduct.mul_(up))
        return dgate, dup, dweight, dbias, None
