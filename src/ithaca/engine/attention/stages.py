"""Ulysses and Untied Ulysses: attention over chunks of heads, between two all-to-alls.

Outside attention a rank holds s tokens and all heads; inside it holds all S tokens (of its ring rank) and a few heads.
Plain Ulysses does the whole exchange at once. Untied Ulysses walks through stages: project a few heads from the layer
input, all-to-all, attend, all-to-all back, next. A stage's buffers are allocated once per layer call and serve every stage,
so memory follows `heads_per_stage`, not H. KV heads travel once and stay for the query heads that share them.
One stage with all heads *is* plain Ulysses; one rank *is* head chunking without communication: there is no other code path, but
that one rank with one stage may attend heads where the projections left them, if the kernel reads any layout (`InPlace`).

While stage t attends, the exchange of stage t+1 is under way (two sets of buffers), and so is the way back of stage t-1.
Attention grows with S² and the exchange with S, so at length there is nothing left to hide while the second set is all that
does not fit: from OVERLAP_BYTES a stage on, stages run one after the other and every buffer is freed as soon as it was read.

Backward walks the same stages: q, k, v of the stage are projected again, out and dout are brought to the heads, the kernel
returns dq, dk, dv, and these go home. KV gradients add in fp32 over the stages that share a head, and over the ranks that
shared a copy of it; between those stages the source may stash them off the device.

Shapes: B rows, s local tokens, S = P·s gathered tokens, h heads of a stage on this rank, D head size.
Send buffers are [heads of all ranks, B, s, D]; gathered tensors [B, h, S, D]. With B = h = 1 the two are the same memory.
DeepSpeed-Ulysses: arXiv 2309.14509. Untied Ulysses: arXiv 2602.21196.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from ...base.holding import CALLER, holds, module_holds
from ...base.kernels import KERNELS
from ..comm import Pending, all_to_all
from ..limits import OVERLAP_BYTES
from ..mesh import Group
from .head_schedule import Stage
from .kernel import Kernel
from .ring import ring_attend, ring_attend_backward
from .segments import Plan
from .sinks import sink_gradient, with_sink

module_holds(__name__, "attention")


class Source(Protocol):
    """Where the heads of a stage come from, and where their gradients go."""

    def project(self, stage: int, heads: dict[str, list[int]], into: dict[str, Tensor]) -> None:
        """Fill into["q"], into["k"], into["v"], each [heads, B, s, D]."""
        ...

    def attended(self, stage: int, heads: list[int], value: Tensor) -> None:
        """Take the attention output of these heads, [heads, B, s, D]."""
        ...

    def fill(self, stage: int, heads: list[int], name: str, into: Tensor) -> None:
        """Backward: fill [heads, B, s, D] with the attention output ("out") or its gradient ("dout")."""
        ...

    def receive(self, stage: int, heads: dict[str, list[int]], grads: dict[str, Tensor]) -> None:
        """Take the gradients of the projected heads, now summed over ranks."""
        ...

    def stash(self, sums: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Backward: keep these sums while another stage attends, off the device if need be. -> how to have them back"""
        ...


class InPlace(Source, Protocol):
    """A source that has heads of all tokens, tokens first: nothing is copied into the order that exchanges want."""

    whole: dict[str, Tensor]
    """The attention output ("out") and its gradient ("dout"), [B, s, H, D]."""

    def projected(self, heads: dict[str, list[int]]) -> dict[str, Tensor]:
        """q, k, v, each [B, s, heads, D]."""
        ...


def _has_heads(source: Source) -> TypeGuard[InPlace]:
    """isinstance of a protocol would look up every name of it, for every layer of every step."""
    return hasattr(source, "projected")


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int  # on this rank
    heads: int
    kv_heads: int
    head_dim: int


@dataclass
class Held:
    """KV heads on this rank, kept over the stages that share them."""

    k: Tensor | None = None
    v: Tensor | None = None
    grads: Callable[[], list[Tensor]] | None = None  # sums over the stages so far


