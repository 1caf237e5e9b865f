"""A linear mixer, a tile of tokens at a time, where one rank has the whole sequence.

All but its two functions treats tokens alike, so it is tiled as an MLP is: backward computes a tile again. The functions go on from
what they have left after the tile before, a convolution its last tokens and a scan its state, and backward hands the gradients of
that to the tile before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...base.holding import module_holds
from ..attention import scan as scans
from ..attention.scan import CHUNK, Call, Tensors
from ..tiling import Gradients, differentiate, tiles
from .mixer import HeadScan, Spread, along_lines, scan_of, token_by_token
from .module import ModuleCall, running_call

module_holds(__name__, "tile")


@dataclass
class Tile:
    """Some tokens of a mixer: what its functions left after the tokens before, in the order of their calls, and what they leave."""

    spread: Spread
    came: list[Tensor]  # nothing: it is the first
    left: list[Tensor] = field(default_factory=list)

    def convolve(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
    ) -> Tensor:
        """As mixer.convolve."""
        kernel = token_by_token(self.spread, function, x, weight, bias, activation)
        tokens, x = weight.shape[1] - 1, x.mT
        came = self._came()
        come = torch.zeros_like(x[:, :1]).expand(-1, tokens, -1) if came is None else came
        line = torch.cat((come, x), 1)
        self.left.append(line[:, line.shape[1] - tokens :])
        documents = self.spread.documents
        if all(len(row) == 1 and (row[0][0] <= -tokens or came is None) for row in documents):
            return kernel(line)[:, tokens:].mT
        return along_lines(kernel, come, x, self.spread.lines(tokens, list(range(-tokens, 0)), x.device)).mT

    def scan(self, call: Call, tensors: Tensors, repeats: int | None) -> Tensor:
        came = self._came()
        _, tokens, heads = tensors[call.scan.out].shape[:3]
        if (self.spread.heads_per_stage or heads) >= heads and tokens <= call.scan.segment:
            # in the graph of the tile: to scan again in backward would take as much
            call = replace(call, function=self.spread.kernels.scan(call, tensors))
            shared = [name for name in call.scan.shared if tensors[name].shape[2] < heads]
            each = {name: tensors[name].repeat_interleave(heads // tensors[name].shape[2], 2) for name in shared}
            out, left = scans.forward(call, tensors | each, self.spread.spans(), came)
        else:
            work, tensors = scan_of(self.spread, call, tensors, repeats)
            out, left = _TileScan.apply(work, came, *tensors.values())  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(left, Tensor)
        self.left.append(left)
        return out

    def _came(self) -> Tensor | None:
        """To the function that is called next."""
        return self.came[len(self.left)] if self.came else None


class _TileScan(torch.autograd.Function):
    """One scan of a tile; backward scans again, a stage of heads at a time."""

    @staticmethod
    def forward(ctx, work: HeadScan, came: Tensor | None, *tensors: Tensor):
        out, left = work.forward(dict(zip(work.names, tensors, strict=True)), came)
        assert left is not None
        ctx.work, ctx.came = work, came
        ctx.save_for_backward(*tensors)
        return out, left

    @staticmethod
    def backward(ctx, dout: Tensor, dleft: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        work: HeadScan = ctx.work
        tensors = dict(zip(work.names, ctx.saved_tensors, strict=True))
        grads, dcame = work.backward(tensors, dout, ctx.came, dleft)
        return None, dcame, *(grads[name] for name in work.names)


class TiledMixer(torch.autograd.Function):
    """A mixer, a tile of tokens at a time, from what the tile before has left (mixer.py); backward computes a tile again."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable[[Tensor], Tensor], call: ModuleCall, tile: int, *parameters: Tensor):
        parts = tiles(x.shape[1], tile)
        if call.replay is not None:
            out, left = call.replay.pop(0)
        else:
            values, came, left = [], [], []
            for part in parts:
                now = Tile(call.spread().tile(part), came)
                with call.running(now):
                    values.append(forward(x[:, part].contiguous()))
                came = [t.clone() for t in now.left]  # of a view, or the whole tile would stay
                left += came if part is not parts[-1] else []
            out = torch.cat(values, 1)
            if call.keeping:
                call.kept.append((out, left))
        ctx.forward, ctx.call, ctx.parts, ctx.parameters = forward, call, parts, parameters
        ctx.save_for_backward(x, *left)
        return out

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, *left), call, parts = ctx.saved_tensors, ctx.call, ctx.parts
        calls = len(left) // (len(parts) - 1)  # of convolutions and scans, each of which left something
        dx, sums, dleft = torch.empty_like(x), Gradients(), []
        for index, part in reversed(list(enumerate(parts))):
            came = [t.detach().requires_grad_() for t in left[(index - 1) * calls : index * calls]] if index else []
            now = Tile(call.spread().tile(part), came)
            with torch.enable_grad(), call.running(now):
                leaf = x[:, part].detach().contiguous().requires_grad_()
                value = ctx.forward(leaf)
            outputs = [value, *(now.left if dleft else [])]
            found = differentiate(outputs, [dy[:, part], *dleft], [leaf, *came, *ctx.parameters])
            dx[:, part] = 0.0 if found[0] is None else found[0]
            dleft = [
                torch.zeros_like(t) if d is None else d for t, d in zip(came, found[1 : 1 + len(came)], strict=True)
            ]
            sums.add(ctx.parameters, found[1 + len(came) :])
            del found
        return dx, None, None, None, *(sums.take(p) for p in ctx.parameters)


def mixer_tile(module: nn.Module, tile: int | None) -> int | None:
    """In whole chunks of its scan."""
    chunk: int = getattr(module, "chunk_size", CHUNK)  # pyright: ignore[reportAssignmentType]
    return None if tile is None else -(-tile // chunk) * chunk


def run_mixer(module: nn.Module, forward: Callable[..., Any], tile: int | None, args: Any, kwargs: Any) -> Any:
    """A linear mixer, by tiles where this rank has the whole sequence and it was called with tokens and no other tensor."""
    call, given = running_call(), {**dict(zip(("hidden_states",), args, strict=False)), **kwargs}
    x = given.pop("hidden_states", None)
    tile = mixer_tile(module, tile)
    if (
        call is None or tile is None or not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] <= tile or len(args) > 1
        or call.fold > 1 or call.spread().group.size > 1 or any(isinstance(t, Tensor) for t in tree_flatten(given)[0])
    ):  # fmt: skip
        return forward(*args, **kwargs)

    def of(t: Tensor) -> Tensor:
        return forward(t, **given)

    return TiledMixer.apply(x, of, call, tile, *(p for p in module.parameters() if p.requires_grad))
