"""The streamed layer: past five million tokens.

With every other technique in place a layer still holds several tensors of the size of its input, [s, d], and at millions of
tokens those are all the memory there is. Nothing in the mathematics needs them whole:

- Norms, projections, o_proj, residual and MLP treat each token alike: they stream tile by tile.
- The layer input goes to the store in pieces. Forward writes its result over it, piece by piece, once a piece has left;
  backward reads the pieces back as often as it needs them.
- Attention output leaves for the store per stage and piece, and so does its gradient in backward. What is on the device is one
  stage: q, k, v, out and their gradients of a few heads.
- The incoming gradient becomes the outgoing one in place.

Forward holds one [s, d], backward two (the gradient, and the sum of the gradients of the normed input), plus one stage.
The order of operations, and so every rounding, is that of the composed layer, except that the sum over stages of the normed
input's gradient is kept in the compute dtype: one rounding per stage (see docs/decisions).

With store="gpu" pieces are references to tensors on the device: nothing is copied, nothing is overwritten, and the streamed
layer costs what the composed one does. With another store, inputs of up to HOLD_BYTES stay on the device while their layer
runs: a piece leaves once in forward and comes back once in backward, however many stages read it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...base.holding import holds, module_holds
from ..limits import HOLD_BYTES, TILES_PER_PIECE
from ..offload.store import GpuStore, Handle, Store
from ..tiling import tiles
from .call import LayerCall
from .heads import to_heads_first, to_tokens_first
from .tokens import TokenSource, WholeInputs, add_routing, after, after_backward

module_holds(__name__, "kept")


class Pieces:
    """A tensor of the sequence in a store: one handle per piece, read in any order and as often as needed.
    With `on_device`, a piece that was read once stays on the device."""

    def __init__(self, handles: list[Handle], pieces: list[slice], on_device: GpuStore | None = None) -> None:
        self.handles, self.pieces, self.on_device = handles, pieces, on_device

    def items(self) -> Iterator[tuple[slice, Tensor]]:
        for at, piece in enumerate(self.pieces):
            yield piece, self.read(at, self.handles[at + 1] if at + 1 < len(self.handles) else None)

    def read(self, at: int, following: Handle | None) -> Tensor:
        """Piece `at`, while `following` is brought here."""
        handle = self.handles[at]
        store = handle.store
        (value,) = store.peek(handle, then=following if following and following.store is store else None)
        if self.on_device is not None and store is not self.on_device:
            self.handles[at] = self.on_device.put([value])
        return value


class StoredInputs:
    """The layer input, a tile at a time, from pieces."""

    def __init__(self, pieces: Pieces, tile: int | None) -> None:
        self.pieces, self.tile = pieces, tile

    def items(self) -> Iterator[tuple[slice, Tensor]]:
        for piece, x in self.pieces.items():
            for tile in tiles(x.shape[1], self.tile):
                yield slice(piece.start + tile.start, piece.start + tile.stop), x[:, tile]


class StreamedSource(TokenSource):
    """Heads from a stored layer input; attention output and its gradient in pieces, per stage."""

    def __init__(self, call: LayerCall, inputs, pieces: list[slice], on_device: GpuStore | None) -> None:
        super().__init__(call, inputs)
        self.pieces, self.on_device = pieces, on_device
        # what this layer alone needs waits here: on the device where that is affordable
        self.scratch: Store = call.run_store.scratch_store if on_device is None else on_device
        self.out: list[Pieces] = []
        self.dout: list[Pieces] = []
        self.kept: list[Pieces] = []  # the attention output for backward

    def attended(self, stage: int, heads: list[int], value: Tensor) -> None:
        parts, kept = [value[:, :, piece] for piece in self.pieces], self.call.store
        keeps = self.call.learn and self.call.recompute == "keep_attention"
        here = keeps and kept.kind == "gpu"  # then there is nothing to wait elsewhere for
        self.out.append(self._put(kept if here else self.scratch, parts))
        if keeps:
            self.kept.append(self.out[-1] if here or self.scratch is kept else self._put(kept, parts))

    def _put(self, store: Store, parts: list[Tensor]) -> Pieces:
        return Pieces([store.put([part]) for part in parts], self.pieces, self.on_device)

    def fill(self, stage: int, heads: list[int], name: str, into: Tensor) -> None:
        stored = self.out if name == "out" else self.dout
        for piece, value in stored[stage].items():
            into[:, :, piece] = value
        stored[stage] = Pieces([], [])  # read for the last time

    def heads(self) -> list[list[int]]:
        return [[h for ranks in stage.queries for h in ranks] for stage in self.call.attention.schedule]

    def gather(self, at: int) -> Tensor:
        """The attention output of one piece, all heads, [B, t, H·D]."""
        shape = self.call.attention.shape
        out = None
        for stage, heads in enumerate(self.heads()):
            if stage + 1 < len(self.out):
                following = self.out[stage + 1].handles[at]
            else:
                following = self.out[0].handles[at + 1] if at + 1 < len(self.pieces) else None
            value = self.out[stage].read(at, following)
            if out is None:
                out = value.new_empty(shape.rows, value.shape[2], shape.heads, shape.head_dim)
            to_tokens_first(value, heads, out)
        assert out is not None
        return out.flatten(2)

    def scatter(self, at: int, value: Tensor) -> None:
        """The gradient of the attention output of one piece, [B, t, H·D], to the stages that need it."""
        by_head = value.unflatten(2, (-1, self.call.attention.shape.head_dim))
        for stage, heads in enumerate(self.heads()):
            part = by_head.new_empty(len(heads), *by_head.shape[:2], by_head.shape[3])
            to_heads_first(by_head, heads, part)
            if at == 0:
                self.dout.append(Pieces([], self.pieces))
            self.dout[stage].handles.append(self.scratch.put([part]))

    def stash(self, sums: list[Tensor]) -> Callable[[], list[Tensor]]:
        """In fp32 they are four times a stage's k or v, and idle while the next stage attends, which takes seconds."""
        if self.on_device is not None:
            return super().stash(sums)
        handle = self.scratch.put(sums)
        self.scratch.wait_copied(handle)  # or they would be held here while their copy is under way
        return lambda: self.scratch.peek(handle)

    @holds("residual")
    def add_dh(self, tile: slice, grad: Tensor) -> None:
        if self.alone:
            super().add_dh(tile, grad)
            return
        if self.dh is None:
            self.dh = grad.new_zeros(grad.shape[0], self.call.attention.shape.tokens, grad.shape[2])
        self.dh[:, tile] += grad


class StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, call: LayerCall, *parameters: Tensor):
        pieces, on_device = _pieces(call, x.shape[1]), _on_device(call, x)
        source = StreamedSource(call, WholeInputs(x, call.projection_tile), pieces, on_device)
        handles = [call.store.put([x[:, piece]]) for piece in pieces] if call.learn else []
        lses, _ = call.attend(source, x, False)
        y, routing = _after_forward(call, source, x, handles)
        if call.learn:
            ctx.call, ctx.inputs, call.stored = call, Pieces(handles, pieces), True
            ctx.order, ctx.out = handles[0].order, None
            if call.recompute == "keep_attention":
                ctx.out, ctx.lses = source.kept, call.store.put(lses)
        if routing is None:
            return y
        ctx.mark_non_differentiable(routing[1])
        return y, *routing

    @staticmethod
    @holds("residual")
    def backward(ctx, dy: Tensor, *routing_grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: LayerCall = ctx.call
        on_device = _on_device(call, dy)
        _stay_on_device([ctx.inputs, *(ctx.out or [])], on_device)
        source = StreamedSource(call, StoredInputs(ctx.inputs, call.projection_tile), ctx.inputs.pieces, on_device)
        if call.recompute == "keep_attention":
            source.out, lses = ctx.out, call.store.take(ctx.lses)
        else:
            lses, _ = call.attend(source, dy, False)
        dx = dy.detach() if call.run_store.kind != "gpu" else dy.detach().clone()
        routing = routing_grads[0] if routing_grads else None
        _after_backward(call, source, ctx.inputs, dx, routing)
        # while this layer attends, what the layer below keeps comes nearer
        order = ctx.order if call.run_store is call.store else sys.maxsize  # an upper layer with a store of its own
        call.run_store.prefetch(order, _kept_bytes(call, dx, lses))
        call.attend_backward(source, dx, lses, [], source.gradients)
        dx = source.finish(dx)
        ctx.inputs = ctx.out = ctx.lses = None
        grads = [source.gradients.take(p) for p in call.trainable()]
        return (dx if ctx.needs_input_grad[0] else None), None, *grads


def _stay_on_device(stored: list[Pieces], on_device: GpuStore | None) -> None:
    for pieces in stored:  # in a function of its own: a loop variable would hold the last of them until backward ends
        pieces.on_device = on_device


def _kept_bytes(call: LayerCall, x: Tensor, lses: list[Tensor]) -> int:
    """Of a layer like this: its input, and unless they are computed again attention output and lse."""
    if call.recompute == "layer":
        return x.nbytes
    shape = call.attention.shape
    attended = shape.rows * shape.tokens * shape.heads * shape.head_dim * x.element_size()
    return x.nbytes + attended + sum(lse.nbytes for lse in lses)


def _on_device(call: LayerCall, x: Tensor) -> GpuStore | None:
    """Where pieces stay while their layer runs, None where they come from the store each time."""
    if not call.learn:  # an evaluation keeps nothing: its attention output waits on the device for the end of the layer
        return GpuStore(x.device)
    if isinstance(call.run_store, GpuStore):
        return call.run_store
    if not (x.nbytes <= HOLD_BYTES if call.hold is None else call.hold):
        return None
    return call.store if isinstance(call.store, GpuStore) else GpuStore(x.device)


def _pieces(call: LayerCall, length: int) -> list[slice]:
    return tiles(length, None if call.tile is None else call.tile * TILES_PER_PIECE)


@holds("residual")
def _after_forward(call: LayerCall, source: StreamedSource, x: Tensor, handles: list[Handle]):
    """The half behind attention, written over the input where that has left for the store."""
    in_place = call.store.kind != "gpu" or not call.learn
    y = _alias(x) if in_place else torch.empty_like(x)
    sums = []
    for at, piece in enumerate(source.pieces):
        attended = source.gather(at)
        if in_place and handles:
            call.store.wait_copied(handles[at])
        for tile in tiles(attended.shape[1], call.tile):
            where = slice(piece.start + tile.start, piece.start + tile.stop)
            with torch.no_grad():
                value, counted = after(call, where, [x[:, where], attended[:, tile]])
            y[:, where] = value
            if counted is not None:
                sums.append(counted)
    return y, add_routing(sums) if call.count_routing else None


def _after_backward(
    call: LayerCall, source: StreamedSource, inputs: Pieces, dx: Tensor, routing: Tensor | None
) -> None:
    """dy -> the gradient of the residual, in place; the gradient of the attention output goes to the store."""
    for at, (piece, x) in enumerate(inputs.items()):
        attended = source.gather(at)
        dattended = torch.empty_like(attended)
        for tile in tiles(x.shape[1], call.tile):
            where = slice(piece.start + tile.start, piece.start + tile.stop)
            dx[:, where], dattended[:, tile] = after_backward(
                call, where, x[:, tile], attended[:, tile], dx[:, where], routing, source.gradients, None
            )
        source.scatter(at, dattended)


def _alias(x: Tensor) -> Tensor:
    """The same memory as another tensor: autograd must not see an in-place change of what it thinks is the input."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach())  # pyright: ignore[reportArgumentType]
