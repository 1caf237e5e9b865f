"""Save a run and go on from it: bit for bit on the same ranks, within rounding on any other number of them.

    saving = save(folder, run, optimizer, {"cursor": 5120}, step=40, asynchronous=True)
    ...                       # train on; at each step boundary, on every rank:
    saving.poll()             # publishes once every rank has written

    extra = load(folder, run, optimizer)      # the newest complete checkpoint, or one that is named

Tensors go through torch.distributed.checkpoint (DCP): each rank writes its shards, and reads the parts of other ranks' shards that
it needs, so the number of ranks, the ulysses/ring split and the rest of the stack may change in between. Everything else is JSON
(`state.json`). It is published as publish.py describes, in the place that the folder is (place.py); until then older checkpoints
stand as they were.

An asynchronous save copies the shards to host memory, which takes as much again as a rank's parameters and states, and returns;
a thread writes them. Its collectives run on a group of their own, for the training's would get between them. Publishing is never
done by the thread: `poll` and `wait` are collective, at a step boundary, and only they raise.

With PEFT adapters only trainable parameters are stored, and a fingerprint of each frozen one; loading onto another base is
refused. A checkpoint of another model, or of another dtype, is refused before anything is overwritten.
"""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ..base.faults import reach
from ..engine.ranks import gather
from ..engine.run import Run
from . import rng
from .check import verify
from .dcp import ALONE, HashingWriter, plainly
from .files import FORMAT, STATE, CheckpointError, Damaged, NotFiniteValues, NotWritten, latest, published
from .fingerprint import fingerprints
from .finite import require_finite
from .keep import prune, remove_unfinished
from .loading import load
from .place import place_of
from .publish import Draft, probe, publish, start, write_json
from .ranks import on_all_ranks, on_rank0
from .record import describe_model, versions
from .shards import HostCopies
from .state import at_rest, frozen_of, model_tensors, optimizer_state, size

__all__ = [
    "CheckpointError", "Damaged", "HostCopies", "NotFiniteValues", "NotWritten", "Saving", "save", "load", "ready", "latest",
    "published", "verify", "prune", "remove_unfinished",
]  # fmt: skip


class Saving:
    """A save under way. `poll` and `wait` are collective: every rank calls them, at the same point."""

    def __init__(self, run: Run, draft: Draft, writer: HashingWriter) -> None:
        self.mesh, self.draft, self.writer = run.mesh, draft, writer
        self.path: Path | None = None
        """The published checkpoint; None until then."""
        self.entries: dict[str, Any] = {}
        self._future: Future[Any] | None = None
        self._group: dist.ProcessGroup | None = None
        self._error: CheckpointError | None = None

    @property
    def step(self) -> int:
        return self.draft.step

    def done(self) -> bool:
        """Whether this rank has written its part. Local, costs nothing."""
        return self._future is None or self._future.done()

    def poll(self) -> bool:
        """Publish if every rank has written its part. -> whether the checkpoint is published"""
        if self.path is None and all(gather(self.mesh.world, self.done())):
            self.wait()
        return self.path is not None

    def wait(self) -> Path:
        """Wait until every rank has written its part, and publish. -> the checkpoint"""
        if self.path is not None:
            return self.path
        if self._error is not None:
            raise self._error
        with self._or_give_up():
            on_all_ranks(self.mesh.world, self._finish)
            entries = {
                name: entry for rank in gather(self.mesh.world, self.writer.entries) for name, entry in rank.items()
            }
            files = {**self.entries, **entries}
            self.path = Path(on_rank0(self.mesh.world, lambda: str(publish(self.draft, files))))
        self._leave()
        return self.path

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """An error ends this save; what it wrote goes, what was published before stays."""
        try:
            yield
        except CheckpointError as error:
            self._error = error
            self._leave()
            if self.mesh.world.rank == 0:
                with suppress(OSError):
                    place_of(self.draft.hidden).remove(self.draft.hidden)
            raise

    def _leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _begin(self, tensors: dict[str, Any]) -> None:
        """Write in a thread."""
        if self._group is None:
            warnings.filterwarnings("ignore", message=ALONE)  # raised in the thread, where it cannot be caught
        self._future = dcp.async_save(tensors, storage_writer=self.writer, process_group=self._group)  # pyright: ignore

    def _finish(self) -> None:
        if self._future is not None:
            with plainly(f"writing {self.draft.hidden}"):
                self._future.result()


