"""One optimizer step: micro-batches, gradient, its norm, the update. Nothing is updated by a number that is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..batch import Batch
from ..config.schema import Train
from ..launch.exits import NOT_FINITE
from ..run import Run
from .ends import Failed
from .optim import clip, global_norm, gradients, learning_rate, set_learning_rate


class NotFinite(Failed):
    """A loss or gradient is NaN or infinite; the weights were not touched."""


@dataclass(frozen=True)
class Stepped:
    loss: float  # mean over all supervised tokens of the step
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # real tokens of the step, over all ranks
    supervised: int


def train_step(
    run: Run, optimizer: torch.optim.Optimizer, batches: list[Batch], train: Train, step: int, samples: range
) -> Stepped:
    """The step after `step` finished ones, on the rows `samples` in `batches`, one micro-batch after the other."""
    supervised = sum(batch.supervised for batch in batches)
    total = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    for batch in batches:
        loss = run.loss(batch, supervised=supervised, label_smoothing=train.label_smoothing, z_loss=train.z_loss)
        loss.backward()
        total += loss.detach()
    grads = gradients(run.model)
    norm = global_norm(grads)
    value, size = torch.stack((total, norm.to(total))).tolist()  # the one place where the CPU waits for the GPU
    if not (_finite(value) and _finite(size)):
        _refuse(run, grads, value, size, step, samples)
    clip(grads, norm, train.clip)
    rate = learning_rate(train, step)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Stepped(value, size, rate, sum(batch.tokens for batch in batches), supervised)


def _finite(number: float) -> bool:
    return number - number == 0.0


def _refuse(run: Run, grads: list[Tensor], loss: float, norm: float, step: int, samples: range) -> None:
    """Every rank comes here: loss and norm are the same on all of them."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    bad = torch.tensor(sum(int((~g.isfinite()).sum()) for g in local), device=run.mesh.device)
    counts = [int(bad)]
    if run.mesh.world.size > 1:
        found = [torch.zeros_like(bad) for _ in range(run.mesh.world.size)]
        dist.all_gather(found, bad)
        counts = [int(each) for each in found]
    ranks = [rank for rank, count in enumerate(counts) if count]
    named = [name for name, p in run.model.named_parameters() if p.grad is not None and _has_bad(p.grad)]
    where = (
        f"; {sum(counts):,} gradients on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        if ranks
        else ""
    )
    where += f", first in {named[0]}" if named else ""
    raise NotFinite(
        NOT_FINITE,
        f"step {step + 1}: loss {loss}, gradient norm {norm}{where}. Rows {samples.start} to {samples.stop - 1} of the data. The "
        "weights were not touched: the last checkpoint is good. Look at these rows, or lower train.lr or train.clip",
    )


def _has_bad(grad: Tensor) -> bool:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return not bool(local.isfinite().all())
