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

from ...base.holding import CALLER, module_holds
from .families import FAMILIES
from .guard import unpatched
from .token_kernels import AddedNorm, TokenKernels
from .tokenwise import HOOKS

module_holds(__name__, CALLER)
WIDEST = 16384  # numbers that a program of add_and_norm holds
_NAMES = {f"{family.name}RMSNorm" for family in FAMILIES.values() if family.plain_norms}


def apply_norm(module: nn.Module, x: Tensor, kernels: TokenKernels) -> Tensor:
    if not kernels.fuses_norm(x) or not _plain(module, x):
        return module(x)
    norm: Any = module
    return kernels.norm(x, norm.weight, norm.variance_epsilon)


def add_and_norm(
    module: nn.Module, x: Tensor, update: Tensor | None, kernels: TokenKernels
) -> tuple[Tensor, Tensor] | None:
    """x + update and its norm from one kernel, whose backward is one as well; None where that cannot be."""
    alike = update is None or (update.dtype, update.shape) == (x.dtype, x.shape)
    if not alike or not kernels.fuses(x) or not _plain(module, x) or x.shape[-1] > WIDEST:
        return None
    norm: Any = module
    return AddedNorm.apply(x, update, norm.weight, norm.variance_epsilon, kernels)  # pyright: ignore[reportReturnType]


def epsilon_of(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def plain_norms(model: nn.Module) -> tuple[str, ...]:
    """Classes of a model's norms that are weight · x / rms(x), by what they answer. The model has numbers, float32 or wider."""
    kinds: dict[str, bool] = {}
    for module in model.modules():
        name, weight = type(module).__name__, getattr(module, "weight", None)
        if not name.endswith("RMSNorm"):
            continue
        known = isinstance(weight, Tensor) and weight.dim() == 1
        kinds[name] = kinds.get(name, True) and known and _is_plain(module)
    return tuple(sorted(name for name, plain in kinds.items() if plain))


def _is_plain(module: Any) -> bool:
    x = 3.0 * torch.randn(2, 7, module.weight.shape[0], dtype=module.weight.dtype)
    try:
        with torch.no_grad():
            own, ours = module(x), F.rms_norm(x, module.weight.shape, module.weight, epsilon_of(module))
    except Exception:  # a norm of its own kind
        return False
    return own.shape == ours.shape and torch.allclose(own, ours.to(own.dtype), rtol=1e-5, atol=1e-6)


def _plain(module: nn.Module, x: Tensor) -> bool:
    kind = type(module)
    known = kind.__name__ in _NAMES and kind.__module__.startswith("transformers.models.")
    changed = (
        "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS) or not unpatched(kind, kind.forward)
    )
    return known and not changed and module.weight.dtype == x.dtype  # pyright: ignore[reportAttributeAccessIssue]
