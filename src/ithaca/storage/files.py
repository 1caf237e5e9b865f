"""What a checkpoint holds, which are whole, which is the newest. No torch here, but for numbers.

A checkpoint is `step-N` with a manifest that lists size and SHA-256 of every other file, with the run and the step (publish.py says
how it comes about, place.py where it lies). Whoever looks for a checkpoint ignores those without a manifest, or with files of other
sizes, or of another run, and says why. Names and sizes are cheap and find what crashes do; `verify` reads every byte and finds the
rest, numbers that are not finite included; a time that is not the one of writing tells that somebody has touched a file, and that
reading it is worthwhile.

A run that goes on deletes its old checkpoints, also one that somebody reads just now. It is no checkpoint any more before its first
byte goes, so a reader that stumbles looks whether it is still there (`gone_error`): if not, nothing is damaged, and a newer one can
be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..base.fields import shown, wrong
from ..base.files import json_in
from .digest import BLOCK, Progress, digests
from .place import BEST, LATEST, RUN, place_of, step_of
from .record import MANIFEST_FIELDS, wrong_state

log = logging.getLogger("ithaca")

Result = TypeVar("Result")

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
_LIMIT = 1 << 30  # bytes of state.json, which has the random states of every rank


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message names the cause and the fix; older checkpoints are untouched."""

    exit_code = 4  # docs/reference/run_folder.md


class Damaged(CheckpointError):
    """A checkpoint is not as it was saved. An older one may be."""


class Gone(CheckpointError):
    """A checkpoint was there and is not any more: the run that it is of has pruned it. A newer one is there."""


class NotWritten(CheckpointError):
    """This save did not work, because of the disk; the next may."""


class NotFiniteValues(CheckpointError):
    """Weights or states are NaN or infinite, so they are neither saved nor exported."""

    exit_code = 6


def published(folder: Path) -> list[Path]:
    """Checkpoints named step-N, newest first, whole or not."""
    checkpoints = [path for path in place_of(folder).entries() if step_of(path) is not None]
    return sorted(checkpoints, key=lambda path: step_of(path) or 0, reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Whether there is a manifest in it, of whatever kind."""
    try:
        place_of(path).open(path / MANIFEST).close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # for whoever reads it
        pass
    return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object written by ithaca; CheckpointError if it is something else."""
    try:
        with place_of(path.parent).open(path) as file:
            content = json_in(file, path, _LIMIT)
    except FileNotFoundError:
        raise Damaged(f"{path} does not exist; {path.parent.name} is no complete checkpoint") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror}); use another checkpoint") from None
    except ValueError as error:
        raise Damaged(f"{error}; use another checkpoint") from None
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{path} has format {shown(version)}, this ithaca reads {FORMAT}; use the ithaca that wrote it"
        )
    return content


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, which is of this folder and names files of this folder only."""
    manifest = read_json(path / MANIFEST)
    names = manifest.get("files")
    if not isinstance(names, dict) or manifest.get("step") != step_of(path):
        raise Damaged(f"{path / MANIFEST} does not belong to this folder (step {shown(manifest.get('step'))})")
    if manifest.get("block") != BLOCK:
        raise Damaged(f"{path / MANIFEST} has hashes of blocks of {shown(manifest.get('block'))} bytes, not {BLOCK}")
    for name in names:
        # names come from a file, so they must not lead out of the folder
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{path / MANIFEST} has a bad entry: {shown(name)}")
    if problem := wrong(manifest, MANIFEST_FIELDS):
        raise CheckpointError(f"{path / MANIFEST} has a bad entry: {problem}; use another checkpoint")
    return manifest


def listed(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"size", "sha256", "modified"}, as the manifest of a checkpoint has it."""
    return read_manifest(path)["files"]


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, which must be of the same save as the manifest: neither can be taken from another one."""
    manifest, state = read_manifest(path), read_json(path / STATE)
    for key in ("run", "save", "step"):
        if state.get(key) != manifest.get(key):
            raise Damaged(
                f"{path} is made of parts of two checkpoints: {STATE} says {key} {shown(state.get(key))}, {MANIFEST} says "
                f"{shown(manifest.get(key))}; use another checkpoint"
            )
    if problem := wrong_state(state):
        raise Damaged(f"{path / STATE}: {problem}; use another checkpoint")
    return state


# -- what is wrong with one -------------------------------------------------------------------------------------------


def damage(path: Path) -> list[str]:
    """What is wrong with a checkpoint, as far as names and sizes tell. Empty: complete."""
    try:
        expected = listed(path)
        present = place_of(path).files(path)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    problems = []
    for name, entry in expected.items():
        stored = present.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.kind:  # a pipe would be waited for
            problems.append(f"{name} is {stored.kind}, not a file")
        elif stored.size != entry["size"]:
            problems.append(f"{name} has {stored.size:,} bytes, the manifest says {entry['size']:,}")
    return problems


def changed(path: Path, names: list[str], progress: Progress | None = None) -> list[str]:
    """Of these files of a checkpoint, which hold other bytes than when it was saved."""
    expected = listed(path)
    problems = []
    for name, digest in digests({name: path / name for name in names}, progress, place_of(path).open).items():
        if isinstance(digest, Exception):
            problems.append(f"{name} cannot be read ({getattr(digest, 'strerror', None) or digest})")
        elif digest != expected[name]["sha256"]:
            problems.append(f"{name} has changed since it was saved (SHA-256 differs)")
    return problems


def touched(path: Path) -> list[str]:
    """Files that have another time than when they were written: copied, restored, or changed."""
    expected = listed(path)
    try:
        present = place_of(path).files(path)
    except OSError:
        present = {}
    times = {name: stored.modified for name, stored in present.items()}
    return [name for name, entry in expected.items() if times.get(name) != entry.get("modified")]


def unlisted(path: Path) -> list[str]:
    """Files in a checkpoint that its manifest does not know."""
    return sorted(place_of(path).files(path).keys() - {*listed(path), MANIFEST})


# -- which one --------------------------------------------------------------------------------------------------------


def run_of(folder: Path) -> str | None:
    """Whose checkpoints a folder holds: what RUN says, or else the newest checkpoint; None: nobody's yet."""
    if name := _line(folder, RUN):
        return name
    for path in published(folder):
        try:
            return str(read_manifest(path)["run"])
        except (CheckpointError, KeyError):
            continue
    return None


