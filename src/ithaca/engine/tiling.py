"""Sequence tiling: per-token work, a tile of tokens at a time.

Norms, projections, MLP and loss treat every token alike, so they can run tile by tile and their intermediates exist for
one tile only; backward computes a tile again and differentiates it at once. Weight gradients of tiles add up in fp32
inside the layer, so FSDP sees one gradient per parameter: one reshard and one reduction per layer, whatever the tile count.
Ranks hold equally many tokens, so their tile counts agree too. (ALST, arXiv 2506.13996.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..base.holding import CALLER, module_holds
from .model.linear import Leaf

module_holds(__name__, CALLER)


def tiles(length: int, tile: int | None) -> list[slice]:
    """The whole sequence in tiles; the last may be short."""
    step = length if tile is None else tile
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class Gradients:
    """Gradients of parameters that are still growing. One contribution is kept as it is; further ones add in fp32."""

    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}

    def add(self, parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                self._add(parameter, grad)

    def add_leaves(self, leaves: Sequence[Leaf], grads: Iterable[Tensor | None]) -> None:
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            if leaf.rows is None:
                self._add(leaf.parameter, grad)
            elif isinstance(leaf.rows, slice):
                self._wide(leaf.parameter)[leaf.rows] += grad
            else:
                self._wide(leaf.parameter).index_add_(0, leaf.rows, grad.to(_wide_dtype(grad)))

    def _add(self, parameter: Tensor, grad: Tensor) -> None:
        if id(parameter) in self.parts:
            self._wide(parameter).add_(grad)
        else:
            self.parts[id(parameter)] = grad

    def grow(self, parameter: Tensor, added: Callable[[Tensor | None], Tensor]) -> None:
        """added: the sum so far -> with one contribution more."""
        self.parts[id(parameter)] = added(self.parts.get(id(parameter)))

    def _wide(self, parameter: Tensor) -> Tensor:
        """The accumulator, made if need be, in fp32 or wider."""
        part = self.parts.get(id(parameter))
        if part is None:
            part = torch.zeros(parameter.shape, dtype=_wide_dtype(parameter), device=parameter.device)
        else:
            part = part.to(_wide_dtype(part))
        self.parts[id(parameter)] = part
        return part

    def take(self, parameter: Tensor) -> Tensor | None:
        part = self.parts.pop(id(parameter), None)
        return None if part is None else part.to(parameter.dtype)


def _wide_dtype(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def differentiate(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients by `inputs`, None for those that need none or took no part (an expert without tokens)."""
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    derivatives: list[Tensor | None] = [None] * len(inputs)
    if wanted:
        values = torch.autograd.grad(outputs, [inputs[i] for i in wanted], grads, allow_unused=True)
        for i, value in zip(wanted, values, strict=True):
            derivatives[i] = value
    return tuple(derivatives)
