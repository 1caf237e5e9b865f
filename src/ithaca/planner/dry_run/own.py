"""Layers and tiles of a model's own code that a dry run leaves out, because others of their kind hold what they hold.

The whole model is there, with the weights of every layer, and FSDP2 gathers and reduces them all. Of each kind of layer the first
two and the last two run; the others have a stand-in for their own forward, which makes tensors of the sizes that the second of
their kind made: outputs, what attention and tiled parts left behind, gradients. All else is the engine's own: what is put into a
store, how it leaves and comes back. So nothing is estimated but the inside of a layer, whose like was executed.

A kind is what the modules of a layer look like (classes, shapes, plain settings), what the config says of it, and what the stack
asks of it. What is held between layers grows or falls evenly from one to the next, so no layer of a kind holds more than its first
or its last. Where a layer is given a mapping to leave something in for later ones, or nothing is computed again, every layer runs.
So does a layer below all that is trained, which is an ordinary forward.

Of the tiles of an MLP or a linear mixer the first three and the last two run: from the third on all sums of gradients are there,
and the last may be short. The others make what the second has made. So the time of a dry run does not follow the context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...base.holding import holds
from ...engine.attention.head_schedule import Stage
from ...engine.layer import mixer
from ...engine.layer.mixer_tiles import mixer_tile
from ...engine.layer.module import running_call
from ...engine.model.shrink import layer_kind, per_layer
from ...engine.own import OwnDecoder, OwnLayer
from ...engine.run import Run
from .alike import RUN

Sizes = tuple[torch.Size, torch.dtype]
NUMBER = re.compile(r"(layer_?)?(idx|id|index|number)")  # of the layer itself: alike layers differ in nothing else


class NotAlike(Exception):
    """What a layer does cannot be told from another of its kind."""


@dataclass
class _Seen:
    """What a layer made in its forward."""

    spec: TreeSpec | None = None
    outputs: list[Any] = field(default_factory=list)  # sizes of tensors; other values as they are
    kept: list[tuple[Sizes, list[Sizes]]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)


@contextmanager
def stand_ins(run: Run) -> Iterator[int]:
    """-> how many layers have one."""
    decoder = run.decoder
    assert isinstance(decoder, OwnDecoder)
    replaced: list[tuple[OwnLayer, Any]] = []
    for group in _kinds(run).values():
        if len(group) <= RUN or run.stack.recompute_of(group[0].index) == "none":
            continue
        replaced += [(layer, layer.forward) for layer in group[1 : -RUN // 2]]
        seen = _Seen()
        group[1].forward = _watched(group[1].forward, seen)
        for layer in group[RUN // 2 : -RUN // 2]:
            layer.forward = _stand_in(decoder, layer, seen)
    try:
        yield sum(getattr(layer.forward, "stands_in", False) for layer in decoder.layers)
    finally:
        for layer, forward in replaced:
            layer.forward = forward


def _kinds(run: Run) -> dict[str, list[OwnLayer]]:
    layers: list[OwnLayer] = run.decoder.layers  # pyright: ignore[reportAssignmentType]
    fields, depth = run.decoder.config.to_dict(), len(layers)
    lists = {name for name, value in fields.items() if per_layer(name, value, depth)}
    kinds: dict[str, list[OwnLayer]] = {}
    learns = _trained(run.decoder.embedding)
    for layer in layers:
        learns = learns or _trained(layer.module)
        if not learns:
            continue
        asked = (run.stack.recompute_of(layer.index), run.stack.store_of(layer.index))
        kind = repr((_look(layer), layer_kind(fields, lists, layer.index, depth), asked))
        kinds.setdefault(kind, []).append(layer)
    return kinds


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _look(layer: OwnLayer) -> list[Any]:
    """Classes, plain settings but the layer's number, and shapes."""
    look: list[Any] = []
    for name, part in layer.module.named_modules():
        told = {
            key: value
            for key, value in vars(part).items()
            if not key.startswith("_")
            and isinstance(value, (int, float, str, type(None)))
            and not NUMBER.fullmatch(key)
        }
        look.append((name, type(part).__name__, sorted(told.items(), key=str)))
    for name, parameter in layer.module.named_parameters():
        look.append((name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    return look


def _watched(own: Any, seen: _Seen) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, MutableMapping) for value in kwargs.values()):
            raise NotAlike
        result = own(*args, **kwargs)
        call = running_call()
        if call is not None and not torch.is_grad_enabled():  # the first time, not when backward computes it again
            flat, seen.spec = tree_flatten(result)
            seen.outputs = [_sizes(t) if isinstance(t, Tensor) else t for t in flat]
            seen.kept = [(_sizes(out), [_sizes(lse) for lse in lses]) for out, lses in call.kept]
            seen.made = [made and [_sizes(t) if isinstance(t, Tensor) else t for t in made] for made in call.made]
        return result

    return forward


