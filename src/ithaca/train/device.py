"""Where a run computes."""

from __future__ import annotations

import torch

from ..config.schema import Config


def device_of(config: Config) -> torch.device:
    if config.launch.cpu is not None or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
