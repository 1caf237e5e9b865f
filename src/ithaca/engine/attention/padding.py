"""Value heads of another size than those of queries and keys (multi-head latent attention: 192 and 128).

A kernel that wants equal sizes gets them: zeros behind q and k add nothing to a score, zeros behind v make columns of the output
that are cut off again, and likewise in backward. It costs the products of the padding, and a copy of what is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ...base.holding import module_holds

module_holds(__name__, "attention")


def equal_sizes(forward: Callable) -> Callable:
    """Of a kernel's forward."""

    @wraps(forward)
    def padded(self: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        size, value_dim = max(q.shape[3], v.shape[3]), v.shape[3]
        out, lse = forward(self, *(_wide(t, size) for t in (q, k, v)), **how)
        return _cut(out, value_dim), lse

    return padded


def equal_sizes_backward(backward: Callable) -> Callable:
    @wraps(backward)
    def padded(
        self: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **how: Any
    ) -> tuple[Tensor, ...]:
        size, sizes = max(q.shape[3], v.shape[3]), [t.shape[3] for t in (q, k, v)]
        grads = backward(self, *(_wide(t, size) for t in (dout, q, k, v, out)), lse, **how)
        return tuple(_cut(grad, own) for grad, own in zip(grads, sizes, strict=True))

    return padded


def _wide(t: Tensor, size: int) -> Tensor:
    return t if t.shape[3] == size else pad(t, (0, size - t.shape[3]))


def _cut(t: Tensor, size: int) -> Tensor:
    return t if t.shape[3] == size else t[..., :size].contiguous()
