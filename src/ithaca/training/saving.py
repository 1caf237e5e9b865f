"""The checkpoints of a run: begun, published, counted, and what happens if one cannot be written.

A save that fails because of the disk does not end the run: older checkpoints stand, training goes on, and the next one is due at
its time. At the end of a run, or after `checkpoint.failures` in a row, it does. Weights or states that are not finite are not
saved, and end the run at once: whatever came after them would be lost too.

How long one takes is measured, because it decides whether a signal leaves enough time: a scheduler that kills 30 s after its
signal needs the rest of a step and a save to fit into that.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..base.exits import CHECKPOINT, NOT_FINITE, Failed
from ..base.run_folder import RunFolder
from ..config.schema import Config
from ..engine.run import Run
from ..observe.metrics import Metrics
from ..storage import checkpoint as checkpoints
from ..storage.checkpoint import prune
from ..storage.files import gone_error, is_checkpoint
from ..storage.finite import require_finite
from ..storage.keep import mark_best
from ..storage.ranks import on_all_ranks, on_rank0

log = logging.getLogger("ithaca")

_TORCHRUN_GRACE = 30.0  # its --shutdown-timeout


class Saver:
    """newest: the checkpoint that the run goes on from. All that writes is collective."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        run: Run,
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        newest: str | None = None,
    ) -> None:
        self.options, self.steps = config.checkpoint, config.train.steps
        self.folder, self.run, self.optimizer, self.metrics = folder, run, optimizer, metrics
        self.newest = None if newest is None else self._named(newest)  # published, relative to the run folder
        self.seconds: float | None = None  # that the last one took to write
        self.pending: checkpoints.Saving | None = None
        self._copies = checkpoints.HostCopies()
        self._began = 0.0
        self._failed = 0  # saves in a row
        self._best: int | None = None  # step of the best evaluation, whose checkpoint is to be kept
        self._warned = False

    def due(self, step: int) -> bool:
        return self.options.every is not None and step % self.options.every == 0

    def next(self, step: int) -> int:
        every = self.options.every
        return self.steps if every is None else min(self.steps, (step // every + 1) * every)

    def has(self, step: int) -> bool:
        """Whether this step is published."""
        return self.newest == self._named(f"step-{step}")

    def writing(self) -> bool:
        """Whether this rank is."""
        return self.pending is not None and not self.pending.done()

    def wanted(self, step: int) -> bool:
        """Whether this step is the best so far."""
        return step == self._best

    def keep(self, step: int) -> None:
        """The checkpoint of this step is the best so far, and stays; the one before may go once it is published. Collective."""
        self._best = step
        on_rank0(self.run.mesh.world, self._mark)

    def _mark(self) -> None:
        best = self.folder.checkpoints / f"step-{self._best}"
        if self._best is not None and is_checkpoint(best):
            mark_best(best)

    def save(self, step: int, extra: dict[str, Any], *, wait: bool, needed: bool) -> None:
        """wait: published when this returns. needed: or an error; others may fail now and then."""
        self.finish()
        self._began = time.perf_counter()
        later = self.options.asynchronous and not wait
        try:
            self.pending = checkpoints.save(
                self.folder.checkpoints,
                self.run,
                self.optimizer,
                extra,
                step=step,
                asynchronous=later,
                copies=self._copies,
            )
        except checkpoints.NotWritten as error:
            return self._forgive(error, step, needed)
        except checkpoints.NotFiniteValues as error:
            self.metrics.event("save_failed", at_step=step, cause=str(error))
            raise self._lost(f"step {step} was not saved: {error}") from error
        future = self.pending._future
        if future is not None:
            future.add_done_callback(lambda _: self._written())
            return
        self._written()
        self.finish(needed)

    def _written(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def finish(self, needed: bool = False) -> None:
        """Publish what is being written, if anything is; it counts from here on."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        begin = time.perf_counter()
        try:
            path = pending.wait()
        except checkpoints.NotWritten as error:
            return self._forgive(error, pending.step, needed)
        self._failed, self.newest = 0, self._named(path.name)
        on_rank0(self.run.mesh.world, self._clean_up)
        log.info("saved %s", path)
        self.metrics.event("save", checkpoint=path.name, waited=round(time.perf_counter() - begin, 3))

    def _clean_up(self) -> None:
        self._mark()
        prune(self.folder.checkpoints, self.options.keep_last, self.options.keep_every)

    def _named(self, name: str) -> str:
        return f"{self.folder.checkpoints.name}/{name}"

    def check(self, step: int, record: dict[str, Any]) -> None:
        """Before the record of an evaluation is published: Failed if it, or a weight, is not finite. Collective."""
        weights = dict(self.run.model.named_parameters())
        try:
            on_all_ranks(self.run.mesh.world, lambda: require_finite(weights))
        except checkpoints.NotFiniteValues as error:
            raise self._lost(f"step {step} cannot be evaluated: {error}") from error
        try:
            json.dumps(record, allow_nan=False)
        except ValueError:  # on every rank: they have the same record
            loss = f" (loss {record['held_out']['loss']})" if "held_out" in record else ""
            raise self._lost(f"step {step}: what the evaluation found is not finite{loss}") from None

    def _lost(self, what: str) -> Failed:
        self.finish()
        return Failed(NOT_FINITE, f"{what}. {self.way_back()}")

    def way_back(self) -> str:
        """After numbers that are not finite: what is on disk, and how to go on."""
        change = "Lower train.lr or train.clip, or raise train.eps"
        if self.newest is None:
            return f"There is no checkpoint yet. {change}; the same command then starts from the beginning"
        return (
            f"Last good checkpoint (every number in it is finite): {self.newest}. {change}; the same command then goes on from it, "
            "or from an older one if you move it away"
        )

    def _forgive(self, error: checkpoints.NotWritten, step: int, needed: bool) -> None:
        """A save has failed: a warning; or Failed, if it was needed or one too many."""
        self._failed += 1
        self.metrics.event("save_failed", at_step=step, cause=str(error))
        most, kept = self.options.failures, self.newest or "no checkpoint yet"
        if self.newest is not None and gone_error(self.folder.path / self.newest):
            kept = f"none ({self.newest} was deleted)"
        if needed or self._failed >= most:
            raise Failed(
                CHECKPOINT,
                f"step {step} could not be saved ({self._failed} of {most} failures in a row): {error}\n"
                f"newest checkpoint: {kept}; make room or choose another run.folder, and start the same command again",
            ) from error
        log.warning(
            "step %d could not be saved: %s. Keeping %s; the next try is at step %s (%d of %d failures in a row)",
            step, error, kept, self.next(step), self._failed, most,
        )  # fmt: skip

    def too_slow(self, grace: float | None, step: float | None) -> str | None:
        """Once: whether a signal leaves too little time for the rest of a step and a save."""
        if grace is None or self.seconds is None or self._warned:
            return None
        need = self.seconds + (step or 0.0)
        if need <= grace:
            return None
        self._warned = True
        return (
            f"a step takes {step or 0.0:.0f} s and a save {self.seconds:.0f} s, but the scheduler kills {grace:.0f} s after "
            "its signal: a stop would lose the steps since the last checkpoint. Give it more time (torchrun --shutdown-timeout, "
            "ithaca slurm --warning) and say so in launch.grace, or save more often"
        )


def grace_of(given: float | None, environ: Mapping[str, str]) -> float | None:
    """Seconds between a scheduler's signal and its kill, where that is known."""
    if given is not None:
        return given
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        return float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_GRACE))
    except ValueError:
        return _TORCHRUN_GRACE
