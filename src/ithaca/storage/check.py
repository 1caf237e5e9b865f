"""Is a checkpoint whole, and what was saved? Light to import: torch comes in when numbers are looked at."""

from __future__ import annotations

from pathlib import Path

from .digest import Progress
from .files import CheckpointError, changed, damage, listed, read_state, unlisted


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with a checkpoint, every byte read, and every number if those are right. Empty: good."""
    path = Path(path)
    problems = damage(path)
    if problems:
        return problems
    try:
        problems = changed(path, list(listed(path)), progress)
        read_state(path)
        extra = unlisted(path)
    except (CheckpointError, OSError) as error:
        return [*problems, str(error)]
    return (problems or values(path, progress)) + [f"{name} is not in the manifest" for name in extra]


def values(path: Path, progress: Progress | None = None) -> list[str]:
    """Which tensors of a checkpoint hold numbers that are not finite: an older ithaca may have written it."""
    from .finite import stored_not_finite  # torch, and only here

    try:
        return stored_not_finite(path, None, progress)
    except CheckpointError as error:
        return [str(error)]
