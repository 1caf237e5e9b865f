"""What changes the weights: AdamW on sharded fp32 masters, its learning rate, and the clipping of gradients.

The learning rate is a pure function of the step, not an object with a state of its own: a resumed run needs nothing but its
step, and a longer run is a matter of one number.

The norm that gradients are clipped by is that of the whole gradient: every rank adds up the squares of its shards, one
all-reduce adds those, and every rank scales by the same number. Replicas hold equal gradients, so they count once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.holding import module_holds
from ..config.schema import Train

EIGHT_BIT = "train.optimizer: adamw8bit needs the package torchao (pip install torchao); or use adamw"
module_holds(__name__, "gradients")
module_holds("torch.optim", "optimizer")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    groups = parameter_groups(model, train.weight_decay)
    settings: dict[str, Any] = dict(lr=train.lr, betas=train.betas, eps=train.eps)
    if train.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(EIGHT_BIT) from None
        return AdamW8bit(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def warmup_steps(train: Train) -> int:
    return math.ceil(train.warmup * spread_over(train)) if isinstance(train.warmup, float) else train.warmup


def spread_over(train: Train) -> int:
    return train.steps if train.schedule_steps is None else train.schedule_steps


def learning_rate(train: Train, step: int) -> float:
    """Of the step after `step` finished ones: up in a line, then from lr to min_lr at the last step."""
    warmup = warmup_steps(train)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule == "constant":
        return train.lr
    left = 1.0 - (step - warmup) / max(spread_over(train) - 1 - warmup, 1)
    left = min(max(left, 0.0), 1.0)
    if train.schedule == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return train.min_lr + (train.lr - train.min_lr) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao keeps it in a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def global_norm(grads: list[Tensor]) -> Tensor:
    """Of all gradients on all ranks together."""
    total = torch.nn.utils.get_total_norm(grads, error_if_nonfinite=False)
    return total.full_tensor() if isinstance(total, DTensor) else total


@torch.no_grad()
def clip(grads: list[Tensor], norm: Tensor, most: float | None) -> None:
    """Scale gradients so that their norm is at most `most`. Without asking the GPU for the number."""
    if most is None or not grads:
        return
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    torch._foreach_mul_(local, scale.to(local[0].device))
