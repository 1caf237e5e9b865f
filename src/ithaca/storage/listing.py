"""The checkpoints of a folder, described: what `ithaca ckpt` shows. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import (
    CheckpointError,
    Gone,
    gone_error,
    named_best,
    named_latest,
    published,
    read_manifest,
    read_state,
    run_of,
    touched,
    unusable,
)
from .place import place_of, step_of


@dataclass(frozen=True)
class About:
    """A published checkpoint, as far as can be told without reading all of it."""

    path: Path
    step: int
    state: str
    """as written: names and sizes are right, no file was touched since it was hashed on its way to the disk. touched: a file has
    another time (a copy, a restore, or a change): `verify` knows. damaged: see problems."""
    problems: tuple[str, ...]
    latest: bool  # what LATEST names
    best: bool  # what BEST names
    time: str | None
    run: str | None
    world: int | None
    files: int
    bytes: int

    def json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path), "problems": list(self.problems)}


def find(path: Path) -> list[Path]:
    """The checkpoints meant by a checkpoint, a folder of them or a run folder, newest first. CheckpointError if there are none."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; name a run folder, its checkpoints, or one of them (step-N)")
    one = step_of(path) is not None
    there = path if one else folder_of(path)
    if not place_of(there).has(there):
        others = [other.name for other in published(path.parent)[:5]] if one else []
        known = f"; there are {', '.join(others)}" if others else ""
        raise CheckpointError(
            f"{path} does not exist{known}; name a run folder, its checkpoints, or one of them (step-N)"
        )
    if one:
        return [path]
    checkpoints = published(there)
    if not checkpoints:
        inside = sorted(other.parent.parent.name for other in path.glob("*/checkpoints/step-*"))
        runs = f"; it has runs with some: {', '.join(dict.fromkeys(inside))}" if inside else ""
        raise CheckpointError(
            f"{path} has no checkpoints{runs}; name a run folder, its checkpoints, or one of them (step-N)"
        )
    return checkpoints


def folder_of(path: Path) -> Path:
    """Where the checkpoints of a run folder lie; of a folder of checkpoints, itself; of a checkpoint, the one around."""
    if step_of(path) is not None:
        return path.parent
    inside = path / "checkpoints"
    return inside if place_of(inside).has(inside) else path


def describe_all(path: Path) -> list[About]:
    """Those that `find` finds, and again if one is deleted meanwhile: by then its run has a newer one."""
    while True:
        try:
            return [describe(checkpoint) for checkpoint in find(path)]
        except Gone:
            if step_of(path) is not None:
                raise


def describe(path: Path) -> About:
    """Gone if it is deleted meanwhile."""
    problems = unusable(path, run_of(path.parent))
    manifest, state, sizes, moved = {}, {}, [], []
    try:
        sizes = [stored.size for stored in place_of(path).files(path).values() if not stored.kind]
        manifest = read_manifest(path)
        state = read_state(path)
        moved = touched(path)
    except (CheckpointError, OSError) as error:
        problems = problems or [str(error)]
    if problems and (gone := gone_error(path)):
        raise gone
    world = state.get("world")
    return About(
        path=path,
        step=step_of(path) or 0,
        state="damaged" if problems else "touched" if moved else "as written",
        problems=tuple(problems),
        latest=named_latest(path.parent) == path,
        best=named_best(path.parent) == path,
        time=manifest.get("time"),
        run=manifest.get("run"),
        world=world.get("size") if isinstance(world, dict) else None,
        files=len(sizes),
        bytes=sum(sizes),
    )
