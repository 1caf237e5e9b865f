"""torch.distributed.checkpoint, quietly: its one process without a group is no warning, its failures are one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from .files import CheckpointError, NotWritten

ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # torch warns of one process without a group


@contextmanager
def plainly(doing: str) -> Iterator[None]:
    """torch reports failures of all ranks with their traces, as a BaseException; one line is what a person needs."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=ALONE)
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):  # a signal has asked this process to stop
            raise cause from None
        kind = NotWritten if isinstance(cause, OSError) else CheckpointError
        raise kind(f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}") from None
    except CheckpointError:
        raise
    except Exception as error:
        kind = NotWritten if isinstance(error, OSError) else CheckpointError
        raise kind(f"{doing} failed: {type(error).__name__}: {error}") from error
