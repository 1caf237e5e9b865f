"""RMSNorm in one kernel.

Hugging Face writes it as eight elementwise kernels in float32, a tenth of a short step's time. torch's own `rms_norm` is one
forward and two backward, and rounds once where the module rounds the normed value and then the product: nearer to float32,
never further. Only modules whose formula is known are replaced, by a call with their own weight; any other (Gemma's
1 + weight, a wrapper, a module with hooks) is called as it is, and so is every norm outside of half precision on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import FAMILIES
from .guard import unpatched
from .tokenwise import HOOKS

_NAMES = {f"{family.name}RMSNorm" for family in FAMILIES.values() if family.plain_norms}


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    if not fuses(x) or not _plain(module, x):
        return module(x)
    norm: Any = module
    return fused(x, norm.weight, norm.variance_epsilon)


def fuses(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def fused(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _plain(module: nn.Module, x: Tensor) -> bool:
    kind = type(module)
    known = kind.__name__ in _NAMES and kind.__module__.startswith("transformers.models.")
    changed = (
        "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS) or not unpatched(kind, kind.forward)
    )
    return known and not changed and module.weight.dtype == x.dtype  # pyright: ignore[reportAttributeAccessIssue]
