"""The backend `math`: attention as its formula says, by matrix products, a block of scores at a time.

It does what no other kernel here does: a soft cap of scores (s = cap · tanh(scale · q·k / cap), Gemma 2), any head size, values of
another size than keys, float32 on a GPU. It is far slower than a fused kernel, because scores travel through memory, so it is last.

A block is a few KV heads with all query heads that share them, some rows and some columns of the score matrix. The query heads of a
KV head lie below each other as rows, so that a KV head is never copied and its gradients are summed by the product itself. Forward
keeps for each row the largest score so far, and the sum of weights and the output relative to it (Milakov and Gimelshein,
arXiv 1805.02867). Backward makes the weights again from lse: dv = pᵀ·dout, ds = p · (dout·vᵀ - rowsum(dout · out)), times
1 - (s/cap)² under a cap, dq = ds·k · scale, dk = dsᵀ·q · scale.

Scores, weights and sums are in fp32 (fp64 for fp64). Products take the inputs' dtype on CUDA, where tensor cores add in fp32, and
the wide one elsewhere. Memory: a few blocks of SCORES bytes, and fp32 sums of dk and dv for the heads of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.holding import holds, module_holds
from ...base.kernels import SCORES
from .kernel import Calls
from .probe import probe

module_holds(__name__, "attention")
EDGE = 2048  # rows and columns of a block, where they fit


class Math:
    name = "math"
    packed = False

    def __init__(self) -> None:
        self.calls = Calls()
        self.probed: dict[tuple, str | None] = {}

    def problem(self, device, dtype, head_dim, windowed, *, softcapped=False, value_dim=None):
        if device.type == "cpu":
            return None
        return probe(self, device, dtype, head_dim, windowed, softcapped=softcapped, value_dim=value_dim)

    def forward(self, q, k, v, *, causal, scale, window, softcap=None):
        self.calls.forward += 1
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=_wide(q.dtype))
        scores = _Scores(causal, window, k.shape[2] - q.shape[2], scale, softcap)
        for row, own, shared, edges in _heads(q, k, v):
            for rows in _ranges(0, q.shape[2], edges[0]):
                part = _attend(q[row, own, rows], k[row, shared], v[row, shared], rows, edges[1], scores)
                out[row, own, rows], lse[row, own, rows] = part
        return out, lse

    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window, softcap=None):
        self.calls.backward += 1
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        scores = _Scores(causal, window, k.shape[2] - q.shape[2], scale, softcap)
        for row, own, shared, edges in _heads(q, k, v):
            sums = _sums(k[row, shared]), _sums(v[row, shared])
            for rows in _ranges(0, q.shape[2], edges[0]):
                at = (row, own, rows)
                given = dout[at], q[at], out[at], lse[at], k[row, shared], v[row, shared]
                dq[at] = _attend_backward(*given, sums, rows, edges[1], scores)
            dk[row, shared], dv[row, shared] = sums
            del sums  # before those of the next heads are made
        return dq, dk, dv


@dataclass(frozen=True)
class _Scores:
    """What the scores of a block are, and who sees them. Columns are `shift` ahead of rows, see kernel.py."""

    causal: bool
    window: int | None
    shift: int
    scale: float
    softcap: float | None

    def columns(self, rows: slice, length: int) -> tuple[int, int]:
        """The first that any of these rows sees, and where they end."""
        first = 0 if self.window is None else max(0, rows.start + self.shift - self.window)
        return first, min(length, rows.stop + self.shift) if self.causal else length

    def of(self, q: Tensor, k: Tensor) -> Tensor:
        """[n, g·R, C] of every key, hidden or not."""
        scores = _product(q, k.mT, q.dtype).mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def hide(self, block: Tensor, rows: slice, cols: slice, value: float) -> None:
        """Put `value` where a row does not see a column. Rows come again for every head of the group."""
        closest, farthest = rows.start + self.shift - (cols.stop - 1), rows.stop - 1 + self.shift - cols.start
        if not (self.causal and closest < 0) and not (self.window is not None and farthest > self.window):
            return
        i, j = (torch.arange(at.start, at.stop, device=block.device) for at in (rows, cols))
        level = (i + self.shift)[:, None]  # the key that lies level with a row
        if self.causal:
            block.unflatten(1, (-1, len(i))).masked_fill_(j > level, value)
        if self.window is not None:
            block.unflatten(1, (-1, len(i))).masked_fill_(j < level - self.window, value)


@holds("workspace")
def _attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, edge: int, scores: _Scores) -> tuple[Tensor, Tensor]:
    """q [n·g, R, D] of these rows, k and v [n, Sk, D] -> out and lse of these rows."""
    queries = _below_each_other(q, k)
    top = queries.new_full((*queries.shape[:2], 1), -torch.inf, dtype=_wide(q.dtype))
    total = torch.zeros_like(top)
    out = total.new_zeros(*queries.shape[:2], v.shape[2])
    for cols in _ranges(*scores.columns(rows, k.shape[1]), edge):
        block = scores.of(queries, k[:, cols])
        scores.hide(block, rows, cols, -torch.inf)
        higher = torch.maximum(top, block.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0.0)  # rows that have seen nothing so far
        weights, kept = block.sub_(base).exp_(), (top - base).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out.mul_(kept).add_(_product(weights, v[:, cols], q.dtype))
        top = higher
    out = out.div_(total.masked_fill(total == 0.0, 1.0))
    return out.view(*q.shape[:2], v.shape[2]), (top + total.log()).view(q.shape[:2])


@holds("workspace")
def _attend_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor],
    rows: slice, edge: int, scores: _Scores,
) -> Tensor:  # fmt: skip
    """dq of these rows; their part of dk and dv is added to `sums`."""
    wide = _wide(q.dtype)
    queries, douts = _below_each_other(q, k), _below_each_other(dout, k)
    delta = (douts.to(wide) * _below_each_other(out, k)).sum(-1, keepdim=True)
    lse = _below_each_other(lse[..., None], k).to(wide)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that saw nothing has no weights
    dq = torch.zeros(queries.shape, dtype=wide, device=q.device)
    for cols in _ranges(*scores.columns(rows, k.shape[1]), edge):
        block = scores.of(queries, k[:, cols])
        weights = (block - lse).exp_()
        scores.hide(weights, rows, cols, 0.0)
        sums[1][:, cols] += _product(weights.mT, douts, q.dtype)
        dscores = _product(douts, v[:, cols].mT, q.dtype).sub_(delta).mul_(weights)
        if scores.softcap is not None:
            dscores.mul_(block.div_(scores.softcap).square_().neg_().add_(1.0))
        del block, weights
        dscores.mul_(scores.scale)
        dq += _product(dscores, k[:, cols], q.dtype)
        sums[0][:, cols] += _product(dscores.mT, queries, q.dtype)
    return dq.view(q.shape)


@holds("workspace")
def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M, K] · [n, K, N] in fp32 or wider. dtype: that of the kernel's inputs."""
    wide = _wide(dtype)
    if a.is_cuda and dtype != wide:
        return torch.bmm(a.to(dtype), b.to(dtype), out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))


@holds("workspace")
def _sums(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=_wide(t.dtype), device=t.device)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, slice, slice, tuple[int, int]]]:
    """Batch row, query heads and their KV heads of a block, with the rows and columns that it may have. Whatever a block makes
    has as many elements as its scores at most, so a head size counts like an edge."""
    elements = SCORES // _wide(q.dtype).itemsize
    kv_heads, group, size = k.shape[1], q.shape[1] // k.shape[1], max(q.shape[3], v.shape[3])
    columns = min(EDGE, k.shape[2])
    rows = max(1, min(EDGE, q.shape[2], elements // (group * max(columns, size))))
    few = max(1, elements // (max(group * rows, size) * max(columns, size)))
    for row in range(q.shape[0]):
        for shared in _ranges(0, kv_heads, few):
            yield row, slice(shared.start * group, shared.stop * group), shared, (rows, columns)


def _ranges(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _below_each_other(t: Tensor, k: Tensor) -> Tensor:
    """[n·g, R, D] -> [n, g·R, D]"""
    return t.unflatten(0, (k.shape[0], -1)).flatten(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
