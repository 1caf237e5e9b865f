"""How ranks act together on checkpoints: whatever fails on one of them, all raise a `CheckpointError` of the same kind."""

from __future__ import annotations

from functools import partial

from ..engine import ranks
from .files import CheckpointError, NotWritten


def _checkpoint_error(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return NotWritten(f"{error.strerror or error}{where}")
    return CheckpointError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


on_all_ranks = partial(ranks.on_all_ranks, as_error=_checkpoint_error)
on_rank0 = partial(ranks.on_rank0, as_error=_checkpoint_error)
