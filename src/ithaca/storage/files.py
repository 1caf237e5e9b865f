"""Checkpoint folders as files: published whole or not at all, and checked before use. No torch here.

A checkpoint is a folder `step-N`. torch's own checkpoint writer neither completes a folder at once nor notices when bytes
changed, so this is what makes one trustworthy:

1. everything is written into a hidden sibling, `.step-N.RUN.tmp`; a name is never used twice;
2. `manifest.json` lists size and SHA-256 of every file, with the run and the step;
3. files and folder are flushed to disk, and the folder is renamed to `step-N`: from then on it is published;
4. `LATEST` names it, replaced as a whole.

A kill at any moment leaves the older checkpoints as they were, and at most a hidden folder that `remove_unfinished` deletes.
Whoever looks for a checkpoint ignores those without a manifest, or with files of other sizes, and says why. Sizes are cheap and
find what crashes do; `verify` reads every byte and finds the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import sha256_of, sync

log = logging.getLogger("ithaca")

FORMAT = 1
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "LATEST"
_PUBLISHED = re.compile(r"step-(\d+)$")
_UNFINISHED = re.compile(r"\.step-\d+\..*\.tmp$")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message names the cause and the fix; older checkpoints are untouched."""

    exit_code = 4  # docs/run_folder.md


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
        raise CheckpointError(f"{path} does not exist; {path.parent.name} is no complete checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise CheckpointError(f"{path} has format {version}, this ithaca reads {FORMAT}; use the ithaca that wrote it")
    return found


def listed(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"size", "sha256"}, as the manifest of a checkpoint has it."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or manifest.get("step") != step_of(path):
        raise CheckpointError(f"{path / MANIFEST} does not belong to this folder (step {manifest.get('step')})")
    for name, about in files.items():
        # names come from a file, so they must not lead out of the folder
        if name != os.path.basename(name) or not isinstance(about, dict) or not {"size", "sha256"} <= about.keys():
            raise CheckpointError(f"{path / MANIFEST} has a bad entry: {name!r}")
    return files


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


def changed(path: Path, names: list[str]) -> list[str]:
    """Of these files of a checkpoint, which hold other bytes than when it was saved."""
    files = listed(path)

    def differs(name: str) -> str | None:
        try:
            same = sha256_of(path / name) == files[name]["sha256"]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if same else f"{name} has changed since it was saved (SHA-256 differs)"

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing leaves Python's lock
        return [text for text in pool.map(differs, names) if text]


def verify(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, every byte read. Empty: as it was saved."""
    path = Path(path)
    problems = damage(path)
    if problems:
        return problems
    files = listed(path)
    strangers = sorted(each.name for each in path.iterdir() if each.name not in files and each.name != MANIFEST)
    return changed(path, list(files)) + [f"{name} is not in the manifest" for name in strangers]


def complete(folder: Path) -> list[Path]:
    """Checkpoints to go on from, newest first. A damaged one is left out with a warning that says why.

    The rename publishes; LATEST is a signpost for people and programs. After a kill between the two it names the one before,
    and the newest complete folder counts.
    """
    folder = Path(folder)
    found = []
    for path in published(folder):
        problems = damage(path)
        if problems:
            log.warning("ignored damaged checkpoint %s: %s", path, "; ".join(problems[:3]))
        else:
            found.append(path)
    named = _named(folder)
    if named is not None and not named.is_dir():
        log.warning("%s names %s, which does not exist", folder / LATEST, named.name)
    return found


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(complete(folder)), None)


def _named(folder: Path) -> Path | None:
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return folder / os.path.basename(name) if step_of(Path(name)) is not None else None


# -- publishing -------------------------------------------------------------------------------------------------------


def start(folder: Path, step: int, run: str, need: int) -> Path:
    """Make the hidden folder for a checkpoint of about `need` bytes; refuse what could not be finished."""
    target = folder / f"step-{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists() and not damage(target):
            raise CheckpointError(
                f"{target} exists already, and a published checkpoint is never overwritten; move it away, or go on from it"
            )
        free = shutil.disk_usage(folder).free
        if free < need:
            raise CheckpointError(
                f"not enough disk for a checkpoint in {folder}: it needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                "free some space, or keep fewer checkpoints"
            )
        hidden = folder / f".step-{step}.{run}.tmp"
        hidden.mkdir()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot take a checkpoint ({error.strerror}); choose another folder") from None
    return hidden


def publish(hidden: Path, step: int, run: str, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Manifest, flush, rename, LATEST. -> step-N"""
    folder, target = hidden.parent, hidden.parent / f"step-{step}"
    present = {path.name for path in hidden.iterdir()}
    if present != set(files):
        raise CheckpointError(f"{hidden} holds {sorted(present ^ set(files))[:3]} unexpectedly; it was not published")
    manifest = {
        "format": FORMAT,
        "run": run,
        "step": step,
        "files": {name: dict(files[name]) for name in sorted(files)},
    }
    write_json(hidden / MANIFEST, manifest)
    sync(hidden)
    aside = None
    if target.exists():  # damaged, or `start` had refused
        aside = folder / f".step-{step}.{run}-damaged.tmp"
        log.warning("replacing damaged checkpoint %s", target)
        target.rename(aside)
    hidden.rename(target)
    sync(folder)
    beside = folder / f".{LATEST}.{run}"
    _write(beside, target.name + "\n")
    os.replace(beside, folder / LATEST)
    sync(folder)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write and flush. -> the file's entry for the manifest"""
    return _write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> dict[str, Any]:
    data = text.encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# -- keeping ----------------------------------------------------------------------------------------------------------


def prune(folder: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints: all but the newest `keep_last` and those whose step is a multiple of `keep_every`.

    Only complete checkpoints count, so a damaged one never pushes a good one out; damaged ones are left for the eye. -> deleted
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would delete the only way back; keep at least 1")
    good = [path for path in published(Path(folder)) if not damage(path)]
    gone = []
    for path in good[keep_last:]:
        if keep_every and (step_of(path) or 0) % keep_every == 0:
            continue
        doomed = path.with_name(f".{path.name}.pruned.tmp")
        with suppress(OSError):
            path.rename(doomed)  # at once: a half-deleted folder must not look like a checkpoint
            shutil.rmtree(doomed, ignore_errors=True)
            gone.append(path)
    return gone


def remove_unfinished(folder: Path) -> list[Path]:
    """Delete what interrupted saves left behind. Only for whoever holds the run folder: a save under way looks the same."""
    gone = []
    for path in Path(folder).glob(".*"):
        if _UNFINISHED.match(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
        elif path.name.startswith(f".{LATEST}."):
            path.unlink(missing_ok=True)
    return gone
