"""Muon (Jordan et al. 2024) on sharded matrices, and AdamW on the rest.

The momentum of a matrix's gradient is made orthogonal, as far as five steps of a Newton-Schulz iteration do: every direction of
the update then has about the same length. That needs the whole matrix, so its shards are gathered once, every rank iterates on
the same numbers, and each keeps its own rows: the update does not depend on the layout. What ranks could share out they all
compute, which by arithmetic takes an H100 about a second a step for 8B weights: nothing beside a million tokens, much beside 10K.

torch.optim.Muon takes DTensors too, but gathers in every product of the iteration (11 to 15 collectives for a matrix), and iterates
in bfloat16 whatever the model computes in, so that layouts differ by 2 to 4% of an update (docs/decisions/0036-muon.md).

Updates are scaled by 0.2·sqrt(max(rows, columns)), so that lr and decay are those of AdamW (Liu et al. 2025). Embedding, head,
norms and biases have AdamW. Stacked matrices (experts) have no rule here and are refused.

Memory: 4 bytes of momentum for a weight of a matrix, 8 for the others; and, one matrix at a time, five of its size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .limits import NEWTON_SCHULZ
from .mesh import whole_tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at 0, near 1 at 1
LEAST_NORM = 1e-7


def is_matrix(name: str, parameter: nn.Parameter, others: set[nn.Parameter]) -> bool:
    """Whether Muon has it. others: those of embeddings and head. ValueError where it should and cannot."""
    if parameter in others or parameter.dim() < 2:
        return False
    if parameter.dim() > 2:
        raise ValueError(
            f"train.optimizer: muon has no rule for {name}, which is {parameter.dim()} dimensions deep (stacked matrices such as "
            "experts); use adamw"
        )
    return True


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The matrices that are neither looked up in nor made into logits."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    others = {parameter for module in (*modules, head) for parameter in module.parameters()}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [parameter for name, parameter in named if is_matrix(name, parameter, others)]


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `orthogonal: True` have Muon. compute: what the iteration computes in."""

    def __init__(self, groups: list[dict[str, Any]], *, compute: torch.dtype, **settings: Any) -> None:
        super().__init__([{"orthogonal": False, **group} for group in groups], **settings)
        self.compute = compute

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = self.param_groups
        for group in every:
            if group["orthogonal"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        try:
            self.param_groups = [group for group in every if not group["orthogonal"]]
            return super().step(closure)
        finally:
            self.param_groups = every

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grad)
        momentum = state["momentum"].lerp_(grad, 1 - MOMENTUM)
        update = grad.lerp(momentum, MOMENTUM).to(self.compute)  # Nesterov's
        if isinstance(update, DTensor):
            whole = orthogonal(whole_tensor(update))
            update = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
        else:
            update = orthogonal(update)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values near 1 (0.7 to 1.2), by products alone."""
    a, b, c = COEFFICIENTS
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT.contiguous() if matrix.size(0) > matrix.size(1) else wide
