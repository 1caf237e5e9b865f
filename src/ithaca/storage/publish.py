"""How a checkpoint comes about: whole or not at all. No torch here.

torch's own checkpoint writer neither completes a folder at once nor notices when bytes change, so this is what makes one
trustworthy:

1. everything is written into a draft, `.step-N.SAVE.tmp`; a name is never used twice;
2. `manifest.json` lists size and SHA-256 of every file, with the run and the step;
3. all of it is flushed to disk, and the draft becomes `step-N` at once (a rename, where place.py has folders): it is published;
4. `LATEST` names it, replaced as a whole.

A kill at any moment leaves the older checkpoints as they were, and at most a draft that `remove_unfinished` deletes.
All of this is for one process, rank 0; ranks.py tells the others how it went.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.faults import reach
from ..base.units import format_bytes
from .check import verify
from .digest import BLOCK, joined
from .files import FORMAT, MANIFEST, CheckpointError, NotWritten, run_of
from .place import LATEST, RUN, place_of

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
    """Begin the draft of a checkpoint of about `need` bytes; refuse what could not be finished."""
    place, target, save = place_of(folder), folder / f"step-{step}", uuid.uuid4().hex[:8]
    try:
        if place.has(target) and not verify(target):  # every byte: it is read once, or trained for nothing
            raise CheckpointError(
                f"{target} exists already, and a published checkpoint is never overwritten; move it away, or go on from it"
            )
        free = place.room()
        if free < need:
            raise NotWritten(
                f"not enough disk for a checkpoint in {folder}: it needs {format_bytes(need)}, {format_bytes(free)} are free; "
                "free some space, or keep fewer checkpoints (checkpoint.keep_last)"
            )
        draft = Draft(folder / f".step-{step}.{save}.tmp", step, _claim(folder), save)
        place.begin(draft.hidden)
    except OSError as error:
        raise NotWritten(f"{folder} cannot take a checkpoint ({error.strerror}); choose another folder") from None
    return draft


def _claim(folder: Path) -> str:
    """The id of the run these checkpoints belong to, written down with the first."""
    run = run_of(folder) or uuid.uuid4().hex[:16]
    place = place_of(folder)
    try:
        place.open(folder / RUN).close()
    except FileNotFoundError:
        place.write_line(folder / RUN, run)
    except (OSError, ValueError):  # something is there: `begin` says whether that matters
        pass
    return run


def publish(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Manifest, flush, the draft becomes step-N, LATEST. -> step-N"""
    hidden, target = draft.hidden, draft.target
    place = place_of(hidden)
    present = set(place.files(hidden))
    if missing := sorted(set(files) - present):
        raise NotWritten(
            f"{hidden} has lost {', '.join(missing[:3])} while it was written: did somebody delete files there?"
        )
    if extra := sorted(present - set(files)):
        raise CheckpointError(
            f"{hidden} holds {', '.join(extra[:3])}, which was not written there; it was not published"
        )
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
    reach("save.before_rename", draft.step)
    place.publish(hidden, target)
    reach("save.before_latest", draft.step)
    try:
        place.write_line(target.parent / LATEST, target.name)
    except OSError as error:  # the checkpoint counts with or without it
        log.warning("%s could not be replaced (%s); %s is published all the same", LATEST, error.strerror, target)
    return target


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write and flush a file of a draft. -> its entry for the manifest"""
    data = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    blocks = [memoryview(data)[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    sink = place_of(path.parent).create(path)
    try:
        for number, block in enumerate(blocks):
            sink.write(block, number)
        modified = sink.finish()
    finally:
        sink.close()
    digest = joined([hashlib.sha256(block).digest() for block in blocks])
    return {"size": len(data), "sha256": digest, "modified": modified}


def probe(folder: Path) -> None:
    """Try what a save will do, before anything is trained: a draft, a file in it, publishing (under a name of drafts), removing."""
    place = place_of(folder)
    trial = folder / f".step-0.{uuid.uuid4().hex[:8]}.tmp"
    renamed = trial.with_name(f".step-0.{uuid.uuid4().hex[:8]}-probe.tmp")
    try:
        place.begin(trial)
        write_json(trial / "probe", {})
        place.publish(trial, renamed)
        place.remove(renamed)
    except OSError as error:
        for draft in (trial, renamed):
            with suppress(OSError):
                place.remove(draft)
        raise CheckpointError(
            f"checkpoints cannot be written to {folder} ({error.strerror}); nothing was trained. Make it writable, or choose "
            "another run.folder"
        ) from None
