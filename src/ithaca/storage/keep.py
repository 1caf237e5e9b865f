"""Which checkpoints stay, and what interrupted saves have left. No torch here."""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ..base.files import remove_halves
from .check import values
from .files import LATEST, RUN, changed, published, read_manifest, run_of, step_of, touched, why_not

log = logging.getLogger("ithaca")

_UNFINISHED = re.compile(r"\.step-\d+\..*\.tmp$")


def prune(folder: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints: all but the newest `keep_last` and those whose step is a multiple of `keep_every`.

    Only good checkpoints count, so a damaged one never pushes a good one out; damaged ones are left for the eye. Good means:
    complete, its numbers finite, and no file touched since it was hashed on its way to the disk; one that was touched is read, and
    so is one of an older ithaca, which did not look at numbers. -> deleted
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would delete the only way back; keep at least 1")
    folder = Path(folder)
    run, kept, gone = run_of(folder), 0, []
    for path in published(folder):
        if kept < keep_last:
            kept += _good(path, run)
        elif not why_not(path, run) and not (keep_every and (step_of(path) or 0) % keep_every == 0):
            doomed = path.with_name(f".{path.name}.pruned.tmp")
            with suppress(OSError):
                path.rename(doomed)  # at once: a half-deleted folder must not look like a checkpoint
                shutil.rmtree(doomed, ignore_errors=True)
                gone.append(path)
    return gone


def _good(path: Path, run: str | None) -> bool:
    problems = why_not(path, run)
    if not problems:
        odd = touched(path)
        problems = changed(path, odd)
        if not problems and (odd or not read_manifest(path).get("finite")):
            problems = values(path)
    if problems:
        log.warning("checkpoint %s is damaged and does not count as one to keep: %s", path, "; ".join(problems[:3]))
    return not problems


def unfinished(folder: Path) -> list[Path]:
    """What interrupted saves have left, or a save under way is writing."""
    return sorted(path for path in Path(folder).glob(".step-*") if _UNFINISHED.match(path.name) and path.is_dir())


def remove_unfinished(folder: Path) -> list[Path]:
    """Delete what interrupted saves left behind. Only for whoever holds the run folder: a save under way looks the same."""
    gone = unfinished(folder)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    for name in (LATEST, RUN):
        remove_halves(Path(folder) / name)
    return gone
