"""Checkpoint folders as files: what is in them, which are whole, which is the newest. No torch here.

A checkpoint is a folder `step-N` with a manifest that lists size and SHA-256 of every other file, with the run and the step
(publish.py says how it comes about). Whoever looks for a checkpoint ignores those without a manifest, or with files of other
sizes, or of another run, and says why. Names and sizes are cheap and find what crashes do; `verify` reads every byte and finds the
rest; a time that is not the one of writing tells that somebody has touched a file, and that reading it is worthwhile.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from .digest import BLOCK, Progress, digests

log = logging.getLogger("ithaca")

FORMAT = 2
MANIFEST, STATE, LATEST, RUN = "manifest.json", "state.json", "LATEST", "RUN"
_PUBLISHED = re.compile(r"step-(\d+)$")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message names the cause and the fix; older checkpoints are untouched."""

    exit_code = 4  # docs/run_folder.md


class Damaged(CheckpointError):
    """A checkpoint is not as it was saved. An older one may be."""


class NotWritten(CheckpointError):
    """This save did not work, because of the disk; the next may."""


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
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path} does not exist; {path.parent.name} is no complete checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read ({error}); use another checkpoint") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise CheckpointError(f"{path} has format {version}, this ithaca reads {FORMAT}; use the ithaca that wrote it")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, which is of this folder and names files of this folder only."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or manifest.get("step") != step_of(path):
        raise Damaged(f"{path / MANIFEST} does not belong to this folder (step {manifest.get('step')})")
    if manifest.get("block") != BLOCK:
        raise Damaged(f"{path / MANIFEST} has hashes of blocks of {manifest.get('block')} bytes, not {BLOCK}")
    for name, about in files.items():
        # names come from a file, so they must not lead out of the folder
        if name != os.path.basename(name) or name in ("", ".", "..") or not _is_entry(about):
            raise CheckpointError(f"{path / MANIFEST} has a bad entry: {name!r}")
    return manifest


def _is_entry(about: Any) -> bool:
    return isinstance(about, dict) and isinstance(about.get("size"), int) and isinstance(about.get("sha256"), str)


def listed(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"size", "sha256", "modified"}, as the manifest of a checkpoint has it."""
    return read_manifest(path)["files"]


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, which must be of the same save as the manifest: neither can be taken from another one."""
    manifest, state = read_manifest(path), read_json(path / STATE)
    for key in ("run", "save", "step"):
        if state.get(key) != manifest.get(key):
            raise Damaged(
                f"{path} is made of parts of two checkpoints: {STATE} says {key} {state.get(key)}, {MANIFEST} says "
                f"{manifest.get(key)}; use another checkpoint"
            )
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
            size = (path / name).stat().st_size
        except OSError:
            found.append(f"{name} is missing")
            continue
        if size != about["size"]:
            found.append(f"{name} has {size:,} bytes, the manifest says {about['size']:,}")
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


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with a checkpoint, every byte read. Empty: as it was saved."""
    path = Path(path)
    problems = damage(path)
    if problems:
        return problems
    problems = changed(path, list(listed(path)), progress)
    try:
        read_state(path)
    except CheckpointError as error:
        problems.append(str(error))
    return problems + [f"{name} is not in the manifest" for name in strangers(path)]


# -- which one --------------------------------------------------------------------------------------------------------


def run_of(folder: Path) -> str | None:
    """Whose checkpoints a folder holds: what RUN says, or else the newest checkpoint; None: nobody's yet."""
    try:
        return (folder / RUN).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        pass
    for path in published(folder):
        try:
            return str(read_manifest(path)["run"])
        except (CheckpointError, KeyError):
            continue
    return None


def why_not(path: Path, run: str | None) -> list[str]:
    """Why a run would not go on from a checkpoint in its folder, as far as can be told without reading all of it."""
    problems = damage(path)
    if not problems and run is not None and (owner := read_manifest(path).get("run")) != run:
        problems = [f"it is of run {owner}, this folder is of run {run}; to go on from it, give it a folder of its own"]
    return problems


def complete(folder: Path) -> list[Path]:
    """Checkpoints to go on from, newest first. A damaged one is left out with a warning that says why.

    The rename publishes; LATEST is a signpost for people and programs. After a kill between the two it names the one before,
    and the newest complete folder counts.
    """
    folder = Path(folder)
    run, found = run_of(folder), []
    for path in published(folder):
        problems = why_not(path, run)
        if problems:
            log.warning("ignored damaged checkpoint %s: %s", path, "; ".join(problems[:3]))
        else:
            found.append(path)
    named = named_latest(folder)
    if named is not None and not named.is_dir():
        log.warning("%s names %s, which does not exist", folder / LATEST, named.name)
    return found


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(complete(folder)), None)


def named_latest(folder: Path) -> Path | None:
    """What LATEST names."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return folder / os.path.basename(name) if step_of(Path(name)) is not None else None
