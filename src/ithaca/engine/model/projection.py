"""Projecting a slice of heads: the seam between a Hugging Face attention module and everything that moves heads about.

Hugging Face's own hook into attention comes after projection, too late for Untied Ulysses, which projects a few heads at a
time. So this file says, for one attention module, how query heads {3, 7} or KV head 2 are projected from a tile of
the layer input, normed and rotated: bias, q/k norm and LoRA rows included. A technique never sees a weight.

A stage takes its rows of each weight once (`bind`, linear.py) and uses them for all tiles. OLMo-2 norms all heads of a token
together, so there the whole projection is computed for each stage and then cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...base.holding import CALLER, holds, module_holds
from .linear import BoundLinear, Leaf, bind_linear, linears
from .norm import apply_norm
from .rope import rotate
from .token_kernels import Rotated, TokenKernels

module_holds(__name__, "tile")


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
    if (len(bounds) > 1 or unread) and torch.is_grad_enabled():
        made = list(linears(x, [bound.linear for bound in bounds.values()], unread))
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
