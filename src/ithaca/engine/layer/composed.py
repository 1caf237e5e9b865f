"""The composed layer: rungs 1 to 6 of the ladder, each switchable by itself, on tensors that lie whole on the device.

Forward: attention by head stages (attention/stages.py), then o_proj, norms, MLP and residuals tile by tile. What survives until
backward is the layer input; with recompute="keep_attention" also the attention output and log-sum-exp. They wait in the
store. Backward runs the two halves in reverse: it computes a tile of the second half again under ordinary autograd and
differentiates it at once; then it walks the attention stages, and last differentiates the norm before attention.

No derivative is written by hand except the kernel's own: inside, autograd runs over the family's own Hugging Face modules, one
tile at a time, so norms, experts, adapters and biases keep working as they are. The parameters are inputs of the
Function, so FSDP2's hooks see an ordinary module with one gradient per parameter.

recompute="none" keeps the autograd graphs of both halves and q, k, v as well, so backward computes nothing twice. Tiles and
head stages are still computed again where they are asked for: not holding them whole is what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.holding import holds
from ..tiling import tiles
from .call import LayerCall
from .heads import to_heads_first, to_tokens_first
from .tokens import TokenSource, WholeInputs, add_routing, after, after_backward, leaf


@dataclass
class Kept:
    """What forward leaves for backward besides the stored tensors (recompute="none" only)."""

    source: Any = None
    qkv: list = field(default_factory=list)
    after: tuple | None = None


class WholeSource(TokenSource):
    """Heads from a layer input on the device; attention output and its gradient whole, [B, s, H, D]."""

    def __init__(self, call: LayerCall, x: Tensor, keep_graph: bool = False) -> None:
        super().__init__(call, WholeInputs(x, call.projection_tile), keep_graph)
        self.whole: dict[str, Tensor] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.call.attention.shape
        return shape.rows, shape.tokens, shape.heads, shape.head_dim

    @holds("kept")
    def attended(self, stage: int, heads: list[int], value: Tensor) -> None:
        if "out" not in self.whole:
            self.whole["out"] = value.new_empty(self.shape)
        to_tokens_first(value, heads, self.whole["out"])

    def fill(self, stage: int, heads: list[int], name: str, into: Tensor) -> None:
        to_heads_first(self.whole[name], heads, into)


class GraphSource(WholeSource):
    """Of a layer that keeps the graph of its projections: they lie there as they were made, and are attended in place where that
    can be (attention.stages.InPlace)."""

    def projected(self, heads: dict[str, list[int]]) -> dict[str, Tensor]:
        ((tile, x),) = self.inputs.items()
        return self._made(self._bind(heads), tile, x)


class ComposedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, call: LayerCall, *parameters: Tensor):
        # a tile of its own is recomputed in backward anyway, so only the untiled layer keeps graphs
        keep_graph = call.learn and call.recompute == "none" and call.tile is None
        keep_qkv = call.learn and call.recompute == "none"
        # likewise a stage projects its heads again; one stage with all heads has nothing to gain from that
        one_stage = len(call.attention.schedule) == 1
        source = GraphSource(call, x, True) if keep_graph and one_stage else WholeSource(call, x)
        lses, qkv = call.attend(source, x, keep_qkv)
        attended = source.whole["out"].flatten(2)
        y, routing, graph = _after_forward(call, x, attended, keep_graph)
        if call.learn:
            kept = [x] if call.recompute == "layer" else [x, attended, *lses]
            ctx.handle, ctx.call, call.stored = call.store.put(kept), call, True
            ctx.kept = Kept(source if source.keep_graph else None, qkv, graph)
        if routing is None:
            return y
        ctx.mark_non_differentiable(routing[1])
        return y, *routing

    @staticmethod
    @holds("residual")
    def backward(ctx, dy: Tensor, *routing_grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: LayerCall = ctx.call
        kept: Kept = ctx.kept
        x, *more = call.store.take(ctx.handle)
        source = kept.source or WholeSource(call, x)
        if call.recompute == "layer":
            lses, _ = call.attend(source, x, False)
            attended = source.whole["out"].flatten(2)
        else:
            attended, *lses = more
            source.whole["out"] = attended.view(source.shape)
        routing = routing_grads[0] if routing_grads else None

        def of(tile: slice) -> tuple[Tensor, Tensor]:
            parts = x[:, tile], attended[:, tile], dy[:, tile]
            return after_backward(call, tile, *parts, routing, source.gradients, kept.after)

        every = list(tiles(x.shape[1], call.tile))
        if len(every) == 1:  # of all tokens: no copy of it
            dx, dattended = of(every[0])
        else:
            dx, dattended = torch.empty_like(x), torch.empty_like(attended)
            for tile in every:
                dx[:, tile], dattended[:, tile] = of(tile)
        source.whole["dout"] = dattended.view(source.shape)
        call.attend_backward(source, x, lses, kept.qkv, source.gradients)
        dx = source.finish(dx)
        ctx.kept = ctx.handle = None
        grads = [source.gradients.take(p) for p in call.trainable()]
        return (dx if ctx.needs_input_grad[0] else None), None, *grads


@holds("residual")
def _after_forward(call: LayerCall, x: Tensor, attended: Tensor, keep_graph: bool):
    """The half behind attention. -> y, (probability sums, counts) or None, the graph if kept"""
    y, sums, graph = x.new_empty(0) if keep_graph else torch.empty_like(x), [], None
    for tile in tiles(x.shape[1], call.tile):
        with torch.set_grad_enabled(keep_graph):
            inputs = [leaf(t[:, tile], keep_graph) for t in (x, attended)]
            value, counted = after(call, tile, inputs, keep_graph)
        if keep_graph:  # of all tokens, and backward does not read it: no copy beside it
            y = value.detach()
        else:
            y[:, tile] = value
        if counted is not None:
            sums.append(tuple(t.detach() for t in counted))
        if keep_graph:
            graph = (inputs, value, counted)
    return y, add_routing(sums) if call.count_routing else None, graph
