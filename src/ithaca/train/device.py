"""Where a run computes."""

from __future__ import annotations

import warnings

import torch

from ..config.schema import Config


def device_of(config: Config) -> torch.device:
    if config.launch.cpu is not None or not torch.cuda.is_available():
        # On a CPU without bf16 instructions torch multiplies bf16 in plain code: slower, with the same results. It says so with a
        # C++ stack of twenty lines, at the first product.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
