"""Projecting a slice of heads: the seam between a Hugging Face attention module and everything that moves heads about.

Hugging Face's own hook into attention comes after projection, too late for Untied Ulysses, which projects a few heads at a
time. So this file says, for one attention module, how query heads {3, 7} or KV head 2 are projected from a tile of
the layer input, normed and rotated: bias, q/k norm and LoRA rows included. A technique never sees a weight.

A stage takes its rows of each weight once (`bind`) and uses them for all tiles. The rows are leaves of autograd, so that a
tile's backward yields gradients of the slice, not of the whole matrix; `Gradients.add_leaves` puts them in their place.
OLMo-2 norms all heads of a token together, so there the whole projection is computed for each stage and then cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import CALLER, holds, module_holds
from .norm import apply_norm
from .rope import rotate
from .token_kernels import Rotated, TokenKernels
from .unread import nothing

module_holds(__name__, "tile")


@dataclass
class Leaf:
    """What autograd differentiates by in place of a parameter: the parameter itself, or some of its rows."""

    parameter: Tensor
    value: Tensor
    rows: Tensor | slice | None = None


@dataclass
class BoundLinear:
    """A linear, plain or with LoRA adapters, or some of its rows, as a function of its leaves."""

    leaves: list[Leaf]
    terms: list[tuple[int, int | None, int | None, float]]  # (weight, bias, down, scale) as indices into leaves
    sink: Callable[[Tensor, Tensor], None] | None = None
    """Of a plain one: takes gradient and input of each call, of whose product the weight's gradient is the sum."""

    @holds(CALLER)  # the head's output is the loss's business
    def __call__(self, x: Tensor) -> Tensor:
        if self.sink is not None:
            return _Sunk.apply(x, *self.plain_parameters(), self.sink)  # pyright: ignore[reportReturnType]
        value = [leaf.value for leaf in self.leaves]
        out = None
        for weight, bias, down, scale in self.terms:
            inner = x if down is None else F.linear(x, value[down])
            term = F.linear(inner, value[weight], None if bias is None else value[bias])
            term = term if scale == 1.0 else term * scale
            out = term if out is None else out + term
        assert out is not None
        return out

    @property
    def plain(self) -> bool:
        """No adapter."""
        return len(self.terms) == 1

    def plain_parameters(self) -> tuple[Tensor, Tensor | None]:
        weight, bias, _, _ = self.terms[0]
        return self.leaves[weight].value, None if bias is None else self.leaves[bias].value


