"""From masks to kernel calls, and back.

Causal attention inside documents, with or without a sliding window, on whatever tokens a rank holds, is a list of
`Segment`s: blocks of the score matrix that are either a causal square or a full rectangle. A query range may meet several
segments (the steps of a ring, the chunks of a zigzag); their results merge by log-sum-exp in fp32, and their
gradients add in fp32. Blocks that no token may see are simply not in the list, so the cost follows the sum of the squared
document lengths.

Where documents are trees (trees.py) a node is a square of its own, and each of its ancestors one rectangle more. What comes
behind an ancestor side by side shares its rectangle, so depth-first a tree has no more of them than nodes with children; under a
window each node has its own, because distance is counted on the way from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.holding import module_holds
from ..sequence import places
from .kernel import Kernel, merge

module_holds(__name__, "attention")


class Segment(NamedTuple):
    row: int | None  # batch row, None = all rows
    q: tuple[int, int]  # local query range
    k: tuple[int, int]  # local key range
    causal: bool  # a causal square, else a full rectangle
    window: int | None  # see kernel.py


@dataclass(frozen=True)
class Plan:
    """The segments of one attention call on buffers of q_len queries and k_len keys."""

    q_len: int
    k_len: int
    segments: tuple[Segment, ...]
    direct: bool  # every query and key lies in exactly one segment: results are written, not merged
    bounds: Tensor | None = None  # document bounds, int32 on the device, where one packed call can serve all squares
    longest: int = 0

    @property
    def whole(self) -> bool:
        """One segment that covers everything: the kernel's own result is the answer."""
        return len(self.segments) == 1 and self.segments[0][:3] == (None, (0, self.q_len), (0, self.k_len))

    @property
    def rest(self) -> Plan:
        """What a packed call of the squares leaves to do: the rectangles."""
        return Plan(self.q_len, self.k_len, tuple(s for s in self.segments if not s.causal), direct=False)


class Block(NamedTuple):
    """Tokens of a row that see others, a square: each the ones before it, or a rectangle: each all of them."""

    q: tuple[int, int]
    k: tuple[int, int]
    square: bool
    gap: int = 0  # tokens of the row between query and key that are not on the way from one to the other


def plan_segments(
    q_chunks: list[tuple[int, int]],
    k_chunks: list[tuple[int, int]],
    documents: list[list[tuple[int, int]]] | None,
    window: int | None,
    device: torch.device,
    chunk: int | None = None,
    parents: list[list[int | None]] | None = None,
) -> Plan:
    """Segments of causal attention from tokens `q_chunks` to tokens `k_chunks` (ranges of the padded sequence).

    documents: (start, stop) per row, or None where every row is one document. window: tokens a query may look
    back, itself included, as Hugging Face counts it. chunk: tokens of a chunk, counted from the start of a document, beyond which
    nobody looks back (Llama 4): each chunk is a document of its own. parents: of documents that are nodes of trees, by row; those
    behind the last one named have none.
    """
    q_len, k_len = (sum(stop - start for start, stop in chunks) for chunks in (q_chunks, k_chunks))
    rows = [(None, [(0, max(stop for _, stop in q_chunks + k_chunks))])] if documents is None else enumerate(documents)
    segments = []
    for row, bounds in rows:
        blocks = _blocks(bounds, () if parents is None or row is None else parents[row], window, chunk)
        q_offset = 0
        for q_chunk in q_chunks:
            k_offset = 0
            for k_chunk in k_chunks:
                if k_chunk[0] <= q_chunk[0]:
                    for block in _meeting(blocks, q_chunk, k_chunk):
                        segment = _segment(row, q_chunk, k_chunk, block, q_offset, k_offset, window)
                        if segment is not None:
                            segments.append(segment)
                k_offset += k_chunk[1] - k_chunk[0]
            q_offset += q_chunk[1] - q_chunk[0]
    covers = _covered_once(segments, q_len, k_len)
    plan = Plan(q_len, k_len, tuple(segments), direct=covers)
    one_row = documents is not None and len(documents) == 1
    squares = sorted(s for s in segments if s.causal) if one_row else []
    if len(squares) > 1 and _covered_once(squares, q_len, k_len):
        ends = torch.tensor([0] + [s.q[1] for s in squares], dtype=torch.int32, device=device)
        return Plan(q_len, k_len, plan.segments, covers, ends, max(s.q[1] - s.q[0] for s in squares))
    return plan


