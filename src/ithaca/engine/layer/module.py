"""The module layer: a decoder layer's own forward, checkpointed, with our attention inside.

Only the attention function is ours (attention/interface.py). Everything else, norms, projections, rotary embedding, experts,
scales, hooks that somebody has put there, is the layer's own code on this rank's tokens. Forward runs it without a graph; what
survives is its input, and with recompute="keep_attention" the attention output and log-sum-exp. Backward runs it again under
autograd: where the layer comes to its attention it gets back what was kept, and no kernel runs twice. A tiled MLP computes a tile
again when its gradient is there, so what it made is not computed before that as well: it is kept too, or, where nobody looks at it
(a residual is added, no norm follows; the proof tries that), zeros stand for it.

q, k and v of this rank's tokens are whole here, unlike in the other engines, since we do not know how a layer makes its heads.
Stages exchange and attend a few heads at a time all the same (attention/stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...base.holding import holds, module_holds
from ..attention.interface import Asked, attending, current
from ..attention.scan import Call, Tensors
from ..attention.stages import StagedAttention
from ..offload.store import Store
from ..tiling import Gradients, differentiate, tiles
from .heads import to_heads_first, to_tokens_first
from .mixer import HeadScan, Spread, convolve, scan_of

if TYPE_CHECKING:
    from .mixer_tiles import Tile

module_holds(__name__, "kept")

# What an attention made [B, s, H, D] and the lse of each stage; a scan, which has none; a mixer by tiles, and what they left.
Kept = tuple[Tensor, list[Tensor]]
_call: ContextVar[ModuleCall | None] = ContextVar("call", default=None)


def running_call() -> ModuleCall | None:
    """The layer that is being computed, in this thread."""
    return _call.get()


@dataclass
class ModuleCall:
    """One layer on one batch."""

    module: nn.Module
    forward: Callable[..., Any]  # of the layer itself
    configs: list[Any]  # that its modules look at
    attention: Callable[[tuple[int, ...], int, Asked], StagedAttention]  # by the shape of q and the heads of k
    spread: Callable[[], Spread]  # where the tokens of a mixer lie
    recompute: str
    store: Store
    fold: int = 1  # rows that stand for ranks, in a proof
    blank: float | None = None  # stands for what tiled parts made, when the layer runs again; None: it is kept
    reserve: Callable[[int], None] = lambda nbytes: None  # told how much is about to be stored
    learn: bool = True
    stored: bool = False
    keeping: bool = False  # what attention makes goes to `kept`, what tiled parts make to `made`
    kept: list[Kept] = field(default_factory=list)
    made: list[list[Any] | None] = field(default_factory=list)
    replay: list[Kept] | None = None
    remade: list[list[Any] | None] = field(default_factory=list)
    tile: Tile | None = None  # of the mixer that is running, if it does so by tiles

    def trainable(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: Asked) -> Tensor:
        """q [B, H, s, D], k, v [B, K, s, ·] of this rank's tokens -> [B, s, H, ·]"""
        q, k, v = (_fold(t, self.fold) for t in (q, k, v))
        size, width = q.shape[-1], v.shape[-1]
        most = max(size, width)  # heads travel in buffers of one size; zeros change nothing
        q, k, v = (F.pad(t, (0, most - t.shape[-1])) if t.shape[-1] < most else t for t in (q, k, v))
        staged = self.attention(tuple(q.shape), k.shape[1], asked)
        if sinks is not None:
            staged = replace(staged, sinks=sinks.detach())
        out = _Attention.apply(q, k, v, sinks, self, staged)
        assert isinstance(out, Tensor)
        return _unfold(out[..., :width], self.fold)

    def convolve(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
    ) -> Tensor:
        """x [B, C, s] of this rank's tokens, as a mixer's own convolution takes it."""
        if self.tile is not None:
            return self.tile.convolve(function, x, weight, bias, activation)
        rows, channels, tokens = x.shape
        if self.fold > 1:
            x = x.view(-1, self.fold, channels, tokens).transpose(1, 2).reshape(-1, channels, self.fold * tokens)
        out = convolve(self.spread(), function, x, weight, bias, activation)
        if self.fold > 1:
            out = out.unflatten(2, (self.fold, tokens)).transpose(1, 2).reshape(rows, channels, tokens)
        return out

    def scan(self, call: Call, tensors: Tensors, repeats: int | None) -> Tensor:
        """Tensors [B, s, heads, ·] of this rank's tokens, and weights [heads] -> [B, s, heads, ·]"""
        if self.tile is not None:
            return self.tile.scan(call, tensors, repeats)
        weights = call.scan.weights
        tensors = {n: t if n in weights else _as_sequence(t, self.fold) for n, t in tensors.items()}
        work, tensors = scan_of(self.spread(), call, tensors, repeats)
        out = _Scan.apply(self, work, *tensors.values())
        assert isinstance(out, Tensor)
        return _unfold(out, self.fold)

    def keep_made(self, made: list[Any]) -> None:
        """What a tiled part returned; None stands for what must be computed again."""
        if not all(isinstance(t, Tensor) for t in made):
            self.made.append(None)
        else:
            self.made.append(made if self.blank is None else [(t.shape, t.dtype) for t in made])

    def made_before(self, device: torch.device) -> list[Any] | None:
        """What the next tiled part returned when the layer ran first."""
        made = self.remade.pop(0) if self.remade else None
        if made is None or self.blank is None:
            return made
        return [torch.full(shape, self.blank, dtype=dtype, device=device) for shape, dtype in made]

    def run(self, args: Any, kwargs: Any) -> Any:
        with self.running(), attending(self.configs), current(self.attend):
            return self.forward(*args, **kwargs)

    @contextmanager
    def running(self, tile: Tile | None = None) -> Iterator[None]:
        token, before, self.tile = _call.set(self), self.tile, tile
        try:
            yield
        finally:
            self.tile = before
            _call.reset(token)


