"""The checkpoints of a run: when one is begun, when it counts, and what happens if one cannot be written.

A save between steps that fails (a full disk) does not end the run: what was published before still stands, so training goes on
and the next one is due at its time; the third failure in a row ends it. A save that was asked for, and the one at the end, must
succeed.

How long one takes is measured, because it decides whether a signal leaves enough time: a scheduler that kills 30 s after its
signal needs the rest of a step and a save to fit into that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config.schema import Config
from ..run import Run
from ..storage import checkpoint as checkpoints
from .folder import RunFolder

log = logging.getLogger("ithaca")

FAILURES = 3  # in a row, of saves that nobody waits for
_TORCHRUN_GRACE = 30.0  # its --shutdown-timeout


class Saver:
    def __init__(self, config: Config, folder: RunFolder, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.options, self.folder, self.run, self.optimizer = config.checkpoint, folder, run, optimizer
        self.newest: str | None = None  # published, relative to the run folder
        self.seconds: float | None = None  # that the last one took to write
        self.pending: checkpoints.Saving | None = None
        self._began = 0.0
        self._must = False
        self._failed = 0
        self._warned = False

    def due(self, step: int) -> bool:
        return self.options.every is not None and step % self.options.every == 0

    def begin(self, step: int, extra: dict[str, Any], *, must: bool) -> None:
        """must: wait for it, and raise if it cannot be written. Publishes the one before first."""
        self._began, self._must = time.perf_counter(), must
        later = self.options.asynchronous and not must
        try:
            self.pending = checkpoints.save(
                self.folder.checkpoints, self.run, self.optimizer, extra, step=step, asynchronous=later
            )
        except checkpoints.CheckpointError as error:
            self._fail(step, error)
            return
        future = getattr(self.pending, "_future", None)
        if later and future is not None:
            future.add_done_callback(lambda _: self._written())
        else:
            self._written()

    def _written(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def finish(self) -> str | None:
        """Publish what is being written; it counts from here on. Collective. -> its name"""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        try:
            path = pending.wait()
        except checkpoints.CheckpointError as error:
            self._fail(pending.step, error)
            return None
        self._failed = 0
        self.newest = f"{self.folder.checkpoints.name}/{path.name}"
        if self.run.mesh.world.rank == 0:
            checkpoints.prune(self.folder.checkpoints, self.options.keep_last, self.options.keep_every)
        log.info("saved %s", path)
        return path.name

    def _fail(self, step: int, error: checkpoints.CheckpointError) -> None:
        self._failed += 1
        if self._must or self._failed >= FAILURES:
            raise error
        again = f"; the next try is at step {step + self.options.every}" if self.options.every else ""
        kept = f"{Path(self.newest).name} stands" if self.newest else "there is none yet"
        if self.run.mesh.world.rank == 0:
            log.warning("step %d was not saved: %s; %s%s", step, error, kept, again)

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
