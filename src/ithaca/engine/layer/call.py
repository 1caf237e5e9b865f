"""What a layer is called with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.stages import Source, StagedAttention
from ..limits import PROJECTION_TILES
from ..model.adapter import Layer
from ..model.rope import Positions
from ..offload.store import Store
from ..tiling import Gradients


@dataclass
class LayerCall:
    """What a layer needs besides its input: made by the run for each batch."""

    layer: Layer
    attention: StagedAttention
    positions: Positions
    tile: int | None
    recompute: str
    store: Store  # where this layer's activations wait for backward
    run_store: Store  # of the run: for what this layer alone needs, and where most layers below it keep theirs
    engine: str = "composed"
    hold: bool | None = None  # what the layer reads more than once stays on the device; None = by its size
    count_routing: bool = False  # return the sums that the router's balance loss is made of
    valid: Tensor | None = None  # [B, s], False on padding
    learn: bool = True
    stored: bool = False  # forward put something into the store

    @property
    def projection_tile(self) -> int | None:
        return None if self.tile is None else self.tile * PROJECTION_TILES

    def attend(self, source: Source, like: Tensor, keep: bool) -> tuple[list[Tensor], list]:
        """attention.forward, with the layer's sinks where it has them."""
        return self._attention().forward(source, like, keep)

    def attend_backward(
        self, source: Source, like: Tensor, lses: list[Tensor], kept: list, gradients: Gradients
    ) -> None:
        """attention.backward; the gradient of the sinks goes to `gradients`."""
        sinks = self.layer.sinks
        if sinks is None or not sinks.requires_grad:
            return self._attention().backward(source, like, lses, kept)
        wide = torch.promote_types(sinks.dtype, torch.float32)
        dsinks = torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        replace(self._attention(), dsinks=dsinks).backward(source, like, lses, kept)
        gradients.add([sinks], [dsinks])

    def _attention(self) -> StagedAttention:
        sinks = self.layer.sinks
        return self.attention if sinks is None else replace(self.attention, sinks=sinks.detach())

    def trainable(self) -> list[Tensor]:
        return self.layer.parameters()
