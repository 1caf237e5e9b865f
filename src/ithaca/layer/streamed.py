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
layer costs what the composed one does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..activations.store import GpuStore, Handle, Store
from ..activations.tiling import tiles
from .call import LayerCall
from .tokens import TokenSource, WholeInputs, add_routing, after, after_backward

TILES_PER_PIECE = 8  # a copy of a few hundred MB runs at the full rate of the link, and two of them are small change


class Pieces:
    """A tensor of the sequence in the store: one handle per piece, read in any order and as often as needed."""

    def __init__(self, store: Store, handles: list[Handle], pieces: list[slice]) -> None:
        self.store, self.handles, self.pieces = store, handles, pieces

    def each(self) -> Iterator[tuple[slice, Tensor]]:
        for at, piece in enumerate(self.pieces):
            following = self.handles[at + 1] if at + 1 < len(self.handles) else None
            yield piece, self.store.read(self.handles[at], then=following)[0]


class StoredInputs:
    """The layer input, a tile at a time, from pieces."""

    def __init__(self, pieces: Pieces, tile: int | None) -> None:
        self.pieces, self.tile = pieces, tile

    def each(self) -> Iterator[tuple[slice, Tensor]]:
        for piece, x in self.pieces.each():
            for tile in tiles(x.shape[1], self.tile):
                yield slice(piece.start + tile.start, piece.start + tile.stop), x[:, tile]


class StreamedSource(TokenSource):
    """Heads from a stored layer input; attention output and its gradient in the store, per stage and piece."""

    def __init__(self, call: LayerCall, inputs, pieces: list[slice]) -> None:
        super().__init__(call, inputs)
        self.pieces = pieces
        # an evaluation keeps nothing: its attention output waits on the device for the end of the layer
        self.store = call.store if call.learn else GpuStore(call.store.device)
        self.stored: dict[str, list[Pieces]] = {"out": [], "dout": []}

    def attended(self, stage: int, heads: list[int], value: Tensor) -> None:
        handles = [self.store.put([value[:, :, piece]]) for piece in self.pieces]
        self.stored["out"].append(Pieces(self.store, handles, self.pieces))

    def fill(self, stage: int, heads: list[int], name: str, into: Tensor) -> None:
        for piece, value in self.stored[name][stage].each():
            into[:, :, piece] = value
        self.stored[name][stage] = Pieces(self.store, [], [])  # read for the last time

    def heads(self) -> list[list[int]]:
        return [[h for ranks in stage.queries for h in ranks] for stage in self.call.attention.schedule]

    def gather(self, at: int) -> Tensor:
        """The attention output of one piece, all heads, [B, t, H·D]."""
        shape, stored = self.call.attention.shape, self.stored["out"]
        out = None
        for stage, heads in enumerate(self.heads()):
            if stage + 1 < len(stored):
                following = stored[stage + 1].handles[at]
            else:
                following = stored[0].handles[at + 1] if at + 1 < len(self.pieces) else None
            (value,) = self.store.read(stored[stage].handles[at], then=following)
            if out is None:
                out = value.new_empty(shape.rows, value.shape[2], shape.heads, shape.head_dim)
            for slot, head in enumerate(heads):
                out[:, :, head] = value[slot]
        assert out is not None
        return out.flatten(2)

    def scatter(self, at: int, value: Tensor) -> None:
        """The gradient of the attention output of one piece, [B, t, H·D], to the stages that need it."""
        by_head = value.unflatten(2, (-1, self.call.attention.shape.head_dim))
        for stage, heads in enumerate(self.heads()):
            part = torch.stack([by_head[:, :, head] for head in heads])
            if at == 0:
                self.stored["dout"].append(Pieces(self.store, [], self.pieces))
            self.stored["dout"][stage].handles.append(self.store.put([part]))

    def add_dh(self, tile: slice, grad: Tensor) -> None:
        if self.dh is None:
            self.dh = torch.zeros(grad.shape[0], self.call.positions.shape[1], grad.shape[2]).to(grad)
        self.dh[:, tile] += grad


class StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, call: LayerCall, *parameters: Tensor):
        pieces = _pieces(call, x.shape[1])
        source = StreamedSource(call, WholeInputs(x, call.tile), pieces)
        handles = [call.store.put([x[:, piece]]) for piece in pieces] if call.learn else []
        lses, _ = call.attention.forward(source, x, False)
        y, routing = _after_forward(call, source, x, handles)
        if call.learn:
            ctx.call, ctx.inputs, call.stored = call, Pieces(call.store, handles, pieces), True
            if call.recompute == "keep_attention":
                ctx.out, ctx.lses = source.stored["out"], call.store.put(lses)
        if routing is None:
            return y
        ctx.mark_non_differentiable(routing[1])
        return y, *routing

    @staticmethod
    def backward(ctx, dy: Tensor, *routing_grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: LayerCall = ctx.call
        source = StreamedSource(call, StoredInputs(ctx.inputs, call.tile), ctx.inputs.pieces)
        if call.recompute == "keep_attention":
            source.stored["out"], lses = ctx.out, call.store.take(ctx.lses)
        else:
            lses, _ = call.attention.forward(source, dy, False)
        dx = dy.detach() if call.store.kind != "gpu" else dy.detach().clone()
        routing = routing_grads[0] if routing_grads else None
        _after_backward(call, source, ctx.inputs, dx, routing)
        call.attention.backward(source, dx, lses, [])
        source.finish(dx)
        ctx.inputs = ctx.out = ctx.lses = None
        grads = [source.gradients.take(p) for p in call.trainable()]
        return (dx if ctx.needs_input_grad[0] else None), None, *grads


def _pieces(call: LayerCall, length: int) -> list[slice]:
    return tiles(length, None if call.tile is None else call.tile * TILES_PER_PIECE)


def _after_forward(call: LayerCall, source: StreamedSource, x: Tensor, handles: list[Handle]):
    """The half behind attention, written over the input where that has left for the store."""
    in_place = call.store.kind != "gpu" or not call.learn
    y = _alias(x) if in_place else torch.empty_like(x)
    sums = []
    for at, piece in enumerate(source.pieces):
        attended = source.gather(at)
        if in_place and handles:
            call.store.settle(handles[at])
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
    for at, (piece, x) in enumerate(inputs.each()):
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
