"""One interface for every attention kernel.

A kernel attends q [B, H, Sq, D] to k [B, K, Sk, D] and v [B, K, Sk, Dv] (H a multiple of K, query head h using KV head h // (H/K))
and always returns the output [B, H, Sq, Dv] and the log-sum-exp of each row, [B, H, Sq] in float32. Its backward is explicit:
it takes dout, out and lse from outside. That is what lets a caller keep out and lse and skip the forward in backward, merge partial
results of a ring, or tile the queries: with the *final* out and lse, the gradients of any block of the score matrix are exact by
themselves.

Only two shapes of mask exist here, because every mask we support is a sum of them (segments.py): a causal square, and a full
rectangle. Both may carry a window: with rows and columns aligned at the lower right corner, key j is seen by query i
if i + (Sk - Sq) - j <= window.

softcap bends the scores before the mask (Gemma 2): s = softcap · tanh(scale · q·k / softcap).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...base.holding import module_holds

module_holds(__name__, "attention")


@dataclass
class Calls:
    """How often a kernel ran. Tests prove by it what was *not* computed again."""

    forward: int = 0
    backward: int = 0


class Kernel(Protocol):
    name: str
    packed: bool  # can attend many causal documents in one call
    calls: Calls

    def problem(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, *,
        softcapped: bool = False, value_dim: int | None = None,
    ) -> str | None:  # fmt: skip
        """Why this kernel cannot do the job, or None. value_dim: of v, None = head_dim."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        causal: bool, scale: float, window: int | None, softcap: float | None = None,
    ) -> tuple: ...  # fmt: skip

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        causal: bool, scale: float, window: int | None, softcap: float | None = None,
    ) -> tuple: ...  # fmt: skip


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over two disjoint sets of keys -> over both. Weighted in the dtype of lse; a row that saw no key of the first
    set has lse -inf there and counts for nothing."""
    (out, lse), (more, more_lse) = first, second
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both