class _Sunk(torch.autograd.Function):
    """A linear whose weight has its gradient elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        ctx.sink(rows, x.flatten(0, -2))
        return (rows @ weight).view(x.shape), None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Linears(torch.autograd.Function):
    """Several linears of one input. Their gradients of it add up inside the matrix products, not as tensors of their own, which
    also rounds less often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unread: bool, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters[::2])
        ctx.set_materialize_grads(False)
        if unread:
            return tuple(nothing(x, (*x.shape[:-1], len(weight))) for weight in parameters[::2])
        return tuple(F.linear(x, *parameters[i : i + 2]) for i in range(0, len(parameters), 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):  # pyright: ignore
        x, *weights = ctx.saved_tensors
        flat, dx, dparameters = x.flatten(0, -2), None, []
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            dweight = dbias = None
            if grad is not None:
                rows = grad.flatten(0, -2)
                if ctx.needs_input_grad[0]:
                    dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
                dweight = rows.t() @ flat if ctx.needs_input_grad[2 + 2 * i] else None
                dbias = rows.sum(0) if ctx.needs_input_grad[3 + 2 * i] else None
            dparameters += [dweight, dbias]
        return None if dx is None else dx.view(x.shape), None, *dparameters


@holds(CALLER)
def linears(x: Tensor, parameters: Sequence[tuple[Tensor, Tensor | None]], unread: bool = False) -> tuple[Tensor, ...]:
    """x through linears of these weights and biases. unread: only to be differentiated."""
    return _Linears.apply(x, unread, *(value for each in parameters for value in each))  # pyright: ignore[reportReturnType]


@dataclass
class Bound:
    """The projection of some heads, ready for any number of tiles."""

    linear: BoundLinear
    leaves: list[Leaf]  # of the linear and the norm
    norm: nn.Module | None
    norm_over: str | None
    head_dim: int
    token_kernels: TokenKernels
    pick: Tensor | None = None  # heads to cut out of a whole projection
    interleaved: bool = False  # neighbours are rotated as a pair

    def __call__(self, out: Tensor) -> Tensor:
        """What the linear makes of [B, t, d] -> [B, t, heads, D]"""
        if self.norm is not None and self.norm_over == "whole":
            out = apply_norm(self.norm, out, self.token_kernels)
        out = out.unflatten(-1, (-1, self.head_dim))
        if self.pick is not None:
            out = out.index_select(2, self.pick)
        if self.norm is not None and self.norm_over == "head":
            out = apply_norm(self.norm, out, self.token_kernels)
        return out


@dataclass
class Projector:
    """Query, key and value projection of one attention module."""

    attention: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: str | None
    token_kernels: TokenKernels = field(default_factory=TokenKernels)
    fused: str | None = None  # the one linear with the rows of q, k and v below each other
    interleaved: bool = False  # rotary pairs are neighbours
    cache: dict = field(default_factory=dict)  # row indices by (heads, device): integers only, never weights

    def bind(self, which: str, heads: Sequence[int]) -> Bound:
        """which: "q", "k" or "v"."""
        linear = getattr(self.attention, self.fused or f"{which}_proj")
        norm = getattr(self.attention, f"{which}_norm") if self.qk_norm and which in "qk" else None
        total = self.heads if which == "q" else self.kv_heads
        everything = list(heads) == list(range(total))
        whole = norm is not None and self.qk_norm == "whole"
        first = self._first(which)
        rows: Tensor | slice | None = None if everything or whole else self._rows(tuple(heads), linear, first)
        if self.fused and everything:
            rows = slice(first * self.head_dim, (first + total) * self.head_dim)
        bound = bind_linear(linear, rows)
        leaves = bound.leaves + ([] if norm is None else [Leaf(p, p) for p in norm.parameters()])
        pick = None if everything or not whole else self._index(tuple(heads), leaves[0].value.device)
        return Bound(bound, leaves, norm, self.qk_norm, self.head_dim, self.token_kernels, pick, self.interleaved)

    def _first(self, which: str) -> int:
        """Where the heads of q, k or v begin among the heads of their linear."""
        return {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[which] if self.fused else 0

    def _rows(self, heads: tuple[int, ...], linear: nn.Module, first: int) -> Tensor:
        device = next(linear.parameters()).device
        key = ("rows", heads, first, device)
        if key not in self.cache:
            offsets = torch.arange(self.head_dim, device=device)
            self.cache[key] = ((first + self._index(heads, device)[:, None]) * self.head_dim + offsets).flatten()
        return self.cache[key]

    def _index(self, heads: tuple[int, ...], device: torch.device) -> Tensor:
        key = ("index", heads, device)
        if key not in self.cache:
            self.cache[key] = torch.tensor(heads, device=device)
        return self.cache[key]


@holds(CALLER)
def project_all(
    bounds: dict[str, Bound], x: Tensor, rope: tuple[Tensor, Tensor] | None, unread: bool = False
) -> dict[str, Tensor]:
    """Of [B, t, d] to [B, t, heads, D] each; q and k are rotated where cos and sin are given. unread: only to be differentiated."""
    made: list[Tensor] | None = None
    unread = unread and all(bound.norm is None for bound in bounds.values())  # a norm's derivative is one of its input
    if (len(bounds) > 1 or unread) and torch.is_grad_enabled() and all(bound.linear.plain for bound in bounds.values()):
        made = list(linears(x, [bound.linear.plain_parameters() for bound in bounds.values()], unread))
    unread = unread and made is not None
    return {
        name: _headed(bound, made.pop(0) if made else bound.linear(x), None if name == "v" else rope, unread)
        for name, bound in bounds.items()
    }


def _headed(bound: Bound, out: Tensor, rope: tuple[Tensor, Tensor] | None, unread: bool) -> Tensor:
    """[B, t, heads·D] -> [B, t, heads, D], rotated where cos and sin are given, in their dtype if that is the wider one."""
    out = bound(out)
    if rope is None:
        return out
    cos, sin = rope
    if (
        not bound.interleaved
        and cos.shape[-1] == out.shape[-1]
        and cos.dtype == out.dtype
        and bound.token_kernels.fuses(out)
    ):
        return Rotated.apply(out, cos, sin, bound.token_kernels, unread)  # pyright: ignore[reportReturnType]
    return rotate(out, cos.unsqueeze(2), sin.unsqueeze(2), bound.interleaved).to(out.dtype)


def bind_linear(linear: Any, rows: Tensor | slice | None = None) -> BoundLinear:
    """rows: output features to take, None = all (then the parameters themselves are the leaves)."""
    leaves: list[Leaf] = []

    def leaf(parameter: Tensor | None, cut: bool = True) -> int | None:
        if parameter is None:
            return None
        if rows is None:
            leaves.append(Leaf(parameter, parameter))
        elif not cut:  # a leaf of its own: q, k and v may share an adapter's A, and each has its part of the gradient
            leaves.append(Leaf(parameter, parameter.detach().requires_grad_(parameter.requires_grad)))
        else:
            whole = parameter.detach()
            value = whole[rows] if isinstance(rows, slice) else whole.index_select(0, rows)
            leaves.append(Leaf(parameter, value.requires_grad_(parameter.requires_grad), rows))
        return len(leaves) - 1

    base = getattr(linear, "base_layer", linear)
    terms: list = [(leaf(base.weight), leaf(base.bias), None, 1.0)]
    if base is not linear and not linear.disable_adapters:
        for name in linear.active_adapters:
            if name in linear.lora_A:
                down, up = linear.lora_A[name], linear.lora_B[name]
                terms.append((leaf(up.weight), leaf(up.bias), leaf(down.weight, cut=False), linear.scaling[name]))
    return BoundLinear(leaves, terms)


def linear_violation(linear: nn.Module, name: str) -> str | None:
    """Why the rows of this module cannot be taken one by one, or None."""
    if type(linear) is nn.Linear:
        return None
    kind = f"{type(linear).__module__}.{type(linear).__name__}"
    if not (kind.startswith("peft.tuners.lora") and hasattr(linear, "base_layer")):
        return (
            f"{name} is a {kind}; only torch.nn.Linear and PEFT LoRA on it are supported: remove or merge the wrapper"
        )
    return lora_violation(linear, name)


def lora_violation(linear: Any, name: str) -> str | None:
    if type(linear.base_layer) is not nn.Linear:
        kind = type(linear.base_layer).__name__
        return (
            f"{name} has an adapter on {kind}, whose rows cannot be taken one by one; load the base in bf16, and for QLoRA use "
            "quantize='nf4'"
        )
    return adapter_violation(linear, name)


def adapter_violation(module: Any, name: str) -> str | None:
    """What no adapter may have, wherever it sits."""
    if module.merged:
        return f"{name} has merged adapters; call model.unmerge_adapter() first"
    for adapter in module.active_adapters:
        if adapter not in getattr(module, "lora_A", {}):
            continue
        dropout = module.lora_dropout[adapter]
        if isinstance(dropout, nn.Dropout) and dropout.p > 0:
            return f"{name} has lora_dropout={dropout.p}, which makes results random; set lora_dropout=0.0"
        if module.use_dora.get(adapter) or getattr(module, "lora_variant", {}).get(adapter) is not None:
            return f"{name} uses a LoRA variant (DoRA or similar) that is not row-wise; use plain LoRA"
    return None
