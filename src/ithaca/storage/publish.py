"""How a checkpoint comes about: whole or not at all. No torch here.

torch's own checkpoint writer neither completes a folder at once nor notices when bytes change, so this is what makes one
trustworthy:

1. everything is written into a hidden sibling, `.step-N.SAVE.tmp`; a name is never used twice;
2. `manifest.json` lists size and SHA-256 of every file, with the run and the step;
3. files and folder are flushed to disk, and the folder is renamed to `step-N`: from then on it is published;
4. `LATEST` names it, replaced as a whole.

A kill at any moment leaves the older checkpoints as they were, and at most a hidden folder that `remove_unfinished` deletes.
All of this is for one process, rank 0; ranks.py tells the others how it went.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.faults import reach
from ..base.files import naming, sync, write_atomically
from ..base.units import format_bytes
from .check import verify
from .digest import BLOCK, joined
from .files import FORMAT, LATEST, MANIFEST, RUN, CheckpointError, NotWritten, run_of

log = logging.getLogger("ithaca")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    hidden: Path
    step: int
    run: str  # the same for all checkpoints of a run
    save: str  # of this one only

    @property
    def target(self) -> Path:
        return self.hidden.parent / f"step-{self.step}"


def start(folder: Path, step: int, need: int) -> Draft:
    """Make the hidden folder for a checkpoint of about `need` bytes; refuse what could not be finished."""
    target, save = folder / f"step-{step}", uuid.uuid4().hex[:8]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists() and not verify(target):  # every byte: it is read once, or trained for nothing
            raise CheckpointError(
                f"{target} exists already, and a published checkpoint is never overwritten; move it away, or go on from it"
            )
        free = shutil.disk_usage(folder).free
        if free < need:
            raise NotWritten(
                f"not enough disk for a checkpoint in {folder}: it needs {format_bytes(need)}, {format_bytes(free)} are free; "
                "free some space, or keep fewer checkpoints (checkpoint.keep_last)"
            )
        draft = Draft(folder / f".step-{step}.{save}.tmp", step, _claim(folder), save)
        draft.hidden.mkdir()
    except OSError as error:
        raise NotWritten(f"{folder} cannot take a checkpoint ({error.strerror}); choose another folder") from None
    return draft


def _claim(folder: Path) -> str:
    """The id of the run these checkpoints belong to, written down with the first."""
    run = run_of(folder) or uuid.uuid4().hex[:16]
    if not (folder / RUN).exists():
        write_atomically(folder / RUN, run + "\n")
    return run


def publish(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Manifest, flush, rename, LATEST. -> step-N"""
    hidden, target = draft.hidden, draft.target
    folder = hidden.parent
    present = {path.name for path in hidden.iterdir()}
    if missing := sorted(set(files) - present):
        raise NotWritten(
            f"{hidden} has lost {', '.join(missing[:3])} while it was written: did somebody delete files there?"
        )
    if odd := sorted(present - set(files)):
        raise CheckpointError(f"{hidden} holds {', '.join(odd[:3])}, which was not written there; it was not published")
    reach("save.before_manifest", draft.step)
    manifest = {
        "format": FORMAT,
        "run": draft.run,
        "save": draft.save,
        "step": draft.step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "block": BLOCK,
        "finite": True,  # `save` has looked at every number; whoever cleans up need not (keep.py)
        "files": {name: dict(files[name]) for name in sorted(files)},
    }
    write_json(hidden / MANIFEST, manifest)
    sync(hidden)
    reach("save.before_rename", draft.step)
    aside = None
    if target.exists():  # damaged, or `start` had refused
        aside = folder / f".step-{draft.step}.{draft.save}-damaged.tmp"
        log.warning("replacing damaged checkpoint %s", target)
        target.rename(aside)
    hidden.rename(target)
    sync(folder)
    reach("save.before_latest", draft.step)
    _point_to(target)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _point_to(target: Path) -> None:
    """Replace LATEST. The checkpoint counts with or without it, so a disk that has no room for it left is no reason to fail."""
    try:
        write_atomically(target.parent / LATEST, target.name + "\n")
        sync(target.parent)
    except OSError as error:
        log.warning("%s could not be replaced (%s); %s is published all the same", LATEST, error.strerror, target)


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write and flush. -> the file's entry for the manifest"""
    data = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    blocks = [hashlib.sha256(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK)]
    return {"size": len(data), "sha256": joined(blocks), "modified": path.stat().st_mtime_ns}


def probe(folder: Path) -> None:
    """Try what a save will do, before anything is trained: make the folder, a file in a folder of its own, flush, rename."""
    trial = folder / f".step-0.{uuid.uuid4().hex[:8]}.tmp"
    renamed = trial.with_name(f".step-0.{uuid.uuid4().hex[:8]}-probe.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.mkdir()
        write_json(trial / "probe", {})
        trial.rename(renamed)
        sync(folder)
        shutil.rmtree(renamed)
    except OSError as error:
        for each in (trial, renamed):
            with suppress(OSError):
                shutil.rmtree(each)
        raise CheckpointError(
            f"checkpoints cannot be written to {folder} ({error.strerror}); nothing was trained. Make it writable, or choose "
            "another run.folder"
        ) from None
