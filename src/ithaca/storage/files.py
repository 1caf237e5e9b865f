"""Checkpoint folders as files: what is in them, which are whole, which is the newest. No torch here, but for numbers.

A checkpoint is a folder `step-N` with a manifest that lists size and SHA-256 of every other file, with the run and the step
(publish.py says how it comes about). Whoever looks for a checkpoint ignores those without a manifest, or with files of other
sizes, or of another run, and says why. Names and sizes are cheap and find what crashes do; `verify` reads every byte and finds the
rest, numbers that are not finite included; a time that is not the one of writing tells that somebody has touched a file, and that
reading it is worthwhile.

A run that goes on deletes its old checkpoints, also one that somebody reads just now. It renames a folder before it deletes it, so
a reader that stumbles looks whether the folder is still there (`gone`): if not, nothing is damaged, and a newer one can be read.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..base.fields import shown, wrong
from ..base.files import kind_of, open_regular
from ..base.files import read_json as read_limited
from .digest import BLOCK, Progress, digests
from .record import MANIFEST_FIELDS, wrong_state

log = logging.getLogger("ithaca")

Result = TypeVar("Result")

FORMAT = 2
MANIFEST, STATE, LATEST, RUN = "manifest.json", "state.json", "LATEST", "RUN"
_PUBLISHED = re.compile(r"step-(\d{1,18})$")
_LIMIT = 1 << 30  # bytes of state.json, which has the random states of every rank


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message names the cause and the fix; older checkpoints are untouched."""

    exit_code = 4  # docs/run_folder.md


class Damaged(CheckpointError):
    """A checkpoint is not as it was saved. An older one may be."""


class Gone(CheckpointError):
    """A checkpoint was there and is not any more: the run that it is of has pruned it. A newer one is there."""


class NotWritten(CheckpointError):
    """This save did not work, because of the disk; the next may."""


class NotFiniteValues(CheckpointError):
    """Weights or states are NaN or infinite, so they are neither saved nor exported."""

    exit_code = 6


def step_of(path: Path) -> int | None:
    """The step in a published folder's name; None for any other name."""
    found = _PUBLISHED.match(path.name)
    return int(found.group(1)) if found else None


def published(folder: Path) -> list[Path]:
    """Folders named step-N, newest first, whole or not."""
    found = [path for path in folder.glob("step-*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object written by ithaca; CheckpointError if it is something else."""
    try:
        found = read_limited(path, _LIMIT)
    except FileNotFoundError:
        raise Damaged(f"{path} does not exist; {path.parent.name} is no complete checkpoint") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror}); use another checkpoint") from None
    except ValueError as error:
        raise Damaged(f"{error}; use another checkpoint") from None
    version = found.get("format") if isinstance(found, dict) else None
    if not isinstance(found, dict) or type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{path} has format {shown(version)}, this ithaca reads {FORMAT}; use the ithaca that wrote it"
        )
    return found


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
        files = listed(path)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, about in files.items():
        try:
            there = (path / name).stat()
        except OSError:
            found.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(there.st_mode):  # a pipe would be waited for
            found.append(f"{name} is {kind_of(path / name)}, not a file")
        elif there.st_size != about["size"]:
            found.append(f"{name} has {there.st_size:,} bytes, the manifest says {about['size']:,}")
    return found


def changed(path: Path, names: list[str], progress: Progress | None = None) -> list[str]:
    """Of these files of a checkpoint, which hold other bytes than when it was saved."""
    files = listed(path)
    found = []
    for name, digest in digests({name: path / name for name in names}, progress).items():
        if isinstance(digest, OSError):
            found.append(f"{name} cannot be read ({digest.strerror})")
        elif digest != files[name]["sha256"]:
            found.append(f"{name} has changed since it was saved (SHA-256 differs)")
    return found


def touched(path: Path) -> list[str]:
    """Files that have another time than when they were written: copied, restored, or changed."""
    found = []
    for name, about in listed(path).items():
        try:
            modified = (path / name).stat().st_mtime_ns
        except OSError:
            modified = None
        if modified != about.get("modified"):
            found.append(name)
    return found


def strangers(path: Path) -> list[str]:
    """Files in a checkpoint that its manifest does not know."""
    known = {*listed(path), MANIFEST}
    return sorted(each.name for each in path.iterdir() if each.name not in known)


# -- which one --------------------------------------------------------------------------------------------------------


def run_of(folder: Path) -> str | None:
    """Whose checkpoints a folder holds: what RUN says, or else the newest checkpoint; None: nobody's yet."""
    if name := _line(folder / RUN):
        return name
    for path in published(folder):
        try:
            return str(read_manifest(path)["run"])
        except (CheckpointError, KeyError):
            continue
    return None


def why_not(path: Path, run: str | None) -> list[str]:
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


def gone(path: Path) -> Gone | None:
    """Why a checkpoint that was there cannot be read: it is there no more. None: it is."""
    if path.is_dir():
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
            missing = gone(path)
            if missing is None:
                raise
            if path == named:
                raise missing from error
            log.warning("%s was deleted while it was read, by the run that it is of; going on with a newer one", path)


def complete(folder: Path) -> list[Path]:
    """Checkpoints to go on from, newest first. A damaged one is left out with a warning that says why.

    The rename publishes; LATEST is a signpost for people and programs. After a kill between the two it names the one before,
    and the newest complete folder counts.
    """
    folder = Path(folder)
    run = run_of(folder)
    problems = {path: why_not(path, run) for path in published(folder)}
    if any(why and gone(path) for path, why in problems.items()):
        return complete(folder)  # a run that goes on has published newer ones, and deleted these
    found = [path for path, why in problems.items() if not why]
    for path, why in problems.items():
        if why:
            log.warning("ignored damaged checkpoint %s: %s", path, "; ".join(why[:3]))
    named = named_latest(folder)
    if named is not None and not named.is_dir():
        log.warning("%s names %s, which does not exist", folder / LATEST, named.name)
    return found


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(complete(folder)), None)


def named_latest(folder: Path) -> Path | None:
    """What LATEST names."""
    name = _line(folder / LATEST)
    return folder / os.path.basename(name) if step_of(Path(name)) is not None else None


def _line(path: Path) -> str:
    """What a file of one line says; nothing if it is not there, or no such file."""
    try:
        with open_regular(path) as file:
            return file.read(4096).decode().strip()
    except (OSError, ValueError):
        return ""
