"""One optimizer step: micro-batches, gradient, its norm, the update. Nothing is updated by a number that is not finite.

The update itself can still make a weight that is not: with a learning rate that is too large, say. That is found when it is to be
saved (storage/finite.py), or by the loss of the next step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import faults
from ..base.exits import NOT_FINITE, Failed
from ..base.files import write_atomically
from ..base.holding import module_holds
from ..config.schema import Train
from ..engine.batch import Batch
from ..engine.criterion import Criterion, Supervised
from ..engine.mesh import local_part
from ..engine.optimizer import backward, gradients, learning_rate, norm_of, set_learning_rate, update
from ..engine.run import Run
from ..storage.finite import not_finite

log = logging.getLogger("ithaca")
module_holds(__name__, "gradients")


class NotFinite(Failed):
    """A loss or gradient is NaN or infinite; this step touched no weight.

    ranks: whose part of the loss it was; none if only gradients are not finite."""

    def __init__(self, text: str, step: int, samples: range, ranks: tuple[int, ...]) -> None:
        super().__init__(NOT_FINITE, text)
        self.step, self.samples, self.ranks = step, samples, ranks

    def write(self, path: Path, documents: Callable[[int], Iterable[int]], first: bool, saved: str) -> None:
        """What was trained on: rank 0 writes it down, all say where. documents: their lengths in a row. saved: what is on disk, and
        how to go on."""
        self.args = (f"{self} (documents of these rows: {path}). {saved}",)
        if not first:
            return
        rows = [{"row": row, "documents": list(documents(row))} for row in self.samples]
        about = {"step": self.step, "ranks": list(self.ranks), "rows": rows, "cause": str(self)}
        try:
            write_atomically(path, json.dumps(about, indent=1) + "\n")
        except OSError as error:  # a run that has failed does not fail again for it
            log.warning("%s could not be written (%s)", path, error.strerror)


@dataclass(frozen=True)
class Stepped:
    loss: float  # of the step: cross-entropy, the mean over all its supervised tokens
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # real tokens of the step, over all ranks
    supervised: int
    numbers: dict[str, float] = field(default_factory=dict)  # what else the criterion has to say


def train_step(
    run: Run, optimizer: torch.optim.Optimizer, batches: list[Batch], train: Train, step: int, samples: range,
    criterion: Criterion | None = None,
) -> Stepped:  # fmt: skip
    """The step after `step` finished ones, on the rows `samples` in `batches`, one micro-batch after the other. criterion: what is
    learned; None = cross-entropy."""
    criterion = criterion or Supervised(train.label_smoothing, train.z_loss)
    total = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    sound = torch.ones((), dtype=torch.bool, device=run.mesh.device)  # this rank's parts of the loss
    for loss, finite in criterion.losses(run, batches):
        backward(loss, optimizer)
        total += loss.detach()
        sound &= finite
    grads = gradients(run.model)
    norm = norm_of(grads, optimizer)
    value, size = torch.stack((total, norm.to(total))).tolist()  # the one place where the CPU waits for the GPU
    if not (_finite(value) and _finite(size)):
        _refuse(run, grads, value, size, sound, step, samples)
    faults.reach("optim")
    rate = learning_rate(train, step)
    set_learning_rate(optimizer, rate)
    update(optimizer, grads, norm, train.clip)
    tokens, supervised = (sum(getattr(batch, name) for batch in batches) for name in ("tokens", "supervised"))
    return Stepped(value, size, rate, tokens, supervised, criterion.numbers())


def _finite(number: float) -> bool:
    return number - number == 0.0


def _refuse(run: Run, grads: list[Tensor], loss: float, norm: float, sound: Tensor, step: int, samples: range) -> None:
    """Every rank comes here: loss and norm are the same on all of them."""
    local = [local_part(g) for g in grads]
    weights = not_finite(dict(run.model.named_parameters()))
    bad = torch.tensor(
        [sum(int((~g.isfinite()).sum()) for g in local), int(not sound), len(weights)], device=run.mesh.device
    )
    gathered = [torch.zeros_like(bad) for _ in range(run.mesh.world.size)]
    if run.mesh.world.size > 1:
        dist.all_gather(gathered, bad)
    else:
        gathered = [bad]
    counts, origin, broken = ([int(tensor[i]) for tensor in gathered] for i in range(3))
    of_loss = tuple(rank for rank, guilty in enumerate(origin) if guilty)
    ranks = tuple(rank for rank, count in enumerate(counts) if count)
    named = [name for name, p in run.model.named_parameters() if p.grad is not None and _has_bad(p.grad)]
    where = f" (of {_ranks(of_loss)})" if of_loss and run.mesh.world.size > 1 else ""
    bad_gradients = f"; {sum(counts):,} gradients on {_ranks(ranks)}" if ranks else ""
    bad_gradients += f", first in {named[0]}" if named else ""
    state = "The weights were not touched; look at these rows"
    if any(broken):
        first = f", first in {weights[0]}" if weights else ""
        on = _ranks(tuple(rank for rank, count in enumerate(broken) if count))
        state = f"The weights were not finite before this step (on {on}{first}): by an earlier update, or as they were loaded"
    raise NotFinite(
        f"step {step + 1}: loss {loss}{where}, gradient norm {norm}{bad_gradients}. Rows {samples.start} to "
        f"{samples.stop - 1} of the data. {state}",
        step + 1,
        samples,
        of_loss,
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _has_bad(grad: Tensor) -> bool:
    return not bool(local_part(grad).isfinite().all())