class _Heads:
    """Where the stages of one attention get their heads, and leave what comes of them (attention.stages.InPlace)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.whole = {name: t.transpose(1, 2) for name, t in (("q", q), ("k", k), ("v", v))}  # [B, s, heads, D]
        self.grads: dict[str, Tensor] = {}

    def projected(self, heads: dict[str, list[int]]) -> dict[str, Tensor]:
        return {name: self.whole[name] for name in heads}

    def project(self, stage: int, heads: dict[str, list[int]], into: dict[str, Tensor]) -> None:
        for name, indices in heads.items():
            to_heads_first(self.whole[name], indices, into[name])

    def attended(self, stage: int, heads: list[int], value: Tensor) -> None:
        if "out" not in self.whole:
            self.whole["out"] = torch.empty_like(self.whole["q"], memory_format=torch.contiguous_format)
        to_tokens_first(value, heads, self.whole["out"])

    def fill(self, stage: int, heads: list[int], name: str, into: Tensor) -> None:
        to_heads_first(self.whole[name], heads, into)

    def receive(self, stage: int, heads: dict[str, list[int]], grads: dict[str, Tensor]) -> None:
        for name, indices in heads.items():
            if indices == list(range(self.whole[name].shape[2])):  # each once: nothing to add up
                self.grads[name] = grads[name].permute(1, 2, 0, 3)
                continue
            if name not in self.grads:
                wide = torch.promote_types(self.whole[name].dtype, torch.float32) if name != "q" else None
                self.grads[name] = torch.zeros(
                    self.whole[name].shape, dtype=wide or self.whole[name].dtype, device=self.whole[name].device
                )
            if name == "q":
                to_tokens_first(grads[name], indices, self.grads[name])
                continue
            for slot, head in enumerate(indices):  # several ranks may have had a copy of a KV head
                self.grads[name][:, :, head] += grads[name][slot].to(self.grads[name].dtype)

    def stash(self, sums: list[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: sums

    def gradient(self, name: str) -> Tensor:
        grad = self.grads.pop(name)
        return grad.to(self.whole[name].dtype).transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: ModuleCall, staged: StagedAttention):
        if call.replay is not None:
            out, lses = call.replay.pop(0)
        else:
            source = _Heads(q, k, v)
            lses, _ = staged.forward(source, q, False)
            out = source.whole["out"]
            if call.keeping:
                call.kept.append((out, lses))
        ctx.staged = staged
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, *lses = ctx.saved_tensors
        source = _Heads(q, k, v)
        source.whole |= {"out": out, "dout": dout}
        sinks = ctx.staged.sinks
        dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=lses[0].dtype, device=sinks.device)
        replace(ctx.staged, dsinks=dsinks).backward(source, q, lses, [])
        grads = (source.gradient(name) for name in "qkv")
        return *grads, None if dsinks is None or sinks is None else dsinks.to(sinks.dtype), None, None


class _Scan(torch.autograd.Function):
    """Backward scans again, a stage of heads at a time, so that the graph of one is there at once."""

    @staticmethod
    def forward(ctx, call: ModuleCall, work: HeadScan, *tensors: Tensor):
        if call.replay is not None:
            out, _ = call.replay.pop(0)
        else:
            out, _ = work.forward(dict(zip(work.names, tensors, strict=True)))
            if call.keeping:
                call.kept.append((out, []))
        ctx.work = work
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        work: HeadScan = ctx.work
        grads, _ = work.backward(dict(zip(work.names, ctx.saved_tensors, strict=True)), dout)
        return None, None, *(grads[name] for name in work.names)


class ModuleLayer(torch.autograd.Function):
    """Inputs that need a gradient, then the layer's parameters."""

    @staticmethod
    def forward(ctx, call: ModuleCall, inputs: _Inputs, *tensors: Tensor):
        call.keeping = call.recompute == "keep_attention"
        flat, spec = tree_flatten(inputs.call(call, inputs.stored(tensors)))
        call.keeping = False
        ctx.mark_non_differentiable(*(t for t in flat if isinstance(t, Tensor) and not t.is_floating_point()))
        kept = [t for out, lses in call.kept for t in (out, *lses)]
        ctx.shape, ctx.made = [len(lses) for _, lses in call.kept], call.made
        if call.blank is None:  # they go to the store, and only their number stays
            kept += [t for made in call.made for t in made or ()]
            ctx.made = [None if made is None else len(made) for made in call.made]
        kept = [*inputs.stored(tensors), *kept]
        call.reserve(sum(t.nbytes for t in kept))
        ctx.handle, ctx.call, ctx.inputs, call.stored = call.store.put(kept), call, inputs, True
        call.kept, call.made = [], []
        inputs.outputs = spec
        return tuple(flat)

    @staticmethod
    @holds("residual")
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        call, inputs = ctx.call, ctx.inputs
        tensors = list(call.store.take(ctx.handle))
        kept = tensors[inputs.count :]
        leaves = [
            t.detach().requires_grad_(needs) for t, needs in zip(tensors[: inputs.count], inputs.needs, strict=True)
        ]
        if call.recompute == "keep_attention":
            call.replay = [(kept.pop(0), [kept.pop(0) for _ in range(count)]) for count in ctx.shape]
            call.remade = ctx.made
            if call.blank is None:
                call.remade = [None if n is None else [kept.pop(0) for _ in range(n)] for n in ctx.made]
        with torch.enable_grad():
            flat, _ = tree_flatten(inputs.call(call, leaves))
        assert not call.replay and not call.remade, "the layer did less than in its forward"
        pairs = [
            (t, g)
            for t, g in zip(flat, grads, strict=True)
            if isinstance(t, Tensor) and t.requires_grad and g is not None
        ]
        parameters = call.trainable()
        derivatives = differentiate([t for t, _ in pairs], [g for _, g in pairs], [*leaves, *parameters])
        call.replay = ctx.handle = None
        return None, None, *derivatives


