"""Layers that a dry run leaves out because they hold what their neighbours hold: 4 of 32 are run, the others are added up.

Those left out lie in the middle, between the second layer that runs and the third. All the time they have weights and optimizer
states. Once forward has passed them, they have kept what the second layer kept; once backward has, they have gradients instead.
What a layer keeps is not computed here but seen: as the difference between the ends of the first and the second layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.store import IN_FLIGHT
from ..run import Run
from ..stack import Stack
from .dry_store import DryStore
from .tracker import LiveBytes

RUN = 4  # layers: the first and the last two, as the walk of memory.py


def left_out(layers: int, stack: Stack, layer_input: int) -> int:
    """How many layers need not run. layer_input: bytes of a layer's input on this rank.

    Where recompute or store differ from layer to layer, they are not alike. Nor are they where what a few layers put into a store
    is still on its way out when the last one begins: then more layers have more on its way. Such runs are short, and are run whole.
    """
    alike = stack.uniform and (stack.far == "gpu" or RUN * layer_input >= 2 * IN_FLIGHT)
    return max(0, layers - RUN) if alike else 0


def local(parameter: Tensor) -> Tensor:
    """This rank's shard."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # pyright: ignore


def state_bytes(shard: Tensor, optimizer_bytes: float) -> int:
    """Of AdamW's two averages, which are of the weights' type, or smaller."""
    return int(shard.numel() * min(optimizer_bytes, 2 * shard.element_size()))


def held_by(layer: nn.Module, optimizer_bytes: float) -> dict[str, int]:
    """Bytes that this rank has of a layer all the time, and from backward on, by category."""
    shards = [(local(each), each.requires_grad) for each in layer.parameters()]
    return {
        "parameters": sum(each.nbytes for each, _ in shards),
        "optimizer": sum(state_bytes(each, optimizer_bytes) for each, learns in shards if learns),
        "gradients": sum(each.nbytes for each, learns in shards if learns),
    }


class LeftOut:
    """Holds fake tensors of the size of what `count` layers would hold."""

    def __init__(self, run: Run, tracker: LiveBytes, count: int, optimizer_bytes: float) -> None:
        self.run, self.tracker, self.count = run, tracker, count
        self.held: dict[str, Tensor] = {}
        self.layer = held_by(run.decoder.layers[0].module, optimizer_bytes)
        self.ends: list[tuple[int, int]] = []  # live bytes, and bytes in the store, at the end of a layer

    def hold(self, category: str, nbytes: int) -> None:
        self.held[category] = torch.empty(nbytes * self.count, dtype=torch.uint8)
        self.tracker.see(self.held[category], category, line=f"of {self.count} layers that are alike")

    @contextmanager
    def counted(self) -> Iterator[None]:
        if not self.count:
            yield
            return
        for category in ("parameters", "optimizer"):
            self.hold(category, self.layer[category])
        hooks = [layer.module.register_forward_hook(self._passed) for layer in self.run.decoder.layers[:2]]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _passed(self, module: nn.Module, args: Any, out: Any) -> None:
        store = self.run.store
        self.ends.append((self.tracker.total, store.now if isinstance(store, DryStore) else 0))
        if len(self.ends) < 2:
            return
        (device, outside), (device_now, outside_now) = self.ends
        if isinstance(store, DryStore):  # what is on its way out is no part of what a layer keeps
            store.hold(self.count * (outside_now - outside))
        else:
            self.hold("kept", device_now - device)
        (out[0] if isinstance(out, tuple) else out).register_hook(self._passed_again)

    def _passed_again(self, gradient: Tensor) -> None:
        if isinstance(self.run.store, DryStore):
            self.run.store.hold(-self.count * (self.ends[1][1] - self.ends[0][1]))
        self.held.pop("kept", None)
        self.hold("gradients", self.layer["gradients"])