def _blocks(
    bounds: Sequence[tuple[int, int]], parents: Sequence[int | None], window: int | None, chunk: int | None
) -> list[Block]:
    if not any(parent is not None for parent in parents):
        if chunk is not None:
            bounds = [(at, min(b, at + chunk)) for a, b in bounds for at in range(a, b, chunk)]
        return [Block(each, each, True) for each in bounds if each[0] < each[1]]
    if chunk is not None:
        bounds, parents = _cut(bounds, parents, chunk)
    blocks = [Block(each, each, True) for each in bounds if each[0] < each[1]]
    # of each node: how far its tokens lie behind where they would if nothing of the row were beside their path
    behind = [start - place for (start, _), place in zip(bounds, places(bounds, parents), strict=True)]
    rectangles: list[Block] = []
    newest: dict[tuple[int, int], int] = {}  # the last rectangle of an ancestor and gap
    for node, (start, stop) in enumerate(bounds):
        above = parents[node] if node < len(parents) and start < stop else None
        while above is not None:
            gap = 0 if window is None else behind[node] - behind[above]
            at = newest.get((above, gap))
            if at is not None and rectangles[at].q[1] == start:
                rectangles[at] = rectangles[at]._replace(q=(rectangles[at].q[0], stop))
            elif bounds[above][0] < bounds[above][1]:
                newest[above, gap] = len(rectangles)
                rectangles.append(Block((start, stop), bounds[above], False, gap))
            above = parents[above]
    return blocks + rectangles


def _cut(
    bounds: Sequence[tuple[int, int]], parents: Sequence[int | None], chunk: int
) -> tuple[list[tuple[int, int]], list[int | None]]:
    """Nodes, ended also where a chunk ends that is counted from the root: what begins there sees nothing before it."""
    pieces: list[tuple[int, int]] = []
    above: list[int | None] = []
    last: list[int] = []  # piece of each node
    for node, ((start, stop), place) in enumerate(zip(bounds, places(bounds, parents), strict=True)):
        parent = parents[node] if node < len(parents) else None
        cuts = [start, *range(start + chunk - place % chunk, stop, chunk), stop]
        for at, piece in enumerate(pairwise(cuts)):
            pieces.append(piece)
            above.append(last[parent] if at == 0 and parent is not None and place % chunk else None)
        last.append(len(pieces) - 1)
    return pieces, above


def _meeting(blocks: list[Block], q_chunk: tuple[int, int], k_chunk: tuple[int, int]) -> list[Block]:
    """Blocks that have queries in the one and keys in the other."""
    return [
        block
        for block in blocks
        if block.q[0] < q_chunk[1] and block.q[1] > q_chunk[0] and block.k[0] < k_chunk[1] and block.k[1] > k_chunk[0]
    ]


def _segment(row, q_chunk, k_chunk, block: Block, q_offset, k_offset, window) -> Segment | None:
    a, b = max(q_chunk[0], block.q[0]), min(q_chunk[1], block.q[1])
    c, d = max(k_chunk[0], block.k[0]), min(k_chunk[1], block.k[1])
    causal = block.square and q_chunk == k_chunk
    limit = None
    if window is not None:
        if not causal:
            c, b = max(c, a - block.gap - window + 1), min(b, d - 1 + block.gap + window)
            if c >= d or a >= b:
                return None
        # the kernel aligns the last query with the last key, which are this far apart
        apart = b - d - block.gap
        limit = window - 1 - apart
        if apart + d - 1 - c < window:
            limit = None  # the window is wider than the block
    return Segment(
        row,
        (q_offset + a - q_chunk[0], q_offset + b - q_chunk[0]),
        (k_offset + c - k_chunk[0], k_offset + d - k_chunk[0]),
        causal,
        limit,
    )


def _covered_once(segments: list[Segment], q_len: int, k_len: int) -> bool:
    """Whether every query and every key is in exactly one segment, in each row."""
    for row in {s.row for s in segments}:
        row_segments = [s for s in segments if s.row == row]
        for which, length in (("q", q_len), ("k", k_len)):
            at = 0
            for start, stop in sorted(getattr(s, which) for s in row_segments):
                if start != at:
                    return False
                at = stop
            if at != length:
                return False
    return bool(segments)


