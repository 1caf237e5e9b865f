"""Back from disk: `load` checks that a checkpoint is whole and fits the run, then writes into the run's own tensors.

Of a folder of checkpoints the newest good one is taken: one that turns out to be damaged, or not finite, is passed over, loudly.
One that does not fit, or that could run code, stops everything: an older one would not be what was asked for. One that is deleted
meanwhile is of a run that goes on, and has a newer one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ..base.faults import reach
from ..base.versions import require_floors
from ..engine.run import Run
from . import rng
from .dcp import plainly
from .files import (
    CheckpointError,
    Damaged,
    Gone,
    changed,
    complete,
    damage,
    gone_error,
    listed,
    published,
    read_state,
)
from .fingerprint import fingerprints
from .finite import stored_not_finite
from .low_bit import crossings, narrow, parts_of, widen
from .place import place_of, step_of
from .ranks import on_all_ranks, on_rank0
from .safe_metadata import SafeReader, read_metadata
from .state import (
    allocate,
    at_rest,
    differences,
    frozen_of,
    group_differences,
    keep_only,
    model_tensors,
    optimizer_state,
    restore_numbers,
)

log = logging.getLogger("ithaca")


def load(
    folder: Path, run: Run, optimizer: torch.optim.Optimizer | None = None, *, check_hashes: bool = True
) -> dict[str, Any]:
    """Bring a run to where it was saved. Collective. -> what `save` was given as extra, and "step"

    folder: a checkpoint (`step-N`), or a folder of them, of which the newest good one is taken; Damaged if there is none.
    check_hashes: read every byte first, each rank its share; without it a changed byte goes unnoticed.
    Options of the optimizer (learning rate, weight decay, ...) are those of the checkpoint; change them afterwards.
    """
    mesh = run.mesh
    require_floors("torch")
    on_all_ranks(mesh.world, lambda: reach("load"))
    while True:
        path = _good(Path(folder), run, check_hashes)
        log.info("loading %s", path)
        try:
            return _load(path, run, optimizer)
        except CheckpointError:
            if not _deleted(path, Path(folder), run):
                raise


def _deleted(path: Path, requested: Path, run: Run) -> bool:
    """After a checkpoint could not be read: whether its run, which goes on, has pruned it; then there is a newer one. Gone if this
    one was requested for. Collective."""
    gone = on_rank0(run.mesh.world, lambda: str(gone_error(path) or ""))
    if gone and path == requested:
        raise Gone(gone)
    if gone and run.mesh.world.rank == 0:
        log.warning("%s was deleted while it was read, by the run that it is of; going on with a newer one", path)
    return bool(gone)


def _load(path: Path, run: Run, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    mesh = run.mesh

    def refuse_if(what: str, find: Callable[[], list[str]], fix: str) -> None:
        on_all_ranks(mesh.world, lambda: _refuse(path, what, find(), fix))

    def read(tensors: dict[str, Any]) -> None:
        on_all_ranks(mesh.world, lambda: _read(tensors, SafeReader(path, metadata), mesh.world.pg))

    files = on_all_ranks(mesh.world, lambda: listed(path))
    record = on_all_ranks(mesh.world, lambda: read_state(path))
    metadata = on_all_ranks(mesh.world, lambda: read_metadata(path, files))
    on_all_ranks(mesh.world, lambda: at_rest(run))
    base = fingerprints(frozen_of(run), mesh)
    tensors = model_tensors(run)
    refuse_if("is of another model", lambda: differences(tensors, metadata, "model."), _SAME_MODEL)
    refuse_if("was trained on another base", lambda: _base_differences(record["model"], base), _SAME_BASE)
    about = record["optimizer"]
    if optimizer is not None:
        refuse_if("has no optimizer state", lambda: [] if about else ["it was saved without one"], _SAME_OPTIMIZER)
        refuse_if("does not fit", lambda: group_differences(optimizer, run, about), _SAME_OPTIMIZER)
        made = allocate(optimizer)
        keep_only(optimizer, run, about["numbers"])
        try:
            state = optimizer_state(run, optimizer)
            wide, thin = crossings(state.tensors, state.packed, metadata.state_dict_metadata)
            other = {*wide, *thin, *parts_of([*wide, *thin])}
            refuse_if(
                "does not fit", lambda: differences(state.tensors, metadata, "optimizer.", other), _SAME_OPTIMIZER
            )
        except CheckpointError:
            for parameter in made:
                optimizer.state.pop(parameter, None)
            raise
        tensors.update({key: tensor for key, tensor in state.tensors.items() if key not in other})
    read(tensors)
    if optimizer is not None:
        for key in wide:
            widen(key, state.packed.get(key, state.tensors[key]), metadata.state_dict_metadata, read)
        for key in thin:
            narrow(key, state.packed[key], metadata.state_dict_metadata, read)
        restore_numbers(optimizer, run, about)
    states = record["rng"]
    if len(states) == mesh.world.size:
        on_all_ranks(mesh.world, lambda: _restore_random(path, states[mesh.world.rank], mesh.device))
    else:
        log.info("saved on %d ranks, resumed on %d: random states are seeded anew", len(states), mesh.world.size)
        rng.reseed(record["seed"], record["step"], mesh.world.rank)
    return {**record["extra"], "step": record["step"]}


_ANOTHER = "use another checkpoint"
_WITHOUT = "use another checkpoint, or move this one away to start without it"
_SAME_MODEL = "build the model from the folder, with the settings (dtype, adapters), that the run was started with"
_SAME_BASE = "load the base the adapters were trained on, in the same dtype"
_SAME_OPTIMIZER = "make the optimizer as it was when saved, or load without one to start it afresh"


def _good(folder: Path, run: Run, check_hashes: bool) -> Path:
    """The newest checkpoint that is as it was saved. Collective: each rank reads its share."""
    mesh = run.mesh
    paths = [Path(name) for name in on_rank0(mesh.world, lambda: [str(path) for path in candidates(folder)])]
    for path, older in zip(paths, [*paths[1:], None], strict=True):

        def look(path: Path = path) -> None:
            names = sorted(listed(path))[mesh.world.rank :: mesh.world.size]
            _refuse(path, "is damaged", changed(path, names if check_hashes else []), _ANOTHER, Damaged)
            read_state(path)
            _refuse(path, "holds numbers that are not finite", stored_not_finite(path, names), _WITHOUT, Damaged)

        try:
            on_all_ranks(mesh.world, look)
            return path
        except Damaged as error:
            if _deleted(path, folder, run):
                return _good(folder, run, check_hashes)
            if older is None:
                raise
            if mesh.world.rank == 0:
                log.warning("%s. Using %s. 'ithaca ckpt verify %s' lists all damage", error, older.name, path)
    raise AssertionError("candidates gives at least one")


def candidates(folder: Path) -> list[Path]:
    """Newest first, names and sizes checked; at least one."""
    if step_of(folder) is not None or not place_of(folder).has(folder):
        problems = damage(folder)
        if problems and step_of(folder) is not None and (gone := gone_error(folder)):
            raise gone
        _refuse(folder, "is damaged", problems, _ANOTHER, Damaged)
        return [folder]
    good = complete(folder)
    if not good and (damaged := published(folder)):
        names = ", ".join(path.name for path in damaged[:5])
        raise Damaged(
            f"{folder} has no good checkpoint: {names} {'is' if len(damaged) == 1 else 'are'} damaged. 'ithaca ckpt verify "
            f"{folder}' lists the damage. Fix: restore one from a copy, or move them away to start from the beginning"
        )
    if not good:
        raise CheckpointError(f"{folder} has no complete checkpoint; start without one")
    return good


def _refuse(
    path: Path, what: str, problems: list[str], fix: str, kind: type[CheckpointError] = CheckpointError
) -> None:
    if problems:
        more = f"; {len(problems) - 5} more" if len(problems) > 5 else ""
        raise kind(f"checkpoint {path} {what}: {'; '.join(problems[:5])}{more}. Fix: {fix}")


def _restore_random(path: Path, states: dict[str, Any], device: torch.device) -> None:
    try:
        rng.restore(states, device)
    except ValueError as error:
        raise Damaged(f"checkpoint {path} is damaged: {error}. Fix: {_ANOTHER}") from None


def _base_differences(model: dict[str, Any], base: dict[str, str]) -> list[str]:
    saved = model["base"]
    names = [name for name in {**saved, **base} if saved.get(name) != base.get(name)]
    return [f"{name} was {saved.get(name)} and is {base.get(name)}" for name in names]


def _read(tensors: dict[str, Any], reader: SafeReader, group: dist.ProcessGroup | None) -> None:
    with plainly(f"reading {reader.path}"):
        dcp.load(tensors, storage_reader=reader, process_group=group)
