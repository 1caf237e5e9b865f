"""One decoder layer, exact, with everything switchable: one autograd Function that orchestrates tiles and stages.

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

from .activations.store import Store
from .activations.tiling import Gradients, differentiate, tiles
from .attention.stages import StagedAttention
from .model.adapter import Layer
from .model.projection import Bound, project
from .model.rope import Rope


@dataclass
class LayerCall:
    """What a layer needs besides its input: made by the run for each batch."""

    layer: Layer
    attention: StagedAttention
    rope: Rope
    positions: Tensor  # [B or 1, s]
    tile: int | None
    recompute: str
    store: Store
    count_routing: bool = False  # return the sums that the router's balance loss is made of
    valid: Tensor | None = None  # [B, s], False on padding
    learn: bool = True
    stored: bool = False  # forward put something into the store


@dataclass
class Kept:
    """What forward leaves for backward besides the stored tensors (recompute="none" only)."""

    source: Any = None
    qkv: list = field(default_factory=list)
    after: tuple | None = None


def run_layer(x: Tensor, call: LayerCall) -> tuple[Tensor, ...]:
    """y, or with count_routing (y, probability sums [E], assignment counts [E])."""
    parameters = _trainable(call.layer)
    call.learn = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
    result = _LayerFunction.apply(x, call, *parameters)
    return result if isinstance(result, tuple) else (result,)  # pyright: ignore[reportReturnType]


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, call: LayerCall, *parameters: Tensor):
        # a tile of its own is recomputed in backward anyway, so only the untiled layer keeps graphs
        keep_graph = call.learn and call.recompute == "none" and call.tile is None
        keep_qkv = call.learn and call.recompute == "none"
        # likewise a stage projects its heads again; one stage with all heads has nothing to gain from that
        source = _TokenSource(call, x, keep_graph and len(call.attention.schedule) == 1)
        attended, lses, qkv = call.attention.forward(source, x, keep_qkv)
        attended = attended.flatten(2)
        y, routing, after = _after_forward(call, x, attended, keep_graph)
        if call.learn:
            kept = [x] if call.recompute == "layer" else [x, attended, *lses]
            ctx.handle, ctx.call, call.stored = call.store.put(kept), call, True
            ctx.kept = Kept(source if source.keep_graph else None, qkv, after)
        if routing is None:
            return y
        ctx.mark_non_differentiable(routing[1])
        return y, *routing

    @staticmethod
    def backward(ctx, dy: Tensor, *routing_grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: LayerCall = ctx.call
        kept: Kept = ctx.kept
        x, *more = call.store.take(ctx.handle)
        gradients = Gradients()
        source = kept.source or _TokenSource(call, x, keep_graph=False)
        source.gradients = gradients
        if call.recompute == "layer":
            whole, lses, _ = call.attention.forward(source, x, False)
            attended = whole.flatten(2)
        else:
            attended, *lses = more
        dx, dattended = _after_backward(call, x, attended, dy, routing_grads, gradients, kept.after)
        size = call.layer.projector.head_dim
        call.attention.backward(
            source, dattended.unflatten(2, (-1, size)), attended.unflatten(2, (-1, size)), lses, kept.qkv
        )
        source.finish(dx)
        ctx.kept = ctx.handle = None
        grads = [gradients.take(p) for p in _trainable(call.layer)]
        return (dx if ctx.needs_input_grad[0] else None), None, *grads


def _trainable(layer: Layer) -> list[Tensor]:
    return [p for p in layer.module.parameters() if p.requires_grad]


def _after_forward(call: LayerCall, x: Tensor, attended: Tensor, keep_graph: bool):
    """The half behind attention. -> y, (probability sums, counts) or None, the graph if kept"""
    y, sums, graph = torch.empty_like(x), [], None
    for tile in tiles(x.shape[1], call.tile):
        with torch.set_grad_enabled(keep_graph):
            inputs = [_leaf(t[:, tile], keep_graph) for t in (x, attended)]
            value, logits = call.layer.after(*inputs)
            counted = _count_routing(call, logits, tile)
        y[:, tile] = value.detach()
        if counted is not None:
            sums.append(tuple(t.detach() for t in counted))
        if keep_graph:
            graph = (inputs, value, counted)
    routing = None
    if call.count_routing:
        routing = tuple(torch.stack(each).sum(0) for each in zip(*sums, strict=True))
    return y, routing, graph


def _after_backward(call: LayerCall, x, attended, dy, routing_grads, gradients: Gradients, graph):
    """Gradients of the half behind attention: dx through the residual and dattended; parameters go to `gradients`."""
    dx, dattended = torch.empty_like(x), torch.empty_like(attended)
    parameters = call.layer.after_parameters()
    for tile in tiles(x.shape[1], call.tile):
        if graph is None:
            with torch.enable_grad():
                inputs = [_leaf(t[:, tile], True) for t in (x, attended)]
                value, logits = call.layer.after(*inputs)
                counted = _count_routing(call, logits, tile)
        else:
            inputs, value, counted = graph
        outputs, grads = [value], [dy[:, tile]]
        if counted is not None and routing_grads[0] is not None:
            outputs.append(counted[0])
            grads.append(routing_grads[0])
        found = differentiate(outputs, grads, [*inputs, *parameters])
        dx[:, tile], dattended[:, tile] = found[0], found[1]  # pyright: ignore[reportArgumentType]
        gradients.add(parameters, found[2:])
        del found  # or these gradients would live on beside the next tile's
    return dx, dattended


def _count_routing(call: LayerCall, logits: Tensor | None, tile: slice) -> tuple[Tensor, Tensor] | None:
    """Sums over the real tokens of a tile: router probability and top-k assignments per expert."""
    if not call.count_routing:
        return None
    router = call.layer.router
    assert router is not None and logits is not None
    probability = torch.softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)
    chosen = probability.detach().topk(router.top_k, -1).indices
    weight = torch.ones_like(probability[:, 0]) if call.valid is None else call.valid[:, tile].flatten().to(probability)
    counts = torch.zeros_like(probability[0].detach())
    counts.index_add_(0, chosen.flatten(), weight.repeat_interleave(router.top_k))
    return (probability * weight[:, None]).sum(0), counts


class _TokenSource:
    """Projects heads from a layer input, tile by tile, and takes their gradients (attention.stages.Source)."""

    def __init__(self, call: LayerCall, x: Tensor, keep_graph: bool) -> None:
        self.call, self.x, self.keep_graph = call, x, keep_graph
        self.gradients: Gradients | None = None
        self.dh: Tensor | None = None
        self.graphs: dict[str, tuple[Tensor, Bound, Tensor]] = {}
        self.norm_graph: tuple[Tensor, Tensor] | None = None
        if keep_graph:
            with torch.enable_grad():
                leaf = _leaf(x, True)
                self.norm_graph = (leaf, self._norm(leaf))

    def _norm(self, x: Tensor) -> Tensor:
        return x if self.call.layer.before is None else self.call.layer.before(x)

    def _normed(self, tile: slice) -> Tensor:
        """The input of the projections, without a graph: its own derivative is taken once, in `finish`."""
        if self.norm_graph is not None:
            return self.norm_graph[1].detach()[:, tile]
        with torch.no_grad():
            return self._norm(self.x[:, tile])

    def _rope(self, which: str, tile: slice) -> tuple[Tensor, Tensor] | None:
        if which == "v":
            return None
        return self.call.rope.cos_sin(self.call.positions[:, tile], self.x.dtype, self.x.device)

    def project(self, stage: int, heads: dict[str, list[int]], into: dict[str, Tensor]) -> None:
        bounds = {name: self.call.layer.projector.bind(name, _unique(each)) for name, each in heads.items()}
        for tile in tiles(self.x.shape[1], self.call.tile):
            h = self._normed(tile)
            rope = self._rope("q", tile)
            for name, bound in bounds.items():
                with torch.set_grad_enabled(self.keep_graph):
                    leaf = _leaf(h, self.keep_graph)
                    value = project(bound, leaf, rope if name != "v" else None)
                if self.keep_graph:
                    self.graphs[name] = (leaf, bound, value)
                _spread(value.detach(), heads[name], into[name][:, :, tile])

    def receive(self, stage: int, heads: dict[str, list[int]], grads: dict[str, Tensor]) -> None:
        assert self.gradients is not None
        for name, each in heads.items():
            graph = self.graphs.pop(name, None)
            bound = graph[1] if graph else self.call.layer.projector.bind(name, _unique(each))
            merged = _merge(grads[name], each)
            totals: list[Tensor | None] = []
            for tile in tiles(self.x.shape[1], self.call.tile):
                if graph is not None:
                    leaf, _, value = graph
                else:
                    with torch.enable_grad():
                        leaf = _leaf(self._normed(tile), True)
                        value = project(bound, leaf, self._rope(name, tile))
                inputs = [leaf, *(each_leaf.value for each_leaf in bound.leaves)]
                found = differentiate([value], [merged[:, :, tile].permute(1, 2, 0, 3)], inputs)
                self._add_dh(tile, found[0])  # pyright: ignore[reportArgumentType]
                totals = _add_each(totals, found[1:])
                del found
            self.gradients.add_leaves(bound.leaves, totals)

    def _add_dh(self, tile: slice, grad: Tensor) -> None:
        if self.dh is None:
            # q, k and v of every stage add to this one: fp32, or the sum would lose what the parts had
            self.dh = torch.zeros(
                self.x.shape, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device
            )
        self.dh[:, tile] += grad

    def finish(self, dx: Tensor) -> None:
        """Add the derivative through the norm before attention to dx, in place."""
        assert self.gradients is not None and self.dh is not None
        norm = self.call.layer.before
        if norm is None:
            dx += self.dh
            return
        parameters = [p for p in norm.parameters() if p.requires_grad]
        for tile in tiles(self.x.shape[1], self.call.tile):
            if self.norm_graph is not None:
                leaf, value = self.norm_graph
            else:
                with torch.enable_grad():
                    leaf = _leaf(self.x[:, tile], True)
                    value = self._norm(leaf)
            found = differentiate([value], [self.dh[:, tile].to(value.dtype)], [leaf, *parameters])
            dx[:, tile] += found[0]  # pyright: ignore[reportOperatorIssue]
            self.gradients.add(parameters, found[1:])


def _leaf(t: Tensor, learn: bool) -> Tensor:
    return t.detach().requires_grad_(learn)


def _unique(heads: list[int]) -> list[int]:
    return sorted(set(heads))


def _spread(value: Tensor, heads: list[int], into: Tensor) -> None:
    """value [B, t, unique heads, D] -> into [heads, B, t, D]; a head several ranks need is written once for each."""
    at = {head: i for i, head in enumerate(_unique(heads))}
    for slot, head in enumerate(heads):
        into[slot] = value[:, :, at[head]]


def _merge(grads: Tensor, heads: list[int]) -> Tensor:
    """Gradients [heads, B, s, D] with repeated heads -> one each, summed in fp32, in ascending order."""
    unique = _unique(heads)
    if heads == unique:
        return grads
    at = torch.tensor([unique.index(head) for head in heads], device=grads.device)
    wide = grads.new_zeros(len(unique), *grads.shape[1:], dtype=torch.promote_types(grads.dtype, torch.float32))
    return wide.index_add_(0, at, grads.to(wide.dtype)).to(grads.dtype)


def _add_each(totals: list[Tensor | None], parts) -> list[Tensor | None]:
    """Weight gradients of one stage, tile by tile, in fp32."""
    if not totals:
        return list(parts)
    for i, part in enumerate(parts):
        if part is not None:
            total = totals[i]
            assert total is not None
            totals[i] = total.to(torch.promote_types(total.dtype, torch.float32)).add_(part)
    return totals
