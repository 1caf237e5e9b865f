"""One rank acts, all ranks know the outcome.

A rank that fails alone in a file operation leaves the others waiting in their next collective, for ever. So whatever only some
ranks do is wrapped here: results and errors reach everybody, and everybody raises the same `CheckpointError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..mesh import Mesh
from .files import CheckpointError

log = logging.getLogger("ithaca")
Result = TypeVar("Result")


def alone(mesh: Mesh) -> bool:
    """Whether there is nobody to talk to; a rank-of-N run has no peers either."""
    return mesh.world.pg is None or dist.get_backend(mesh.world.pg) == "fake"


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    if alone(mesh):
        return [value]
    found: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(found, value, group=mesh.world.pg)
    return found


def each(mesh: Mesh, act: Callable[[], Result]) -> Result:
    """Call on every rank; if one fails, all raise. -> this rank's result"""
    result, error = _try(act)
    try:
        mesh.agree(error)
    except ValueError as problem:
        raise CheckpointError(str(problem)) from None
    return result


def first(mesh: Mesh, act: Callable[[], Result]) -> Result:
    """Call on rank 0 only; all ranks get its result, or raise its error."""
    outcome = [_try(act) if mesh.world.rank == 0 else (None, None)]
    if not alone(mesh):
        dist.broadcast_object_list(outcome, src=0, group=mesh.world.pg)
    result, error = outcome[0]
    if error:
        raise CheckpointError(error)
    return result  # pyright: ignore[reportReturnType]


def _try(act: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return act(), None
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    except Exception as error:  # a bug here must not hang the other ranks
        log.exception("unexpected")
        return None, f"{type(error).__name__}: {error}"
