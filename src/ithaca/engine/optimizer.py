"""What changes the weights: AdamW (or Muon) on sharded fp32 masters, its learning rate, and the clipping of gradients.

The learning rate is a pure function of the step, not an object with a state of its own: a resumed run needs nothing but its
step, and a longer run is a matter of one number.

The norm that gradients are clipped by is that of the whole gradient: every rank adds up the squares of its shards, one
all-reduce adds those, and every rank scales by the same number. Replicas hold equal gradients, so they count once. Squares are
added in float64, so that neither ranks nor blocks (host_adamw.py) change the number.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..base.holding import module_holds
from ..config.schema import Train, in_steps
from .host_adamw import HostAdamW, total_norm
from .limits import BLOCK
from .mesh import local_part
from .muon import Muon, matrices_of

EIGHT_BIT = "train.optimizer: adamw8bit needs the package torchao (pip install torchao); or use adamw"
module_holds(__name__, "gradients")
module_holds("torch.optim", "optimizer")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, train: Train, compute: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """compute: what the model computes in, for updates that are more than a sum. device: what updates states that wait on the host
    (train.offload_optimizer)."""
    groups = parameter_groups(model, train.weight_decay)
    settings: dict[str, Any] = dict(lr=train.lr, betas=train.betas, eps=train.eps)
    if train.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(EIGHT_BIT) from None
        return AdamW8bit(groups, **settings)
    if train.optimizer == "muon":
        return _muon(model, groups, compute, settings)
    if train.offload_optimizer:
        return HostAdamW(groups, device=device or torch.device("cpu"), **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _muon(
    model: nn.Module, groups: list[dict[str, Any]], compute: torch.dtype, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    matrices = set(matrices_of(model))
    if not matrices:
        raise ValueError("train.optimizer: muon finds no matrix to train but embedding and head; use adamw")
    split = [
        {**group, "params": [p for p in group["params"] if (p in matrices) == orthogonal], "orthogonal": orthogonal}
        for group in groups
        for orthogonal in (True, False)
    ]
    return Muon([group for group in split if group["params"]], compute=compute, fused=True, **settings)


def warmup_steps(train: Train) -> int:
    return in_steps(train.warmup, spread_over(train))


def spread_over(train: Train) -> int:
    return train.steps if train.schedule_steps is None else train.schedule_steps


def learning_rate(train: Train, step: int) -> float:
    """Of the step after `step` finished ones: up in a line, then from lr to min_lr at the last step. wsd stays at lr until its last
    steps (Hu et al. 2024), of which 1-sqrt was found best (Hägele et al. 2024)."""
    warmup, total = warmup_steps(train), spread_over(train)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule == "constant":
        return train.lr
    if train.schedule == "wsd":
        decay = in_steps(train.decay, total)
        shape, gone = train.decay_shape, (step + 1 - (total - decay)) / max(decay, 1)
    else:
        shape, gone = train.schedule, (step - warmup) / max(total - 1 - warmup, 1)
    gone = min(max(gone, 0.0), 1.0)
    left = {"linear": 1.0 - gone, "1-sqrt": 1.0 - math.sqrt(gone), "cosine": 0.5 * (1.0 + math.cos(math.pi * gone))}
    return train.min_lr + (train.lr - train.min_lr) * left[shape]


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
    # in the blocks of host_adamw.py: torch makes a float64 copy of what it adds up
    blocks = [block for grad in grads for block in local_part(grad).flatten().split(BLOCK)]
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
    return total_norm(norms, grads) if grads else torch.zeros(())


@torch.no_grad()
def clip(grads: list[Tensor], norm: Tensor, most: float | None) -> None:
    """Scale gradients so that their norm is at most `most`. Without asking the GPU for the number."""
    if most is None or not grads:
        return
    scale = _scale(norm, most)
    local = [local_part(grad) for grad in grads]
    torch._foreach_mul_(local, scale.to(local[0].device))


def _scale(norm: Tensor, most: float) -> Tensor:
    return torch.clamp(most / (norm + 1e-6), max=1.0)


def backward(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Gradients of a micro-batch, added to those of the ones before."""
    with optimizer.adding() if isinstance(optimizer, HostAdamW) else nullcontext():
        loss.backward()


def norm_of(grads: list[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Of all gradients on all ranks together, wherever they wait."""
    return optimizer.norm(grads) if isinstance(optimizer, HostAdamW) else global_norm(grads)


def update(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, most: float | None) -> None:
    """By gradients of this norm, clipped to `most`."""
    if isinstance(optimizer, HostAdamW):  # which scales them when they are there
        optimizer.scale = None if most is None else _scale(norm, most)
    else:
        clip(grads, norm, most)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