def save(
    folder: Path,
    run: Run,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    *,
    step: int,
    asynchronous: bool = False,
    copies: HostCopies | None = None,
) -> Saving:
    """Write checkpoint `step-STEP` in `folder`. Collective. Finish an asynchronous one before starting the next.

    NotFiniteValues, on all ranks, if a weight or state of any is NaN or infinite: nothing is written then.

    extra: whatever else the run must know, as JSON: data cursor, schedule, config. `load` gives it back.
    copies: memory for asynchronous saves, used again; None = made for this one.
    """
    mesh = run.mesh
    if mesh.world.fake:
        raise CheckpointError("a rank-of-N run has no peers that hold the other shards; there is nothing to save")
    on_all_ranks(mesh.world, lambda: _check(run, extra, step))
    tensors = model_tensors(run)
    about = None
    if optimizer is not None:
        state = optimizer_state(run, optimizer)
        tensors.update(state.tensors)
        about = state.about
    on_all_ranks(
        mesh.world, lambda: require_finite({key.removeprefix("model."): value for key, value in tensors.items()})
    )
    draft = on_rank0(mesh.world, lambda: start(Path(folder), step, size(tensors)))
    saving = Saving(run, draft, HashingWriter(draft.hidden, step))
    with saving._or_give_up():
        record = {
            "format": FORMAT,
            "run": draft.run,
            "save": draft.save,
            "step": step,
            "seed": extra.get("seed", torch.initial_seed()),
            "extra": extra,
            "model": {
                **on_all_ranks(mesh.world, lambda: describe_model(run)),
                "base": fingerprints(frozen_of(run), mesh),
            },
            "optimizer": about,
            "world": {"size": mesh.world.size, "stack": asdict(run.stack), "device": mesh.device.type},
            "versions": versions(),
            "rng": gather(mesh.world, on_all_ranks(mesh.world, lambda: rng.capture(mesh.device))),
        }
        saving.entries = on_rank0(mesh.world, lambda: _write_record(draft.hidden, record))
        if asynchronous:
            tensors = on_all_ranks(mesh.world, lambda: (copies or HostCopies()).of(tensors))
            if dist.is_initialized():
                saving._group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
            on_all_ranks(mesh.world, lambda: saving._begin(tensors))
        else:
            on_all_ranks(mesh.world, lambda: _write(tensors, saving.writer, mesh.world.pg))
    if not asynchronous:
        saving.wait()
    return saving


def ready(folder: Path, run: Run) -> None:
    """Raise now what a save would raise later: whether rank 0 can write checkpoints here, and every rank sees them. Collective."""
    mesh, folder = run.mesh, Path(folder)
    on_rank0(mesh.world, lambda: probe(folder))

    def look() -> None:
        if not place_of(folder).has(folder):
            raise CheckpointError(
                f"{folder} is not there on {socket.gethostname()}, though rank 0 has made it; checkpoints need a folder on a "
                "file system that all nodes see"
            )

    on_all_ranks(mesh.world, look)


def _check(run: Run, extra: dict[str, Any], step: int) -> None:
    reach("save.begin", step)
    at_rest(run)
    try:
        json.dumps(extra, allow_nan=False)  # which JSON has not, and reading refuses
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra cannot be written as JSON: {error}; pass numbers, texts, lists and dicts"
        ) from None


def _write_record(hidden: Path, record: dict[str, Any]) -> dict[str, Any]:
    with plainly(f"writing {hidden / STATE}"):
        return {STATE: write_json(hidden / STATE, record)}


def _write(tensors: dict[str, Any], writer: HashingWriter, group: dist.ProcessGroup | None) -> None:
    with plainly(f"writing {writer.path}"):
        dcp.save(tensors, storage_writer=writer, process_group=group)
