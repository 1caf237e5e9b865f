"""Keys and values of a sequence that many ranks hold together, and attention of one new token to all of them.

Prefill runs the prompt through the layers as training does, sharded and tiled by the same stack. On the way each rank projects
keys and values of its own tokens once more and keeps them: s × K × D × 2 a layer, an eighth of the whole on eight ranks. A new
token is the same on every rank. Its query attends to the keys a rank holds, which gives a part of the answer and the
log-sum-exp of its scores; parts of disjoint sets of keys merge exactly by these (as in ring attention), with one small
all-reduce a layer. The new token's own key and value go to one rank, in turn, so the cache stays balanced.

Rotary frequencies are those of the longest position that will be reached, for all tokens alike. transformers lets `dynamic` and
`longrope` change them on the way and leaves old keys as they are; below the length at which they change there is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.attention.interface import Rule
from ...engine.comm import total
from ...engine.mesh import Group, Mesh
from ...engine.model.adapter import Layer
from ...engine.model.rope import Rope
from ...engine.tiling import tiles

TILE = 4096  # tokens projected at a time
CHUNK = 65536  # keys attended to at a time: they are widened to fp32
MERGE = 64  # new tokens that lie about singly


@dataclass
class KeyCache:
    """What this rank holds of one attention: keys and values [K, n, D] of some tokens, and where those stand, [n, 1]."""

    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    value_dim: int = 0  # told by whoever fills it: a rank may hold nothing

    def attend(
        self, q: Tensor, kv_heads: int, position: int, mesh: Mesh, rule: Rule, scale: float, *,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [H, D] of the token at `position` -> attention over the keys of all ranks, [H, D of values]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(wide).unflatten(0, (kv_heads, -1))  # [K, g, D]
        pieces = [
            tuple(t[..., tile, :] for t in part) for part in self._parts() for tile in tiles(part[0].shape[1], CHUNK)
        ]
        top = queries.new_full((*queries.shape[:2], 1), -1e30)  # a rank may hold no key that is seen
        scores = []
        for keys, _, where in pieces:
            score = queries @ keys.to(wide).transpose(1, 2) * scale  # [K, g, n]
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            score = score.masked_fill(~rule(torch.full_like(where[:, 0], position), where[:, 0]), float("-inf"))
            scores.append(score)
            top = torch.maximum(top, score.amax(-1, keepdim=True))
        sink = None if sinks is None else sinks.to(wide).view(*queries.shape[:2], 1)
        top = _largest(top if sink is None else torch.maximum(top, sink), mesh)
        sums = queries.new_zeros(*queries.shape[:2], self.value_dim + 1)
        for score, (_, values, _) in zip(scores, pieces, strict=True):
            weights = (score - top).exp()
            sums += torch.cat((weights @ values.to(wide), weights.sum(-1, keepdim=True)), -1)
        sums = total(total(sums, mesh.ulysses), mesh.ring)
        whole = sums[..., -1:] if sink is None else sums[..., -1:] + (sink - top).exp()
        return (sums[..., :-1] / whole).flatten(0, 1).to(q.dtype)

    def _parts(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The prompt's, and one of all tokens since: those come one by one, and would be as many products."""
        if len(self.parts) > MERGE:
            keys, values, where = zip(*self.parts[1:], strict=True)
            self.parts[1:] = [(torch.cat(keys, 1), torch.cat(values, 1), torch.cat(where))]
        return self.parts


class LayerCache(KeyCache):
    """Of a layer whose heads are projected here."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(value_dim=layer.projector.head_dim)
        self.layer = layer

    def add(self, x: Tensor, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        """x: layer input [1, t, d] of the tokens to keep, at these positions [t]."""
        pairs = []
        for tile in tiles(x.shape[1], TILE):
            _, k, v = self.heads(x[:, tile], positions[tile], rope, dtype, "kv")
            pairs.append((k, v))
        if pairs and x.shape[1]:
            keys, values = (
                torch.cat(tensors, 1)[0].transpose(0, 1).contiguous() for tensors in zip(*pairs, strict=True)
            )
            self.parts.append((keys, values, positions[:, None]))

    def heads(
        self, x: Tensor, positions: Tensor, rope: Rope, dtype: torch.dtype, which: str = "qkv"
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Projected, normed and rotated heads, [1, t, heads, D] each."""
        layer, projector = self.layer, self.layer.projector
        h = layer.normed(x)
        counts = {"q": projector.heads, "k": projector.kv_heads, "v": projector.kv_heads}
        bounds = {name: projector.bind(name, range(counts[name])) for name in which}
        where = positions[None]
        made = layer.project(bounds, h, where, lambda: rope.cos_sin(where, dtype, x.device))
        return made.get("q"), made["k"], made["v"]

    def answer(self, q: Tensor, position: int, mesh: Mesh) -> Tensor:
        """q [H, D] of the token at `position` -> attention over the keys of all ranks, [1, 1, H·D]."""
        layer = self.layer
        out = self.attend(
            q, layer.projector.kv_heads, position, mesh, Rule(window=layer.window), layer.scale, sinks=layer.sinks
        )
        return out.flatten()[None, None]


def _largest(value: Tensor, mesh: Mesh) -> Tensor:
    for group in (mesh.ulysses, mesh.ring):
        value = _maximum(value, group)
    return value


def _maximum(value: Tensor, group: Group) -> Tensor:
    if group.pg is None:
        return value
    value = value.clone()
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group.pg)
    return value