def unusable(path: Path, run: str | None) -> list[str]:
    """Why a run would not go on from a checkpoint in its folder, as far as can be told without reading all of it."""
    problems = damage(path)
    if problems or run is None:
        return problems
    try:
        owner = read_manifest(path).get("run")
    except CheckpointError as error:
        return [str(error)]
    if owner != run:
        return [f"it is of run {owner}, this folder is of run {run}; to go on from it, give it a folder of its own"]
    return []


def gone_error(path: Path) -> Gone | None:
    """Why a checkpoint that was there cannot be read: it is there no more. None: it is."""
    if place_of(path).has(path):
        return None
    return Gone(
        f"{path} is not there, or not any more: its run, if that goes on, has pruned it, or somebody has moved it; "
        f"'ithaca ckpt ls {path.parent}' lists those that are"
    )


def newest(find: Callable[[], Path], use: Callable[[Path], Result], named: Path | None = None) -> Result:
    """Use the checkpoint that is found; if it is deleted meanwhile, the one that is then. named: this and no other."""
    while True:
        path = find()
        try:
            return use(path)
        except (CheckpointError, OSError) as error:
            gone = gone_error(path)
            if gone is None:
                raise
            if path == named:
                raise gone from error
            log.warning("%s was deleted while it was read, by the run that it is of; going on with a newer one", path)


def complete(folder: Path) -> list[Path]:
    """Checkpoints to go on from, newest first. A damaged one is left out with a warning that says why.

    The rename publishes; LATEST is a signpost for people and programs. After a kill between the two it names the one before,
    and the newest complete folder counts.
    """
    folder = Path(folder)
    run = run_of(folder)
    problems = {path: unusable(path, run) for path in published(folder)}
    if any(reasons and gone_error(path) for path, reasons in problems.items()):
        return complete(folder)  # a run that goes on has published newer ones, and deleted these
    for path, reasons in problems.items():
        if reasons:
            log.warning("ignored damaged checkpoint %s: %s", path, "; ".join(reasons[:3]))
    named = named_latest(folder)
    if named is not None and not place_of(folder).has(named):
        log.warning("%s names %s, which does not exist", folder / LATEST, named.name)
    return [path for path, reasons in problems.items() if not reasons]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(complete(folder)), None)


def named_latest(folder: Path) -> Path | None:
    """What LATEST names."""
    return _named(folder, LATEST)


def named_best(folder: Path) -> Path | None:
    """What BEST names."""
    return _named(folder, BEST)


def _named(folder: Path, line: str) -> Path | None:
    name = _line(folder, line)
    return folder / os.path.basename(name) if step_of(Path(name)) is not None else None


def _line(folder: Path, name: str) -> str:
    """What a file of one line says; nothing if it is not there, or no such file."""
    try:
        with place_of(folder).open(folder / name) as file:
            return file.read(4096).decode().strip()
    except (OSError, ValueError):
        return ""