@contextmanager
def alike_tiles(run: Run, tokens: int) -> Iterator[None]:
    """tokens: of this rank."""
    decoder = run.decoder
    assert isinstance(decoder, OwnDecoder)
    whole: list[tuple[Any, str, tuple[Any, ...]]] = []
    if decoder.tile is not None and decoder.tiles:
        for layer in decoder.layers:
            for part in layer.parts:
                whole.append((part, "_part_of_ithaca", part._part_of_ithaca))  # pyright: ignore[reportArgumentType]
            if run.mesh.sequence.size == 1:  # otherwise mixers are not tiled
                whole += [(part, "_mixer_of_ithaca", part._mixer_of_ithaca) for part in layer.mixers]  # pyright: ignore
    for part, name, found in whole:
        size = mixer_tile(part, decoder.tile) if name.startswith("_mixer") else decoder.tile
        setattr(part, name, (*found[:-1], _Tiles(part, found[-1], -(-tokens // (size or tokens)))))
    try:
        yield
    finally:
        for part, name, found in whole:
            setattr(part, name, found)


@contextmanager
def alike_stages() -> Iterator[None]:
    """Of the heads of a scan some at a time: the first two stages and the last two run, and those of other sizes. What they make
    lies in tensors of all heads, and the others leave nothing behind."""
    every = mixer.head_schedule

    def some(*asked: Any) -> tuple[Stage, ...]:
        stages = every(*asked)
        sizes = [tuple(map(len, (*stage.queries, *stage.kv))) for stage in stages]
        last = len(stages) - 2
        return tuple(stage for at, stage in enumerate(stages) if not 2 <= at < last or sizes[at] != sizes[1])

    mixer.head_schedule = some
    try:
        yield
    finally:
        mixer.head_schedule = every


@dataclass
class _Tiles:
    """The forward of a part that is called `count` times in a row."""

    part: Any
    own: Any
    count: int
    calls: dict[bool, int] = field(default_factory=dict)  # with and without a graph
    second: dict[bool, tuple[torch.Size, _Seen]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self._tile(*args, **kwargs) if len(args) == 1 and isinstance(args[0], Tensor) else self.own(*args, **kwargs)
        )

    def _tile(self, x: Tensor, **given: Any) -> Any:
        graph, tile = torch.is_grad_enabled(), getattr(running_call(), "tile", None)
        at = self.calls.get(graph, 0) % self.count
        self.calls[graph] = self.calls.get(graph, 0) + 1
        shape, seen = self.second.get(graph, (None, None))
        if seen is None or shape != x.shape or at < 3 or at >= self.count - 2:
            result = self.own(x, **given)
            if at == 1:
                flat, spec = tree_flatten(result)
                left = [] if tile is None else tile.left
                self.second[graph] = (
                    x.shape,
                    _Seen(spec, [_sizes(t) if isinstance(t, Tensor) else t for t in (*flat, *left)]),
                )
            return result
        came = [] if tile is None else tile.came
        inputs = [t for t in (x, *came, *self.part.parameters()) if t.requires_grad]
        tensors = iter(_Inside.apply(seen, *inputs) if graph else map(_empty, filter(_is_sizes, seen.outputs)))
        flat = [next(tensors) if _is_sizes(t) else t for t in seen.outputs]  # pyright: ignore[reportArgumentType]
        assert seen.spec is not None
        if tile is not None:
            tile.left += flat[seen.spec.num_leaves :]
        return tree_unflatten(flat[: seen.spec.num_leaves], seen.spec)


def _stand_in(decoder: OwnDecoder, layer: OwnLayer, seen: _Seen) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = running_call()
        assert call is not None and seen.spec is not None
        if not torch.is_grad_enabled():
            assert decoder.running is not None
            decoder.running.attended.add(layer.index)
            if call.keeping:
                call.kept += [(_empty(out), [_lse(lse) for lse in lses]) for out, lses in seen.kept]
                stays = call.blank is not None  # then sizes are what is kept
                call.made += [made and [t if stays else _empty(t) for t in made] for made in seen.made]
            return tree_unflatten([_empty(t) if _is_sizes(t) else t for t in seen.outputs], seen.spec)
        for kept in (call.replay, call.remade):
            if kept is not None:
                kept.clear()
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]
        made = iter(_Inside.apply(seen, *inputs, *call.trainable()))  # pyright: ignore[reportArgumentType]
        return tree_unflatten([next(made) if _is_sizes(t) else t for t in seen.outputs], seen.spec)

    forward.stands_in = True  # pyright: ignore[reportFunctionMemberAccess]
    return forward


class _Inside(torch.autograd.Function):
    """From inputs and weights to outputs: gradients of the sizes that they have."""

    @staticmethod
    def forward(ctx: Any, seen: _Seen, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes = [_sizes(t) for t in inputs]
        return tuple(_empty(t) for t in seen.outputs if _is_sizes(t))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *(_empty(size) for size in ctx.sizes)


def _sizes(tensor: Tensor) -> Sizes:
    return tensor.shape, tensor.dtype


def _is_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Size)


def _empty(size: Sizes) -> Tensor:
    return torch.empty(size[0], dtype=size[1])


@holds("attention")
def _lse(size: Sizes) -> Tensor:
    return _empty(size)
