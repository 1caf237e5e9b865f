"""Linear mixers in a model's own code: short convolutions and scans over a sequence that ranks share.

A gated delta net (Qwen3-Next, Qwen3.5) or a Mamba-2 looks back by two functions only: a convolution over a few tokens, each channel
by itself, and a scan that carries a state along, each head by itself. All else of it treats tokens alike. transformers' models call
both by name, so that kernels can take their place: that is the door. A mixer's own forward runs, with our functions under those
names (`with_functions`); projections, gates, norms and adapters are its own. Nobody else's forward is touched, and outside of a run
the mixer is what it was.

Convolution: a rank gets the few tokens before its own from the ranks that hold them; documents are set apart by zeros.
Scan: tokens are exchanged for heads, as in attention, but over all ranks that share the sequence, a ring's too: a state would have
to wait for the rank before. Each rank scans whole documents for its heads, a stage of heads at a time (attention/scan.py), and what
it made is sent home. Heads that share a key go together where they can (attention/head_schedule.py). A mixer that has read more
than this of other tokens is found out by the proof (proof.py).

Shapes: B rows, s tokens of this rank, S of all, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...base.holding import holds, module_holds
from ..attention import scan as scans
from ..attention.head_schedule import Stage, head_schedule
from ..attention.interface import Unsupported
from ..attention.scan import CONVOLUTION, SCANS, Call, MixerKernels, Span, Tensors
from ..attention.stages import Arriving, Exchange, Shape
from ..comm import all_to_all
from ..mesh import Group
from ..sequence import Layout
from .heads import to_heads_first, to_tokens_first

module_holds(__name__, "attention")

_FUSED = "mamba2_split_conv1d_scan_combined"  # convolution, scan and what is behind them; returns None where no kernel is there
_NOT_BY_HEADS = ("mamba_selective_scan", "mamba_inner_fn")  # Mamba-1: a state for every channel, and none to begin with
DOORS = (CONVOLUTION, *SCANS, _FUSED, *_NOT_BY_HEADS)
# arguments by which a caller sets documents apart; here they are the batch's
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


# -- doors ------------------------------------------------------------------------------------------------------------------


def doors_of(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """The functions by which a module's forward looks at other tokens, as its file has them; none of a module that is no mixer."""
    forward = _plain_forward(module)
    if forward is None:
        return {}
    names = [name for name in DOORS if name in forward.__code__.co_names]
    return {name: forward.__globals__[name] for name in names if callable(forward.__globals__.get(name))}


def with_functions(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The module's forward, calling these functions in place of those that its file has under the same names."""
    forward = _plain_forward(module)
    assert forward is not None, "it is no mixer"
    made = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made.__get__(module)


def _plain_forward(module: nn.Module) -> FunctionType | None:
    """Its class's, without decorators."""
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) and "forward" not in vars(module) else None


def by_formulas(model: nn.Module) -> nn.Module:
    """Its mixers by the torch functions of their file, in place: kernels that are installed for a GPU are none for a CPU."""
    for module in model.modules():
        if own := doors_of(module):
            module.forward = with_functions(module, {name: inspect.unwrap(f) for name, f in own.items()})
    return model


