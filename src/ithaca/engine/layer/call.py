"""What a layer is called with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention.stages import StagedAttention
from ..limits import PROJECTION_TILES
from ..model.adapter import Layer
from ..model.rope import Positions
from ..offload.store import Store


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

    def trainable(self) -> list[Tensor]:
        return [p for p in self.layer.module.parameters() if p.requires_grad]
