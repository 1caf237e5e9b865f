"""Which checkpoints stay, and what interrupted saves have left. No torch here."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from .check import values
from .files import changed, named_best, published, read_manifest, run_of, touched, unusable
from .place import BEST, place_of, step_of

log = logging.getLogger("ithaca")


def prune(folder: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints: all but the newest `keep_last`, those whose step is a multiple of `keep_every`, and what BEST names.

    Only good checkpoints count, so a damaged one never pushes a good one out; damaged ones are left for the eye. Good means:
    complete, its numbers finite, and no file touched since it was hashed on its way to the disk; one that was touched is read, and
    so is one of an older ithaca, which did not look at numbers. -> deleted
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would delete the only way back; keep at least 1")
    folder = Path(folder)
    place, run, best = place_of(folder), run_of(folder), named_best(folder)
    kept, removed = 0, []
    for path in published(folder):
        if kept < keep_last:
            kept += _good(path, run)
        elif path != best and not unusable(path, run) and not (keep_every and (step_of(path) or 0) % keep_every == 0):
            with suppress(OSError):
                place.remove(path)
                removed.append(path)
    return removed


def mark_best(checkpoint: Path) -> None:
    """This one is the best of its folder: the one before may go. A disk that is full costs the mark, not the run."""
    if named_best(checkpoint.parent) == checkpoint:
        return
    try:
        place_of(checkpoint).write_line(checkpoint.parent / BEST, checkpoint.name)
    except OSError as error:
        log.warning("%s could not be replaced (%s); it should name %s", BEST, error.strerror, checkpoint.name)


def _good(path: Path, run: str | None) -> bool:
    problems = unusable(path, run)
    if not problems:
        names = touched(path)
        problems = changed(path, names)
        if not problems and (names or not read_manifest(path).get("finite")):
            problems = values(path)
    if problems:
        log.warning("checkpoint %s is damaged and does not count as one to keep: %s", path, "; ".join(problems[:3]))
    return not problems


def unfinished(folder: Path) -> list[Path]:
    """What interrupted saves have left, or a save under way is writing."""
    return sorted(path for path in place_of(Path(folder)).entries() if step_of(path) is None)


def remove_unfinished(folder: Path) -> list[Path]:
    """Delete what interrupted saves left behind. Only for whoever holds the run folder: a save under way looks the same."""
    place, drafts = place_of(Path(folder)), unfinished(folder)
    for path in drafts:
        place.remove(path)
    place.sweep()
    return drafts