@dataclass(frozen=True)
class StagedAttention:
    """Attention of one layer on one batch."""

    schedule: tuple[Stage, ...]
    shape: Shape
    ulysses: Group
    ring: Group
    kernel: Kernel
    plans: list[Plan]  # one per ring step
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]
    dsinks: Tensor | None = None  # [H], of backward: the part of this rank's heads and tokens is added

    def forward(self, source: Source, like: Tensor, keep: bool) -> tuple[list[Tensor], list]:
        """The lse of each stage on this rank's heads, and q, k, v of each stage if `keep`. Outputs go to the source."""
        if self.in_place and _has_heads(source):
            return self._forward_in_place(source, keep)
        ahead = self._overlaps(like)
        exchange = Exchange(self.ulysses, self.shape, like, reuse=(ahead or self.ulysses.size == 1) and not keep)
        held, lses, kept, leaving = Held(), [], [], None
        for t, (stage, arrived) in enumerate(self._pipeline(lambda t: self._bring(exchange, source, t), ahead)):
            q = self._settle(held, arrived)
            attended, lse = self._attend(stage, q, held)
            self._hand_over(source, leaving)
            # the source may keep what it gets, so outputs never lie in a buffer that the next stage writes
            leaving = (t, exchange.to_tokens("out", attended, [len(h) for h in stage.queries], reuse=False))
            lses.append(lse)
            if keep:
                kept.append((q, held.k, held.v))
            del q, attended
            if not ahead:
                leaving = self._hand_over(source, leaving)
        self._hand_over(source, leaving)
        return lses, kept

    def backward(self, source: Source, like: Tensor, lses: list[Tensor], kept: list) -> None:
        """Out and dout come from the source, and gradients of the projected heads go to it."""
        if self.in_place and _has_heads(source):
            return self._backward_in_place(source, lses, kept)
        ahead = self._overlaps(like)
        exchange = Exchange(self.ulysses, self.shape, like, reuse=ahead or self.ulysses.size == 1)
        held, leaving = Held(), None

        def bring(t: int) -> dict[str, Arriving]:
            coming = {} if kept else self._bring(exchange, source, t)
            return coming | self._bring_outputs(exchange, source, t)

        for t, (stage, arrived) in enumerate(self._pipeline(bring, ahead)):
            if kept:
                q, held.k, held.v = kept[t]
            else:
                q = self._settle(held, arrived)
            dout, out = arrived["dout"].gathered(), arrived["out"].gathered()
            grads = self._attend_backward(stage, dout, q, held, out, lses[t])
            del q, dout, out
            homing = self._homing(exchange, source, stage, held, grads)
            self._deliver(source, leaving)
            leaving = (t, homing)
            if not ahead:
                del homing
                leaving = self._deliver(source, leaving)
        self._deliver(source, leaving)

    @property
    def in_place(self) -> bool:
        """Whether nothing is exchanged, and a kernel takes all heads at once in any layout."""
        one_stage = len(self.schedule) == 1 and self.ulysses.size == self.ring.size == 1
        return one_stage and KERNELS[self.kernel.name].strided

    def _every_head(self) -> dict[str, list[int]]:
        return {name: list(range(self.shape.heads if name == "q" else self.shape.kv_heads)) for name in "qkv"}

    def _projected(self, source: InPlace) -> list[Tensor]:
        made = source.projected(self._every_head())
        return [made[name].transpose(1, 2) for name in "qkv"]

    def _forward_in_place(self, source: InPlace, keep: bool) -> tuple[list[Tensor], list]:
        q, k, v = self._projected(source)
        out, lse = self._attend(self.schedule[0], q, Held(k, v))
        source.whole["out"] = out.transpose(1, 2).contiguous()
        return [lse], [(q, k, v)] if keep else []

    def _backward_in_place(self, source: InPlace, lses: list[Tensor], kept: list) -> None:
        q, k, v = kept[0] if kept else self._projected(source)
        dout, out = (source.whole[name].transpose(1, 2) for name in ("dout", "out"))
        grads = self._attend_backward(self.schedule[0], dout, q, Held(k, v), out, lses[0])
        homing = {name: grad.transpose(0, 1) for name, grad in zip("qkv", grads, strict=True)}
        source.receive(0, self._every_head(), homing)

    def _overlaps(self, like: Tensor) -> bool:
        """Whether the next stage's exchange runs beside this stage's attention. The same answer on every rank."""
        heads = max(len(_flat(stage.queries)) for stage in self.schedule)
        size = heads * self.shape.rows * self.shape.tokens * self.shape.head_dim * like.element_size()
        return self.ulysses.size > 1 and size <= OVERLAP_BYTES

    def _pipeline(self, bring, ahead: bool):
        """(stage, what arrived for it); if `ahead`, the next stage is on its way while the caller works on this one."""
        coming = bring(0)
        for t, stage in enumerate(self.schedule):
            arrived, more = coming, t + 1 < len(self.schedule)
            if more and ahead:
                coming = bring(t + 1)
            yield stage, arrived
            if more and not ahead:
                arrived = coming = None  # freed before the next stage asks for as much
                coming = bring(t + 1)

    @holds("exchange")
    def _bring(self, exchange: Exchange, source: Source, t: int) -> dict[str, Arriving]:
        """Project the heads of stage t and send them to the ranks that attend them."""
        stage = self.schedule[t]
        per_rank = {"q": stage.queries, "k": stage.fresh, "v": stage.fresh}
        heads = {name: _flat(lists) for name, lists in per_rank.items()}
        heads = {name: indices for name, indices in heads.items() if indices}
        into = {name: exchange.buffer(f"{name} send", len(indices)) for name, indices in heads.items()}
        source.project(t, heads, into)
        return {name: exchange.to_heads(name, into[name], [len(h) for h in per_rank[name]]) for name in into}

    @holds("exchange")
    def _bring_outputs(self, exchange: Exchange, source: Source, t: int) -> dict[str, Arriving]:
        """Send the attention output of stage t and its gradient there too."""
        heads = _flat(self.schedule[t].queries)
        counts = [len(h) for h in self.schedule[t].queries]
        coming = {}
        for name in ("dout", "out"):
            send = exchange.buffer(f"{name} send", len(heads))
            source.fill(t, heads, name, send)
            coming[name] = exchange.to_heads(name, send, counts)
        return coming

    def _settle(self, held: Held, arrived: dict[str, Arriving]) -> Tensor:
        """Wait for a stage; KV heads stay in `held` until others replace them."""
        q = arrived["q"].gathered()
        if "k" in arrived:
            k, v = arrived["k"].gathered(), arrived["v"].gathered()
            if k.shape[1]:  # other ranks may get new KV heads in a stage in which this one keeps its own
                held.k, held.v = k, v
        return q

    def _groups(self, stage: Stage) -> list[tuple[slice, slice]]:
        """Query and KV ranges for one kernel call each: a single one where every KV head has equally many queries."""
        me = self.ulysses.rank
        queries, kv = stage.queries[me], stage.kv[me]
        if not queries:
            return []
        group = self.shape.heads // self.shape.kv_heads
        sizes = [sum(h // group == head for h in queries) for head in kv]
        if len(set(sizes)) == 1:
            return [(slice(0, len(queries)), slice(0, len(kv)))]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [(slice(a, a + n), slice(i, i + 1)) for i, (a, n) in enumerate(zip(starts, sizes, strict=True))]

    def _heads(self, stage: Stage, which: slice) -> list[int]:
        """Query heads of this rank in a stage."""
        return list(stage.queries[self.ulysses.rank][which])

    def _attend(self, stage: Stage, q: Tensor, held: Held) -> tuple[Tensor, Tensor]:
        parts = []
        for a, b in self._groups(stage):
            out, lse = ring_attend(
                self.kernel, q[:, a], held.k[:, b], held.v[:, b], self.plans, self.scale, self.ring,  # pyright: ignore
                softcap=self.softcap,
            )  # fmt: skip
            if self.sinks is not None:
                out, lse = with_sink(out, lse, self.sinks[self._heads(stage, a)])
            parts.append((out, lse))
        if not parts:  # an idle rank still takes part in the exchanges
            return q, q.new_empty(*q.shape[:3], dtype=torch.float32)
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def _attend_backward(self, stage: Stage, dout, q, held: Held, out, lse) -> list[Tensor]:
        """dq, dk, dv; nothing on a rank that idles."""
        parts = []
        for a, b in self._groups(stage):
            done = dout[:, a], q[:, a], held.k[:, b], held.v[:, b], out[:, a], lse[:, a]  # pyright: ignore
            parts.append(
                ring_attend_backward(self.kernel, *done, self.plans, self.scale, self.ring, softcap=self.softcap)
            )
            if self.sinks is not None and self.dsinks is not None:
                heads = self._heads(stage, a)
                self.dsinks[heads] += sink_gradient(dout[:, a], out[:, a], lse[:, a], self.sinks[heads])
        if len(parts) == 1:
            return list(parts[0])
        return [torch.cat(grads, 1) for grads in zip(*parts, strict=True)]

    def _homing(
        self, exchange: Exchange, source: Source, stage: Stage, held: Held, grads: list[Tensor]
    ) -> dict[str, tuple[list[int], Pending]]:
        """Send dq home, and dk, dv once the last query head that uses them is through. Empties `grads`: each of these is as
        large as a stage, and is freed as soon as it was used."""
        done = bool(stage.done[self.ulysses.rank])
        assert not done or stage.done[self.ulysses.rank] == stage.kv[self.ulysses.rank]
        sums: list[Tensor] = []
        if grads:
            sums = [grads.pop(1), grads.pop(1)]
            if held.grads is not None:
                # several stages share these KV heads: their gradients add in fp32
                before, held.grads = list(held.grads()), None
                sums = [_add_wide(before.pop(0), sums.pop(0)) for _ in "kv"]
            if done:
                held.k = held.v = None
            else:
                held.grads, sums = source.stash(sums), []
        empty = exchange.like.new_empty(self.shape.rows, 0, exchange.gathered_tokens, self.shape.head_dim)
        home = {"q": self._send_home(exchange, "dq", stage.queries, grads.pop() if grads else empty)}
        if any(stage.done):
            for name in "kv":
                value = sums.pop(0).to(exchange.like.dtype) if done else empty
                home[name] = self._send_home(exchange, f"d{name}", stage.done, value)
        return home

    def _send_home(
        self, exchange: Exchange, role: str, lists: tuple[tuple[int, ...], ...], value: Tensor
    ) -> tuple[list[int], Pending]:
        return _flat(lists), exchange.to_tokens(role, value, [len(heads) for heads in lists])

    def _deliver(self, source: Source, leaving) -> None:
        if leaving is None:
            return
        t, homing = leaving
        heads = {name: indices for name, (indices, _) in homing.items()}
        source.receive(t, heads, {name: pending.wait()[0] for name, (_, pending) in homing.items()})
        return None

    def _hand_over(self, source: Source, leaving) -> None:
        """Give the finished heads of a stage to the source."""
        if leaving is not None:
            t, pending = leaving
            (attended,) = pending.wait()
            source.attended(t, _flat(self.schedule[t].queries), attended)
        return None


class Arriving:
    """Heads on their way to this rank."""

    def __init__(self, pending: Pending, ranks: int, keep_in: Tensor | None) -> None:
        self.pending, self.ranks, self.keep_in = pending, ranks, keep_in

    def gathered(self) -> Tensor:
        """[P·h, B, s, D] as received -> [B, h, S, D], without a copy where the layouts agree."""
        (received,) = self.pending.wait()
        self.pending = Pending(())  # the caller's tensor is the only one from here on
        split = received.unflatten(0, (self.ranks, received.shape[0] // self.ranks))
        ordered = split.permute(2, 1, 0, 3, 4)
        shape = (*ordered.shape[:2], ordered.shape[2] * ordered.shape[3], ordered.shape[4])
        if min(ordered.shape[0], ordered.shape[1]) == 0 or (ordered.shape[0] == 1 and ordered.shape[1] == 1):
            return ordered.reshape(shape)
        if self.ranks == 1 and ordered.shape[0] == 1:
            return ordered.reshape(shape)
        assert self.keep_in is not None
        self.keep_in.view(ordered.shape).copy_(ordered)
        gathered, self.keep_in = self.keep_in.view(shape), None
        return gathered


class Exchange:
    """The all-to-alls of one layer call and the buffers they reuse."""

    def __init__(self, ulysses: Group, shape: Shape, like: Tensor, reuse: bool) -> None:
        self.ulysses, self.shape, self.like, self.reuse = ulysses, shape, like, reuse
        self.gathered_tokens = shape.tokens * ulysses.size
        self.sets = 2 if ulysses.size > 1 else 1  # two: one in use, one on its way
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.turn: dict[str, int] = {}

    @holds(CALLER)
    def _fresh(self, heads: int) -> Tensor:
        return self.like.new_empty(heads, self.shape.rows, self.shape.tokens, self.shape.head_dim)

    @holds(CALLER)
    def buffer(self, role: str, heads: int) -> Tensor:
        """[heads, B, s, D]; the same memory again after `sets` calls for a role."""
        if not self.reuse or heads == 0:  # taking a turn for nothing could hand out memory that is still in use
            return self._fresh(heads)
        turn = self.turn[role] = (self.turn.get(role, -1) + 1) % self.sets
        size = heads * self.shape.rows * self.shape.tokens * self.shape.head_dim
        held = self.buffers.get((role, turn))
        if held is None or held.numel() < size:
            held = self.buffers[role, turn] = self.like.new_empty(size)
        return held[:size].view(heads, self.shape.rows, self.shape.tokens, self.shape.head_dim)

    def to_heads(self, role: str, send: Tensor, counts: list[int]) -> Arriving:
        """send [heads of all ranks, B, s, D], `counts` heads per rank -> this rank's heads of all tokens."""
        ranks, local_heads = self.ulysses.size, counts[self.ulysses.rank]
        needs_copy = (local_heads > 1 or self.shape.rows > 1) and not (ranks == 1 and self.shape.rows == 1)
        keep_in = self.buffer(f"{role} gathered", ranks * local_heads) if needs_copy and local_heads else None
        if ranks == 1:
            return Arriving(Pending((send,)), 1, keep_in)
        received = self.buffer(f"{role} received", ranks * local_heads)
        return Arriving(all_to_all(received, send, [local_heads] * ranks, counts, self.ulysses), ranks, keep_in)

    @holds("exchange")
    def to_tokens(self, role: str, value: Tensor, counts: list[int], reuse: bool = True) -> Pending:
        """value [B, h, S, D] on this rank's heads -> [heads of all ranks, B, s, D] of this rank's tokens."""
        ranks, local_heads = self.ulysses.size, counts[self.ulysses.rank]
        split = value.unflatten(2, (ranks, self.shape.tokens)).permute(2, 1, 0, 3, 4)
        send = split.reshape(ranks * local_heads, self.shape.rows, self.shape.tokens, self.shape.head_dim).contiguous()
        if ranks == 1:
            return Pending((send,))
        received = self.buffer(f"{role} home", sum(counts)) if reuse else self._fresh(sum(counts))
        return all_to_all(received, send, counts, [local_heads] * ranks, self.ulysses)


def _add_wide(total: Tensor, part: Tensor) -> Tensor:
    total = total if total.dtype == torch.float64 else total.float()
    return total.add_(part)


def _flat(per_rank: tuple[tuple[int, ...], ...]) -> list[int]:
    return [head for heads in per_rank for head in heads]
