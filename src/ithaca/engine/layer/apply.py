"""One decoder layer, by the engine that was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import LayerCall
from .composed import ComposedLayer
from .streamed import StreamedLayer


def run_layer(x: Tensor, call: LayerCall) -> tuple[Tensor, ...]:
    """y, or with count_routing (y, probability sums [E], assignment counts [E])."""
    parameters = call.trainable()
    call.learn = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
    engine = StreamedLayer if call.engine == "streamed" else ComposedLayer
    result = engine.apply(x, call, *parameters)
    return result if isinstance(result, tuple) else (result,)  # pyright: ignore[reportReturnType]