def mixing(module: nn.Module, own: dict[str, Callable[..., Any]], call: Callable[[], Any]) -> Callable[..., Any]:
    """Its forward inside of a run. call: the layer that is being computed."""

    def convolve(*args: Any, **kwargs: Any) -> Tensor:
        _check_packed(module, kwargs)
        every = dict(zip(("hidden_states", "weight", "bias", "activation"), args, strict=False)) | kwargs
        given = (every["hidden_states"], every["weight"], every.get("bias"), every.get("activation"))
        return call().convolve(own[CONVOLUTION], *given)

    def scan(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _check_packed(module, kwargs)
            spec = SCANS[name]
            taken, tensors = Call.of(spec, own[name], args, kwargs)
            if taken.given.get(spec.state[0]) is not None or taken.given.get(spec.state[1]):
                raise Unsupported(
                    f"{type(module).__name__} goes on from a state that it was given; call it without a cache"
                )
            repeats = getattr(module, spec.repeats, None) if spec.repeats else None
            out = call().scan(taken, tensors, repeats)
            return out if spec.alone else (out, None)

        return run

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Unsupported(
                f"{type(module).__name__} scans channel by channel ({name}, Mamba-1), which cannot be shared by heads; take a "
                "model with attention, gated delta nets or Mamba-2"
            )

        return refuse

    ours: dict[str, Callable[..., Any]] = {name: scan(name) for name in own if name in SCANS}
    ours |= {CONVOLUTION: convolve} if CONVOLUTION in own else {}
    ours |= {_FUSED: lambda *args, **kwargs: None} if _FUSED in own else {}
    ours |= {name: refused(name) for name in _NOT_BY_HEADS if name in own}
    return with_functions(module, ours)


def _check_packed(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _PACKED:
        if kwargs.get(name) is not None:
            raise Unsupported(
                f"{type(module).__name__} is given {name}, but documents come with the batch here; leave it out"
            )


# Rows, columns of [zero, what has come, own tokens] that a convolution goes over, and where own tokens are then.
Line = tuple[slice, Tensor, Tensor]


# -- a sequence on its ranks ----------------------------------------------------------------------------------------------


@dataclass
class Spread:
    """How rows lie on the ranks that share them."""

    group: Group
    layout: Layout
    documents: list[list[tuple[int, int]]]  # (start, stop) of each row's
    heads_per_stage: int | None
    kernels: MixerKernels
    halos: dict[tuple[int, torch.device], Halo] = field(default_factory=dict)
    tiles: dict[int, Spread] = field(default_factory=dict)
    gathers: dict[tuple[int, torch.device], list[Line]] = field(default_factory=dict)

    def tile(self, part: slice) -> Spread:
        """Of these tokens alone, counted from the first of them: a document that has begun before begins below 0."""
        if part.start not in self.tiles:
            length = part.stop - part.start
            documents = [
                [(a - part.start, min(b - part.start, length)) for a, b in row if a < part.stop and b > part.start]
                for row in self.documents
            ]
            self.tiles[part.start] = replace(
                self, layout=Layout(length, 1, 1), documents=documents, halos={}, tiles={}, gathers={}
            )
        return self.tiles[part.start]

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """The token ranges of a rank, in the order in which they lie there."""
        return self.layout.pieces(*divmod(rank, self.layout.ulysses))

    def gathered(self) -> list[tuple[int, int]]:
        return [piece for rank in range(self.group.size) for piece in self.pieces(rank)]

    def in_order(self, t: Tensor) -> Tensor:
        """[B, tokens as gathered from the ranks, ...] -> as the sequence goes."""
        pieces = self.gathered()
        if pieces == sorted(pieces):
            return t
        parts = t.split([stop - start for start, stop in pieces], 1)
        return torch.cat([part for _, part in sorted(zip(pieces, parts, strict=True), key=lambda pair: pair[0])], 1)

    def as_gathered(self, t: Tensor) -> Tensor:
        pieces = self.gathered()
        return t if pieces == sorted(pieces) else torch.cat([t[:, start:stop] for start, stop in pieces], 1)

    def row_groups(self) -> list[tuple[slice, list[tuple[int, int]]]]:
        """Rows whose documents begin and end alike are computed together."""
        first, rows = self.documents[0], len(self.documents)
        if all(row == first for row in self.documents):
            return [(slice(0, rows), first)]
        return [(slice(row, row + 1), bounds) for row, bounds in enumerate(self.documents)]

    def spans(self) -> list[Span]:
        return [(rows, start, stop) for rows, bounds in self.row_groups() for start, stop in bounds]

    def lines(self, tokens: int, wanted: list[int], device: torch.device) -> list[Line]:
        """How a convolution over `tokens` tokens and the one itself sees rows, where `wanted` have come from elsewhere."""
        if (tokens, device) not in self.gathers:
            self.gathers[tokens, device] = [
                (rows, *_line(self, tokens, wanted, bounds, device)) for rows, bounds in self.row_groups()
            ]
        return self.gathers[tokens, device]

    def halo(self, tokens: int, device: torch.device) -> Halo:
        """What a convolution over `tokens` tokens and the one itself needs; made once per batch."""
        if (tokens, device) not in self.halos:
            self.halos[tokens, device] = Halo.of(self, tokens, device)
        return self.halos[tokens, device]


# -- convolution ------------------------------------------------------------------------------------------------------------


@dataclass
class Halo:
    """Which tokens a rank gets from others, and how they lie before its own: in each group of rows every part of a document begins
    with the `tokens` before it, which are zeros where the document begins."""

    group: Group
    send: Tensor  # places of this rank's tokens that go to the others, rank by rank
    counts: tuple[list[int], list[int]]  # of tokens that go to each rank, that come from each
    order: Tensor  # where in what has come the tokens lie as this rank lists them
    lines: list[Line]

    @classmethod
    def of(cls, spread: Spread, tokens: int, device: torch.device) -> Halo:
        group = spread.group
        wanted = [
            [t for start, _ in spread.pieces(rank) for t in range(max(0, start - tokens), start)]
            for rank in range(group.size)
        ]
        places = {}  # of every token that somebody wants: its rank, and where it lies there
        for rank in range(group.size):
            before = 0
            for start, stop in spread.pieces(rank):
                places |= {t: (rank, before + t - start) for ts in wanted for t in ts if start <= t < stop}
                before += stop - start
        mine = wanted[group.rank]
        going = [[places[t][1] for t in ts if places[t][0] == group.rank] for ts in wanted]
        coming = [[t for t in mine if places[t][0] == rank] for rank in range(group.size)]
        arrived = [t for ts in coming for t in ts]
        return cls(
            group,
            torch.tensor([place for part in going for place in part], dtype=torch.int64).to(device),
            ([len(part) for part in going], [len(part) for part in coming]),
            torch.tensor([arrived.index(t) for t in mine], dtype=torch.int64).to(device),
            spread.lines(tokens, mine, device),
        )


def _line(
    spread: Spread, tokens: int, wanted: list[int], bounds: list[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Columns of [zero, what has come, own tokens] for rows of these documents, and where own tokens are among them."""
    columns: list[Tensor] = []
    kept: list[Tensor] = []
    length, before = 0, 1 + len(wanted)
    for start, stop in spread.pieces(spread.group.rank):
        for begins, ends in bounds:
            a, b = max(start, begins), min(stop, ends)
            if a >= b:
                continue
            past = [1 + wanted.index(t) if t >= begins else 0 for t in range(a - tokens, a)]
            columns += [torch.tensor(past, dtype=torch.int64), torch.arange(before + a - start, before + b - start)]
            kept.append(torch.arange(length + tokens, length + tokens + b - a))
            length += tokens + b - a
        before += stop - start
    return torch.cat(columns).to(device), torch.cat(kept).to(device)


def convolve(
    spread: Spread, function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
) -> Tensor:
    """x [B, C, s] of this rank's tokens, weight [C, tokens of the convolution] -> [B, C, s]"""
    kernel = token_by_token(spread, function, x, weight, bias, activation)
    if spread.group.size == 1 and all(len(row) == 1 for row in spread.documents):
        return kernel(x.mT).mT
    halo = spread.halo(weight.shape[1] - 1, x.device)
    come: Any = _Fetch.apply(x, halo)
    return along_lines(kernel, come.mT, x.mT, halo.lines).mT


def token_by_token(
    spread: Spread, function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
) -> Callable[[Tensor], Tensor]:
    """The kernel that is chosen for a convolution, of [B, s, C]: as linears make its input and take what it returns."""
    chosen = spread.kernels.convolution(function, x, weight, bias, activation)
    return lambda t: chosen(t.mT, weight, bias, activation=activation).mT


def along_lines(kernel: Callable[[Tensor], Tensor], come: Tensor, x: Tensor, lines: list[Line]) -> Tensor:
    """come [B, ·, C] from elsewhere, x [B, s, C] -> [B, s, C]"""
    pool = torch.cat((torch.zeros_like(x[:, :1]), come, x), 1)
    parts = [kernel(pool[rows].index_select(1, columns)).index_select(1, kept) for rows, columns, kept in lines]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Fetch(torch.autograd.Function):
    """x [B, C, s] -> [B, C, tokens of other ranks]; gradients go the same way back."""

    @staticmethod
    def forward(ctx, x: Tensor, halo: Halo):
        ctx.halo, ctx.shape = halo, x.shape
        going, coming = halo.counts
        send = x.index_select(2, halo.send).permute(2, 0, 1).contiguous()
        return _exchanged(halo.group, send, going, coming).index_select(0, halo.order).permute(1, 2, 0)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        halo, (going, coming) = ctx.halo, ctx.halo.counts
        send = torch.empty_like(grad.permute(2, 0, 1), memory_format=torch.contiguous_format)
        send[halo.order] = grad.permute(2, 0, 1)
        back = _exchanged(halo.group, send, coming, going)
        return grad.new_zeros(ctx.shape).index_add(2, halo.send, back.permute(1, 2, 0)), None


@holds("exchange")
def _exchanged(group: Group, send: Tensor, going: list[int], coming: list[int]) -> Tensor:
    """[tokens, B, C]"""
    if group.pg is None:
        return send
    out = send.new_empty(sum(coming), *send.shape[1:])
    return all_to_all(out, send, coming, going, group).wait()[0]


# -- scan ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadScan:
    """One scan of one layer: this rank's tokens of all heads outside, all tokens of its heads inside."""

    spread: Spread
    call: Call
    names: tuple[str, ...]  # of the tensors, in the order in which they come
    heads: int
    shared: int  # heads of what is shared

    @property
    def stages(self) -> tuple[Stage, ...]:
        return head_schedule(self.heads, self.shared, self.spread.group.size, self.spread.heads_per_stage)

    def forward(self, tensors: Tensors, came: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """-> and, of a tile, the state [B, heads, ·] that it leaves. came: that of the tile before."""
        like, left = tensors[self.call.scan.out], None
        out = torch.empty(like.shape, dtype=scans.out_dtype(self.call.scan, like), device=like.device)
        for stage in self.stages:
            inside = self._bring(stage, tensors)
            local = out.new_empty(self._empty(inside))
            if self._busy(stage):
                mine = list(stage.queries[self.spread.group.rank])
                state = None if came is None else came[:, mine]
                local, state = scans.forward(self.call, self._each_head(stage, inside), self.spread.spans(), state)
                if state is not None:
                    left = state.new_empty(state.shape[0], self.heads, *state.shape[2:]) if left is None else left
                    left[:, mine] = state
            self._home(stage.queries, local, out)
        return out, left

    def backward(
        self, tensors: Tensors, dout: Tensor, came: Tensor | None = None, dleft: Tensor | None = None
    ) -> tuple[Tensors, Tensor | None]:
        scan = self.call.scan
        grads = {name: torch.zeros(t.shape, dtype=_wide(t), device=t.device) for name, t in tensors.items()}
        dcame = None if came is None else torch.zeros_like(came)
        for stage in self.stages:
            inside = self._bring(stage, tensors | {"dout": dout})
            dlocal = inside.pop("dout")
            found = {name: torch.zeros_like(t) for name, t in inside.items()}
            if self._busy(stage):
                each, mine = self._each_head(stage, inside), list(stage.queries[self.spread.group.rank])
                states = (None if t is None else t[:, mine] for t in (came, dleft))
                found, dstate = scans.backward(self.call, each, self.spread.spans(), dlocal, *states)
                found = self._by_shared(stage, inside, found)
                if dcame is not None and dstate is not None:
                    dcame[:, mine] = dstate
            for name, grad in found.items():
                if name in scan.weights:
                    grads[name][list(stage.queries[self.spread.group.rank])] = grad
                else:
                    self._home(stage.kv if name in scan.shared else stage.queries, grad, grads[name], add=True)
        return {name: grad.to(tensors[name].dtype) for name, grad in grads.items()}, dcame

    def _busy(self, stage: Stage) -> bool:
        return bool(stage.queries[self.spread.group.rank])

    def _empty(self, inside: Tensors) -> tuple[int, ...]:
        return tuple(inside[self.call.scan.out].shape)

    def _each_head(self, stage: Stage, inside: Tensors) -> Tensors:
        """What heads share, once for each of them."""
        places = self._shares(stage)
        return {name: t[:, :, places] if name in self.call.scan.shared else t for name, t in inside.items()}

    def _by_shared(self, stage: Stage, inside: Tensors, found: Tensors) -> Tensors:
        places = torch.tensor(self._shares(stage), device=next(iter(found.values())).device)
        summed = {}
        for name in self.call.scan.shared:
            total = torch.zeros(inside[name].shape, dtype=_wide(found[name]), device=places.device)
            summed[name] = total.index_add_(2, places, found[name].to(total.dtype)).to(found[name].dtype)
        return found | summed

    def _shares(self, stage: Stage) -> list[int]:
        me = self.spread.group.rank
        return [stage.kv[me].index(head // (self.heads // self.shared)) for head in stage.queries[me]]

    @holds("exchange")
    def _bring(self, stage: Stage, tensors: Tensors) -> Tensors:
        """[B, s, heads, ·] of each -> [B, S, heads of this rank, ·]; weights of those heads."""
        scan, me, coming = self.call.scan, self.spread.group.rank, {}
        for name, t in tensors.items():
            if name not in scan.weights:
                coming[name] = self._send(stage.kv if name in scan.shared else stage.queries, name, t)
        inside = {name: self.spread.in_order(there.gathered().transpose(1, 2)) for name, there in coming.items()}
        inside = {name: t if tensors[name].dim() == 4 else t.squeeze(-1) for name, t in inside.items()}
        weights = {name: tensors[name][list(stage.queries[me])] for name in tensors if name in scan.weights}
        return {name: weights[name] if name in weights else inside[name] for name in tensors}

    def _send(self, per_rank: tuple[tuple[int, ...], ...], name: str, t: Tensor) -> Arriving:
        exchange, t = self._exchange(t), _with_size(t)
        heads = [head for part in per_rank for head in part]
        send = exchange.buffer(name, len(heads))
        to_heads_first(t, heads, send)
        return exchange.to_heads(name, send, [len(part) for part in per_rank])

    def _home(self, per_rank: tuple[tuple[int, ...], ...], local: Tensor, into: Tensor, add: bool = False) -> None:
        """[B, S, heads of this rank, ·] -> the places of these heads in [B, s, heads, ·]. add: several ranks may have had one."""
        heads = [head for part in per_rank for head in part]
        exchange, into = self._exchange(local, tokens=into.shape[1]), _with_size(into)
        value = self.spread.as_gathered(_with_size(local)).transpose(1, 2)
        (home,) = exchange.to_tokens("home", value, [len(part) for part in per_rank]).wait()
        if not add:
            return to_tokens_first(home, heads, into)
        for slot, head in enumerate(heads):
            into[:, :, head] += home[slot]

    def _exchange(self, t: Tensor, tokens: int | None = None) -> Exchange:
        heads, size = t.shape[2], t.shape[3] if t.dim() == 4 else 1
        return Exchange(self.spread.group, Shape(t.shape[0], tokens or t.shape[1], heads, heads, size), t, reuse=False)


def _with_size(t: Tensor) -> Tensor:
    return t if t.dim() == 4 else t[..., None]


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def scan_of(spread: Spread, call: Call, tensors: Tensors, repeats: int | None) -> tuple[HeadScan, Tensors]:
    """repeats: heads of what is shared, where the model's code has repeated them for the scan; one of each is enough."""
    scan = call.scan
    heads, shared = tensors[scan.out].shape[2], tensors[scan.shared[0]].shape[2]
    if repeats and shared % repeats == 0 and repeats < shared:
        once = {name: tensors[name][:, :, :: shared // repeats] for name in scan.shared}
        tensors, shared = tensors | once, repeats
    if heads % shared:
        raise Unsupported(
            f"a scan has {heads} heads, which is no multiple of the {shared} that share what they read by"
        )
    call = replace(call, function=spread.kernels.scan(call, tensors))
    return HeadScan(spread, call, tuple(tensors), heads, shared), tensors
