"""The per-token work of a layer, a tile at a time, for both engines.

Two halves: heads are projected from the normed input before attention (`TokenSource`), and o_proj, norms, MLP and residuals
follow it (`after_forward`, `after_backward`). Where a tile of the input comes from is the engine's business (`Inputs`): a slice
of a tensor on the device, or a piece read from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ...base.holding import holds, module_holds
from ..model.projection import Bound
from ..tiling import Gradients, differentiate, tiles
from .call import LayerCall
from .heads import to_heads_first

module_holds(__name__, "tile")


class Inputs(Protocol):
    """The layer input, a tile at a time."""

    def items(self) -> Iterator[tuple[slice, Tensor]]: ...


class WholeInputs:
    """A layer input that lies whole on the device."""

    def __init__(self, x: Tensor, tile: int | None) -> None:
        self.x, self.tile = x, tile

    def items(self) -> Iterator[tuple[slice, Tensor]]:
        for tile in tiles(self.x.shape[1], self.tile):
            yield tile, self.x[:, tile]


def leaf(t: Tensor, learn: bool) -> Tensor:
    return t.detach().requires_grad_(learn)


def after(
    call: LayerCall, tile: slice, inputs: list[Tensor], keep: bool = False, unread: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Everything behind attention for one tile. -> y, (router probability sums, assignment counts) if asked for"""
    value, logits = call.layer.after(*inputs, keep=keep, unread=unread)
    return value, _count_routing(call, logits, tile)


def after_backward(
    call: LayerCall,
    tile: slice,
    x: Tensor,
    attended: Tensor,
    dy: Tensor,
    routing: Tensor | None,
    gradients: Gradients,
    graph,
) -> tuple[Tensor, Tensor]:
    """dx (through the residual) and dattended of one tile; parameter gradients go to `gradients`."""
    parameters = call.layer.after_parameters()
    if graph is None:
        with torch.enable_grad():
            inputs = [leaf(t, True) for t in (x, attended)]
            value, counted = after(call, tile, inputs, unread=True)
    else:
        inputs, value, counted = graph
    outputs, grads = [value], [dy]
    if counted is not None and routing is not None:
        outputs.append(counted[0])
        grads.append(routing)
    derivatives = differentiate(outputs, grads, [*inputs, *parameters])
    gradients.add(parameters, derivatives[2:])
    assert derivatives[0] is not None and derivatives[1] is not None
    return derivatives[0], derivatives[1]


def add_routing(sums: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(tensors).sum(0) for tensors in zip(*sums, strict=True))


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


