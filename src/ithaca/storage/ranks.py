"""One rank acts, all ranks know the outcome.

A rank that fails alone in a file operation leaves the others waiting in their next collective, for ever. So whatever only some
ranks do is wrapped here: results and errors reach everybody, and everybody raises the same `CheckpointError`, of the same kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..mesh import Mesh
from .files import CheckpointError, Damaged, Gone, NotFiniteValues, NotWritten

log = logging.getLogger("ithaca")
Result = TypeVar("Result")
Problem = tuple[str, str]  # kind of the error, and its words: exceptions themselves do not travel well
_KINDS = {kind.__name__: kind for kind in (CheckpointError, Damaged, Gone, NotFiniteValues, NotWritten)}


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    if mesh.world.peerless:
        return [value]
    found: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(found, value, group=mesh.world.pg)
    return found


def each(mesh: Mesh, act: Callable[[], Result]) -> Result:
    """Call on every rank; if one fails, all raise. -> this rank's result"""
    result, problem = _try(act)
    bad = [(rank, each) for rank, each in enumerate(gather(mesh, problem)) if each is not None]
    if bad:
        rank, (kind, text) = bad[0]
        more = f" ({len(bad)} of {mesh.world.size} ranks report an error)" if len(bad) > 1 else ""
        raise _KINDS[kind](text if mesh.world.size == 1 else f"rank {rank}: {text}{more}")
    return result


def first(mesh: Mesh, act: Callable[[], Result]) -> Result:
    """Call on rank 0 only; all ranks get its result, or raise its error."""
    outcome = [_try(act) if mesh.world.rank == 0 else (None, None)]
    if not mesh.world.peerless:
        dist.broadcast_object_list(outcome, src=0, group=mesh.world.pg)
    result, problem = outcome[0]
    if problem is not None:
        raise _KINDS[problem[0]](problem[1])
    return result  # pyright: ignore[reportReturnType]


def _try(act: Callable[[], Any]) -> tuple[Any, Problem | None]:
    try:
        return act(), None
    except CheckpointError as error:
        return None, (type(error).__name__, str(error))
    except ValueError as error:
        return None, ("CheckpointError", str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return None, ("NotWritten", f"{error.strerror or error}{where}")
    except Exception as error:  # a bug here must not hang the other ranks
        log.exception("unexpected")
        return None, ("CheckpointError", f"{type(error).__name__}: {error}")