class _Inputs:
    """The arguments of a layer, taken apart: `count` tensors that wait in the store, and the rest, which stays where it is.

    A layer may leave keys and values for later ones in a mapping that it is given (Gemma 4). Such a mapping is copied for
    each call; what a call has written is one more output, for gradients come back to it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.maps = {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}
        self.flat, self.spec = tree_flatten((args, kwargs | {name: dict(given) for name, given in self.maps.items()}))
        first = next(i for i, t in enumerate(self.flat) if isinstance(t, Tensor) and t.is_floating_point())
        self.places = [i for i, t in enumerate(self.flat) if isinstance(t, Tensor) and (t.requires_grad or i == first)]
        self.needs = [self.flat[i].requires_grad for i in self.places]
        self.count = len(self.places)
        self.outputs: Any = None

    def handed_over(self) -> list[Tensor]:
        """The tensors, which from now on are not held here: backward gets them from the store."""
        tensors = [self.flat[i] for i in self.places]
        for i in self.places:
            self.flat[i] = None
        return tensors

    def stored(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return [t.detach() for t in tensors[: self.count]]

    def call(self, call: ModuleCall, tensors: list[Tensor]) -> tuple[Any, dict[str, dict[Any, Any]]]:
        """-> what the layer returns, what it wrote into each mapping"""
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        given = {name: type(own)(kwargs[name]) for name, own in self.maps.items()}  # pyright: ignore[reportCallIssue]
        result = call.run(args, kwargs | given)
        wrote = {
            name: {key: value for key, value in now.items() if value is not kwargs[name].get(key)}
            for name, now in given.items()
        }
        return result, wrote

    def take(self, flat: tuple[Any, ...]) -> Any:
        result, wrote = tree_unflatten(list(flat), self.outputs)
        for name, entries in wrote.items():
            self.maps[name].update(entries)
        return result


def run_module_layer(call: ModuleCall, args: Any, kwargs: Any) -> Any:
    """The layer's own outputs."""
    if call.recompute == "none" or not torch.is_grad_enabled():
        return call.run(args, kwargs)
    inputs = _Inputs(args, kwargs)
    parameters = call.trainable()
    call.learn = bool(parameters) or any(inputs.needs)
    if not call.learn:
        return call.run(args, kwargs)
    return inputs.take(ModuleLayer.apply(call, inputs, *inputs.handed_over(), *parameters))  # pyright: ignore[reportArgumentType]


