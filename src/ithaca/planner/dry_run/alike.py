"""Layers that a dry run leaves out because they hold what their neighbours hold: 4 of 32 are run, the others are added up.

A block is neighbours that are asked for the same: all layers of most runs, two or three blocks where recompute or store differ from
layer to layer. Of each block the first and the last two run; those left out lie between. All the time they have weights and
optimizer states. Once forward has passed them, they have kept what the second layer of their block kept; once backward has, they
have gradients instead. What a layer keeps is not computed here but seen: as the difference between the ends of the first and the
second layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.job import Job
from ...engine.limits import IN_FLIGHT
from ...engine.mesh import local_part
from ...engine.offload.cost import pinned
from ...engine.run import Run
from ...stack import Stack
from .store import DryStore
from .tracker import LiveBytes

RUN = 4  # layers of a block: the first and the last two, as the walk of memory.py


@dataclass(frozen=True)
class Gap:
    """`count` layers that do not run, above the layer that runs as number `after`."""

    after: int
    count: int


def chosen(layers: int, stack: Stack, layer_input: int) -> tuple[list[int], list[Gap]]:
    """-> layers that run, and the gaps between them. layer_input: bytes of a layer's input on this rank.

    Layers are not alike where what a few of them put into a store is still on its way out when the last one begins: then more
    layers have more on its way. Such runs are short, and are run whole.
    """
    run: list[int] = []
    gaps: list[Gap] = []
    for (_, store), block in groupby(range(layers), lambda i: (stack.recompute_of(i), stack.store_of(i))):
        block = list(block)
        if len(block) > RUN and (store == "gpu" or RUN * layer_input >= 2 * IN_FLIGHT):
            gaps.append(Gap(len(run) + RUN // 2 - 1, len(block) - RUN))
            block = block[: RUN // 2] + block[-RUN // 2 :]
        run += block
    return run, gaps


def state_bytes(shard: Tensor, optimizer_bytes: float) -> int:
    """Of AdamW's two averages, which are of the weights' type, or smaller."""
    return int(shard.numel() * min(optimizer_bytes, 2 * shard.element_size()))


def held_by(layer: nn.Module, optimizer_bytes: float) -> dict[str, int]:
    """Bytes that this rank has of a layer all the time, and from backward on, by category."""
    shards = [(local_part(parameter), parameter.requires_grad) for parameter in layer.parameters()]
    return {
        "parameters": sum(shard.nbytes for shard, _ in shards),
        "optimizer": sum(state_bytes(shard, optimizer_bytes) for shard, learns in shards if learns),
        "gradients": sum(shard.nbytes for shard, learns in shards if learns),
    }


def on_host(layer: nn.Module, optimizer_bytes: float, accumulation: int) -> int:
    """The same where they wait in host memory: weights and gradients are pinned; with several micro-batches also their sum."""
    shards = [(local_part(parameter), parameter.requires_grad) for parameter in layer.parameters()]
    learned = 3 if accumulation > 1 else 2
    return sum((learned if learns else 1) * pinned(shard.nbytes) for shard, learns in shards) + sum(
        state_bytes(shard, optimizer_bytes) for shard, learns in shards if learns
    )


class LeftOut:
    """Holds fake tensors of the size of what the layers of a gap would hold."""

    def __init__(self, run: Run, tracker: LiveBytes, gap: Gap, optimizer_bytes: float, job: Job) -> None:
        self.run, self.tracker, self.gap = run, tracker, gap
        self.held: dict[str, Tensor] = {}
        self.layer = held_by(run.decoder.layers[0].module, optimizer_bytes)
        self.away = 0  # bytes of its weights, states and gradients that are on the host
        if job.offload:
            self.away = gap.count * on_host(run.decoder.layers[0].module, optimizer_bytes, job.accumulation)
            self.layer = dict.fromkeys(self.layer, 0)
        self.outside = run.stack.store_of(gap.after) != "gpu"  # where its layers keep
        self.ends: list[int] = []  # live bytes, or bytes in the store, at the end of a layer

    def hold(self, category: str, nbytes: int) -> None:
        self.held[category] = torch.empty(nbytes * self.gap.count, dtype=torch.uint8)
        self.tracker.see(self.held[category], category, line=f"of {self.gap.count} layers that are alike")

    @contextmanager
    def counted(self) -> Iterator[None]:
        for category in ("parameters", "optimizer"):
            self.hold(category, self.layer[category])
        around = self.run.decoder.layers[self.gap.after - 1 : self.gap.after + 1]
        hooks = [layer.module.register_forward_hook(self._passed) for layer in around]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _passed(self, module: nn.Module, args: Any, out: Any) -> None:
        store = self.run.store
        # what is on its way out is no part of what a layer keeps
        self.ends.append(store.now if self.outside and isinstance(store, DryStore) else self.tracker.total)
        if len(self.ends) < 2:
            return
        kept = self.ends[1] - self.ends[0]
        self.ends.clear()  # for the next micro-batch
        if self.outside:
            self._outside(kept)
        else:
            self.hold("kept", kept)
        (out[0] if isinstance(out, tuple) else out).register_hook(lambda gradient: self._passed_again(kept))

    def _passed_again(self, kept: int) -> None:
        if self.outside:
            self._outside(-kept)
        self.held.pop("kept", None)
        if "gradients" not in self.held:
            self.hold("gradients", self.layer["gradients"])

    def _outside(self, nbytes: int) -> None:
        assert isinstance(self.run.store, DryStore)
        self.run.store.hold(self.gap.count * nbytes)
