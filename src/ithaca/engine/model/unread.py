"""Values that nobody reads.

A tile that was not kept is computed again in backward for its derivative alone. On what its last products make, the layer's output
and the heads that were attended, no derivative depends, so they are not multiplied again: a third of what an MLP would be computed
again for. In their place stands what is not a number, of the right shape and in no memory: whoever did read it would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.holding import CALLER, module_holds

module_holds(__name__, CALLER)


def nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_full((), math.nan).expand(shape)


class UnreadSum(torch.autograd.Function):
    """x + update"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor) -> Tensor:
        return nothing(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, grad
