"""RMSNorm in one kernel.

Hugging Face writes it as eight elementwise kernels in float32, a tenth of a short step's time. torch's own `rms_norm` is one
forward and two backward, and rounds once where the module rounds the normed value and then the product: nearer to float32,
never further. Where a module scales by 1 + weight (Gemma, Qwen3-Next), as float32 adds them, the Triton kernel takes that sum:
bf16 would lose most of such a weight. Where it is given a gate (in a linear mixer), the kernel of gated MLPs multiplies by that.
Only modules whose formula is known are replaced; any other (a wrapper, a module with hooks) is called as it is, and so is every
norm outside of half precision on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import CALLER, module_holds
from .families import FAMILIES
from .guard import unpatched
from .token_kernels import AddedNorm, GatedProduct, TokenKernels
from .tokenwise import HOOKS

module_holds(__name__, CALLER)
WIDEST = 16384  # numbers that a program of add_and_norm holds
GATED = "RMSNormGated"  # how the class of a norm ends that is given a gate
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


def known_norms(model: nn.Module) -> dict[str, float]:
    """Classes of a model's norms that are (plus + weight) · x / rms(x), where they are given a gate also · silu(gate), and plus,
    0 or 1, by what they answer. The model has numbers, float32 or wider."""
    kinds: dict[str, set[float]] = {}
    for module in model.modules():
        name, weight = type(module).__name__, getattr(module, "weight", None)
        if not name.endswith(("RMSNorm", GATED)):
            continue
        known = isinstance(weight, Tensor) and weight.dim() == 1
        found = {plus for plus in (0.0, 1.0) if known and _answers(module, plus)}
        kinds[name] = kinds.get(name, found) & found
    return {name: min(found) for name, found in sorted(kinds.items()) if found}


def _answers(module: Any, plus: float) -> bool:
    x, gate = 3.0 * torch.randn(2, 2, 7, module.weight.shape[0], dtype=module.weight.dtype)
    try:
        with torch.no_grad():
            ours = F.rms_norm(x, module.weight.shape, plus + module.weight, epsilon_of(module))
            if type(module).__name__.endswith(GATED):
                own, ours = module(x, gate), F.silu(gate) * ours
            else:
                own = module(x)
    except Exception:  # a norm of its own kind
        return False
    return own.shape == ours.shape and torch.allclose(own, ours.to(own.dtype), rtol=1e-5, atol=1e-6)


def fused_norm(module: Any, given: tuple[Any, ...], plus: float, kernels: TokenKernels) -> Tensor | None:
    """What a module of such a class answers; None where there is no kernel for what it is given."""
    weight, (x, *gates) = module.weight, given
    alike = all(isinstance(t, Tensor) and t.dtype is weight.dtype and t.shape == x.shape for t in given)
    if not alike or len(gates) != type(module).__name__.endswith(GATED) or not kernels.fuses_norm(x):
        return None
    if (plus or gates) and not (kernels.fuses(x) and x.shape[-1] <= WIDEST):
        return None
    if plus:
        normed: Any = AddedNorm.apply(x, None, plus + weight.float(), epsilon_of(module), kernels)[1]  # pyright: ignore
    else:
        normed = kernels.norm(x, weight, epsilon_of(module))
    return GatedProduct.apply(gates[0], normed, kernels) if gates else normed  # pyright: ignore[reportReturnType]


def _plain(module: nn.Module, x: Tensor) -> bool:
    kind = type(module)
    known = kind.__name__ in _NAMES and kind.__module__.startswith("transformers.models.")
    changed = (
        "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS) or not unpatched(kind, kind.forward)
    )
    return known and not changed and module.weight.dtype == x.dtype  # pyright: ignore[reportAttributeAccessIssue]