class Running:
    """Attention results that are still growing: outputs and log-sum-exp in fp32, merged block by block."""

    def __init__(self, q: Tensor, value_dim: int | None = None) -> None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros((*q.shape[:3], value_dim or q.shape[3]), dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)

    def add(self, segment: Segment, out: Tensor, lse: Tensor) -> None:
        where = _at(segment.row, segment.q)
        self.out[where], self.lse[where] = merge((self.out[where], self.lse[where]), (out, lse))


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, *, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, Dv] in q's dtype and lse [B, H, Sq] in fp32."""
    if plan.whole:
        only = plan.segments[0]
        return kernel.forward(q, k, v, causal=only.causal, scale=scale, window=only.window, softcap=softcap)
    if plan.bounds is not None and kernel.packed:
        out, lse = kernel.forward_packed(  # pyright: ignore[reportAttributeAccessIssue]
            q, k, v, bounds=plan.bounds, longest=plan.longest, scale=scale, window=_shared_window(plan), softcap=softcap
        )
        if not plan.rest.segments:
            return out, lse
        running = Running(q, v.shape[3])
        running.out.copy_(out)
        running.lse.copy_(lse)
        del out, lse
        attend_into(running, kernel, q, k, v, plan.rest, scale, softcap=softcap)
        return running.out.to(q.dtype), running.lse
    if plan.direct:
        out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for segment in plan.segments:
            out[_at(segment.row, segment.q)], lse[_at(segment.row, segment.q)] = _forward(
                kernel, q, k, v, segment, scale, softcap
            )
        return out, lse
    running = Running(q, v.shape[3])
    attend_into(running, kernel, q, k, v, plan, scale, softcap=softcap)
    return running.out.to(q.dtype), running.lse


def attend_into(
    running: Running, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, *,
    softcap: float | None = None,
) -> None:  # fmt: skip
    for segment in plan.segments:
        running.add(segment, *_forward(kernel, q, k, v, segment, scale, softcap))


def attend_backward(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, scale: float, *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in q's dtype; where blocks overlap they were added in fp32."""
    if plan.whole:
        only = plan.segments[0]
        return kernel.backward(
            dout, q, k, v, out, lse, causal=only.causal, scale=scale, window=only.window, softcap=softcap
        )
    if plan.bounds is not None and kernel.packed:
        grads = kernel.backward_packed(  # pyright: ignore[reportAttributeAccessIssue]
            dout, q, k, v, out, lse,
            bounds=plan.bounds, longest=plan.longest, scale=scale, window=_shared_window(plan), softcap=softcap,
        )  # fmt: skip
        if not plan.rest.segments:
            return grads
        sums = tuple(g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads)
        del grads
        attend_backward_into(sums, kernel, dout, q, k, v, out, lse, plan.rest, scale, softcap=softcap)
        return tuple(g.to(q.dtype) for g in sums)  # pyright: ignore[reportReturnType]
    if plan.direct:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for segment in plan.segments:
            parts = _backward(kernel, dout, q, k, v, out, lse, segment, scale, softcap)
            for grad, part, where in zip(grads, parts, (segment.q, segment.k, segment.k), strict=True):
                grad[_at(segment.row, where)] = part
        return grads
    grads = tuple(wide_zeros(t) for t in (q, k, v))
    attend_backward_into(grads, kernel, dout, q, k, v, out, lse, plan, scale, softcap=softcap)
    return tuple(g.to(q.dtype) for g in grads)  # pyright: ignore[reportReturnType]


def attend_backward_into(
    grads, kernel, dout, q, k, v, out, lse, plan: Plan, scale: float, *, softcap: float | None = None
) -> None:
    """Add this plan's part of dq, dk, dv to fp32 accumulators."""
    for segment in plan.segments:
        parts = _backward(kernel, dout, q, k, v, out, lse, segment, scale, softcap)
        for grad, part, where in zip(grads, parts, (segment.q, segment.k, segment.k), strict=True):
            grad[_at(segment.row, where)] += part


def wide_zeros(t: Tensor) -> Tensor:
    """A zero accumulator for gradients of `t`: at least fp32."""
    return torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)


def _shared_window(plan: Plan) -> int | None:
    """Packed documents share one window; those shorter than it carry None."""
    windows = {s.window for s in plan.segments if s.causal} - {None}
    assert len(windows) <= 1
    return windows.pop() if windows else None


def _at(row: int | None, where: tuple[int, int]):
    rows = slice(None) if row is None else slice(row, row + 1)
    return rows, slice(None), slice(*where)


def _forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, s: Segment, scale: float, softcap: float | None):
    q_at, k_at = _at(s.row, s.q), _at(s.row, s.k)
    how = {"causal": s.causal, "scale": scale, "window": s.window, "softcap": softcap}
    return kernel.forward(q[q_at], k[k_at], v[k_at], **how)


def _backward(kernel: Kernel, dout, q, k, v, out, lse, s: Segment, scale: float, softcap: float | None):
    q_at, k_at = _at(s.row, s.q), _at(s.row, s.k)
    how = {"causal": s.causal, "scale": scale, "window": s.window, "softcap": softcap}
    return kernel.backward(dout[q_at], q[q_at], k[k_at], v[k_at], out[q_at], lse[q_at], **how)