class TiledModule(torch.autograd.Function):
    """A part that treats tokens alike, a tile of tokens at a time; backward computes a tile again. Of a part that returns several
    things the first is what goes on; others, such as the scores of a router, are there to be looked at."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable[[Tensor], Any], tile: int, *parameters: Tensor):
        ctx.forward, ctx.tile, ctx.parameters = forward, tile, parameters
        ctx.save_for_backward(x)
        call = running_call()
        made = None if call is None else call.made_before(x.device)
        if made is None:
            results = [forward(x[:, part].contiguous()) for part in tiles(x.shape[1], tile)]
            several = [(result,) if isinstance(result, Tensor) else result for result in results]
            first, *others = zip(*several, strict=True)
            rest = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in others]
            made = [torch.cat(first, 1), *rest]
            if call is not None and call.keeping:
                call.keep_made(made)
        ctx.mark_non_differentiable(*(t for t in made[1:] if isinstance(t, Tensor)))
        return made[0] if len(made) == 1 else tuple(made)

    @staticmethod
    def backward(ctx, dy: Tensor, *_: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        dx, sums = torch.empty_like(x), Gradients()
        for part in tiles(x.shape[1], ctx.tile):
            with torch.enable_grad():
                leaf = x[:, part].detach().contiguous().requires_grad_()
                value = ctx.forward(leaf)
            value = value if isinstance(value, Tensor) else value[0]
            derivatives = differentiate([value], [dy[:, part]], [leaf, *ctx.parameters])
            dx[:, part] = 0.0 if derivatives[0] is None else derivatives[0]
            sums.add(ctx.parameters, derivatives[1:])
            del derivatives  # or those of all experts are there a third time while the next tile's are made
        return dx, None, None, *(sums.take(p) for p in ctx.parameters)


def run_tiled(module: nn.Module, forward: Callable[..., Any], tile: int | None, args: Any, kwargs: Any) -> Any:
    """A part of a layer by tiles, where it was called with tokens and nothing else."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if tile is None or not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] <= tile:
        return forward(*args, **kwargs)
    return TiledModule.apply(x, forward, tile, *(p for p in module.parameters() if p.requires_grad))


def _fold(t: Tensor, ranks: int) -> Tensor:
    """[B·R, H, s, D] -> [B, H, R·s, D]: rows that stand for ranks become one sequence."""
    if ranks == 1:
        return t
    rows, heads, tokens, size = t.shape
    return t.view(rows // ranks, ranks, heads, tokens, size).transpose(1, 2).reshape(-1, heads, ranks * tokens, size)


def _as_sequence(t: Tensor, ranks: int) -> Tensor:
    """[B·R, s, ...] -> [B, R·s, ...]"""
    return t if ranks == 1 else t.reshape(t.shape[0] // ranks, ranks * t.shape[1], *t.shape[2:])


def _unfold(t: Tensor, ranks: int) -> Tensor:
    """[B, R·s, H, D] -> [B·R, s, H, D]"""
    return t if ranks == 1 else t.reshape(t.shape[0] * ranks, t.shape[1] // ranks, *t.shape[2:])