class TokenSource:
    """Projects heads from a layer input, tile by tile, and takes their gradients (part of attention.stages.Source)."""

    def __init__(self, call: LayerCall, inputs: Inputs, keep_graph: bool = False) -> None:
        self.call, self.inputs, self.keep_graph = call, inputs, keep_graph
        self.gradients = Gradients()
        self.dh: Tensor | None = None
        self.graph: tuple[Tensor, dict[str, Bound], dict[str, Tensor]] | None = None
        self.norm_graph: tuple[Tensor, Tensor | None, Tensor] | None = None

    def _normed(self, x: Tensor) -> Tensor:
        """The input of the projections, without a graph: its own derivative is taken once, in `finish`."""
        if self.keep_graph:
            if self.norm_graph is None:
                self.norm_graph = self._norm_graph(x)
            return self.norm_graph[2].detach()
        with torch.no_grad():
            return self.call.layer.normed(x)

    def _norm_graph(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """x, what stands for it beside its norm where one kernel differentiates both, and the norm."""
        with torch.enable_grad():
            start = leaf(x, True)
            beside, value = self.call.layer.normed_beside(start) or (None, self.call.layer.normed(start))
        return start, beside, value

    def _project(self, bounds: dict[str, Bound], h: Tensor, tile: slice, unread: bool = False) -> dict[str, Tensor]:
        places = self.call.positions
        return self.call.layer.project(bounds, h, places.positions[:, tile], lambda: places.cos_sin(tile), unread)

    def _bind(self, heads: dict[str, list[int]]) -> dict[str, Bound]:
        return {name: self.call.layer.projector.bind(name, _unique(indices)) for name, indices in heads.items()}

    def project(self, stage: int, heads: dict[str, list[int]], into: dict[str, Tensor]) -> None:
        bounds = self._bind(heads)
        for tile, x in self.inputs.items():
            for name, value in self._made(bounds, tile, x).items():
                to_heads_first(value, _places(heads[name]), into[name][:, :, tile])

    def _made(self, bounds: dict[str, Bound], tile: slice, x: Tensor) -> dict[str, Tensor]:
        with torch.set_grad_enabled(self.keep_graph):
            h = leaf(self._normed(x), self.keep_graph)
            values = self._project(bounds, h, tile)
        if self.keep_graph:
            self.graph = (h, bounds, values)
        return {name: value.detach() for name, value in values.items()}

    def receive(self, stage: int, heads: dict[str, list[int]], grads: dict[str, Tensor]) -> None:
        bounds = self.graph[1] if self.graph else self._bind(heads)
        merged = {name: _merge(grads[name], indices) for name, indices in heads.items()}
        leaves = [bound_leaf for name in heads for bound_leaf in bounds[name].leaves]
        totals: list[Tensor | None] = []
        for tile, x in self.inputs.items():
            if self.graph is not None:
                h, _, values = self.graph
            else:
                with torch.enable_grad():
                    h = leaf(self._normed(x), True)
                    values = self._project(bounds, h, tile, unread=True)
            outputs = [values[name] for name in heads]
            dvalues = [merged[name][:, :, tile].permute(1, 2, 0, 3) for name in heads]
            derivatives = differentiate(outputs, dvalues, [h, *(bound_leaf.value for bound_leaf in leaves)])
            assert derivatives[0] is not None
            self.add_dh(tile, derivatives[0])
            totals = _add_each(totals, derivatives[1:])
            del derivatives  # or these gradients would live on beside the next tile's
        self.graph = None
        self.gradients.add_leaves(leaves, totals)

    def stash(self, sums: list[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: sums

    @holds("residual")
    def add_dh(self, tile: slice, grad: Tensor) -> None:
        rows, count, width = grad.shape
        tokens = self.call.attention.shape.tokens
        if self.alone and count == tokens:
            self.dh = grad
        elif self.alone:
            self.dh = grad.new_empty(rows, tokens, width) if self.dh is None else self.dh
            self.dh[:, tile] = grad
        else:
            # every stage adds to this one: in fp32, or the sum would lose what the parts had
            wide = torch.promote_types(grad.dtype, torch.float32)
            self.dh = grad.new_zeros(rows, tokens, width, dtype=wide) if self.dh is None else self.dh
            self.dh[:, tile] += grad

    @property
    def alone(self) -> bool:
        """Whether one stage has all heads: what it gives is whole."""
        return len(self.call.attention.schedule) == 1

    def finish(self, dx: Tensor) -> Tensor:
        """dx and the derivative through the norm before attention, in dx where there are several tiles."""
        assert self.dh is not None
        norm = self.call.layer.before
        if norm is None:
            return dx.add_(self.dh)
        parameters = [p for p in norm.parameters() if p.requires_grad]
        for tile, x in self.inputs.items():
            start, beside, value = self.norm_graph or self._norm_graph(x)
            dh = self.dh[:, tile].to(value.dtype)
            if beside is None:
                derivatives = differentiate([value], [dh], [start, *parameters])
                dx[:, tile] += derivatives[0]  # pyright: ignore[reportOperatorIssue]
            else:
                derivatives = differentiate([beside, value], [dx[:, tile], dh], [start, *parameters])
                if x.shape[1] == dx.shape[1]:
                    dx = derivatives[0]  # pyright: ignore[reportAssignmentType]
                else:
                    dx[:, tile] = derivatives[0]  # pyright: ignore[reportArgumentType]
            self.gradients.add(parameters, derivatives[1:])
        return dx


def _unique(heads: list[int]) -> list[int]:
    return sorted(set(heads))


def _places(heads: list[int]) -> list[int]:
    """Where each head lies among the projected ones; a head several ranks need is projected once."""
    at = {head: i for i, head in enumerate(_unique(heads))}
    return [at[head] for head in heads]


def _merge(grads: Tensor, heads: list[int]) -> Tensor:
    """Gradients [heads, B, s, D] with repeated heads -> one each, summed in fp32, in ascending order."""
    unique = _unique(heads)
    if heads == unique:
        return grads
    at = torch.tensor([unique.index(head) for head in heads], device=grads.device)
    wide = grads.new_zeros(len(unique), *grads.shape[1:], dtype=torch.promote_types(grads.dtype, torch.float32))
    return wide.index_add_(0, at, grads.to(wide.dtype)).to(grads.dtype)


def _add_each(totals: list[Tensor | None], parts: Any) -> list[Tensor | None]:
    """Weight gradients of one stage, tile by tile, in fp32."""
    if not totals:
        return list(parts)
    for i, part in enumerate(parts):
        if part is not None:
            total = totals[i]
            assert total is not None
            totals[i] = total.to(torch.promote_types(total.dtype, torch.float32)).add_(part)
    return totals
