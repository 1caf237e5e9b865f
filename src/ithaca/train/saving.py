"""The checkpoints of a run: begun, published, counted, and what happens if one cannot be written.

A save that fails because of the disk does not end the run: older checkpoints stand, training goes on, and the next one is due at
its time. At the end of a run, or after `checkpoint.failures` in a row, it does.

How long one takes is measured, because it decides whether a signal leaves enough time: a scheduler that kills 30 s after its
signal needs the rest of a step and a save to fit into that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..config.schema import Config
from ..launch.exits import CHECKPOINT
from ..run import Run
from ..storage import checkpoint as checkpoints
from ..storage.checkpoint import prune
from ..storage.ranks import first
from .ends import Failed
from .folder import RunFolder

log = logging.getLogger("ithaca")

_TORCHRUN_GRACE = 30.0  # its --shutdown-timeout


class Saver:
    def __init__(self, config: Config, folder: RunFolder, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.options, self.folder, self.run, self.optimizer = config.checkpoint, folder, run, optimizer
        self.newest: str | None = None  # published, relative to the run folder
        self.seconds: float | None = None  # that the last one took to write
        self.pending: checkpoints.Saving | None = None
        self._began = 0.0
        self._failed = 0  # saves in a row
        self._warned = False

    def due(self, step: int) -> bool:
        return self.options.every is not None and step % self.options.every == 0

    def begin(self, step: int, extra: dict[str, Any], *, wait: bool) -> None:
        """wait: it is written when this returns. NotWritten if that cannot be done, as in `finish`; collective, as is that."""
        self._began = time.perf_counter()
        later = self.options.asynchronous and not wait
        self.pending = checkpoints.save(
            self.folder.checkpoints, self.run, self.optimizer, extra, step=step, asynchronous=later
        )
        future = self.pending._future
        if future is None:
            self._written()
        else:
            future.add_done_callback(lambda _: self._written())

    def _written(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def finish(self) -> str:
        """Publish what is being written; it counts from here on. -> its name"""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        path = pending.wait()
        self._failed = 0
        self.newest = f"{self.folder.checkpoints.name}/{path.name}"
        options = self.options
        first(self.run.mesh, lambda: bool(prune(self.folder.checkpoints, options.keep_last, options.keep_every)))
        log.info("saved %s", path)
        return path.name

    def forgive(self, error: checkpoints.NotWritten, step: int, again: int | None, needed: bool) -> str:
        """A save has failed. -> words for it; or Failed, if it was needed or one too many. again: step of the next."""
        self._failed += 1
        most, kept = self.options.failures, self.newest or "no checkpoint yet"
        if needed or self._failed >= most:
            raise Failed(
                CHECKPOINT,
                f"step {step} could not be saved ({self._failed} of {most} failures in a row): {error}\n"
                f"newest checkpoint: {kept}; make room or choose another run.folder, and start the same command again",
            ) from error
        return (
            f"step {step} could not be saved: {error}. Keeping {kept}; the next try is at step {again} ({self._failed} of {most} "
            "failures in a row)"
        )

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
