"""Some ranks act, all ranks know the outcome.

A rank that fails alone leaves the others waiting in their next collective, for ever. So whatever may fail on one rank only (files,
disks, memory, choices that hosts would make differently) is called through here: results and errors reach everybody, and everybody
raises the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..base.exits import Failed, code_of
from .mesh import Group

log = logging.getLogger("ithaca")
Result = TypeVar("Result")


def world_group() -> Group:
    """Everybody, before there is a mesh."""
    if not dist.is_initialized():
        return Group(1, 0, None)
    size = dist.get_world_size()
    return Group(size, dist.get_rank(), dist.group.WORLD if size > 1 else None)


def gather(group: Group, value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    if group.peerless:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.pg)
    return values


def on_all_ranks(
    group: Group, act: Callable[[], Result], as_error: Callable[[Exception], Exception] | None = None
) -> Result:
    """Call on every rank; if one fails, all raise its error. -> this rank's result

    as_error: how an exception is told, where another kind should be raised."""
    result, problem = _try(act, as_error)
    problems = [(rank, problem) for rank, problem in enumerate(gather(group, problem)) if problem is not None]
    if problems:
        rank, problem = problems[0]
        more = f" ({len(problems)} of {group.size} ranks report an error)" if len(problems) > 1 else ""
        raise _error(problem, "" if group.size == 1 else f"rank {rank}: ", more)
    return result  # pyright: ignore[reportReturnType]


def on_rank0(
    group: Group, act: Callable[[], Result], as_error: Callable[[Exception], Exception] | None = None
) -> Result:
    """Call on rank 0 only; all ranks get its result, or raise its error."""
    outcome = [_try(act, as_error) if group.rank == 0 else (None, None)]
    if not group.peerless:
        dist.broadcast_object_list(outcome, src=0, group=group.pg)
    result, problem = outcome[0]
    if problem is not None:
        raise _error(problem)
    return result  # pyright: ignore[reportReturnType]


Problem = tuple[type[Exception], int, str]  # kind, exit code, words: exceptions themselves do not travel well


def _try(act: Callable[[], Any], as_error: Callable[[Exception], Exception] | None) -> tuple[Any, Problem | None]:
    try:
        return act(), None
    except Exception as error:  # whatever it is, it must not hang the other ranks
        failure = error if as_error is None else as_error(error)
        if failure is not error or isinstance(error, (ValueError, OSError, Failed)):
            # of ours its own kind: others, such as UnicodeDecodeError, cannot be made from words alone
            kind = type(failure) if type(failure).__module__.startswith("ithaca.") else ValueError
            return None, (kind, code_of(failure), str(failure))
        log.exception("unexpected")
        code = code_of(error)  # memory that ran out is told as such
        return None, (RuntimeError if code == 1 else Failed, code, f"{type(error).__name__}: {error}")


def _error(problem: Problem, before: str = "", after: str = "") -> Exception:
    kind, exit_code, words = problem
    words = f"{before}{words}{after}"
    return Failed(exit_code, words) if issubclass(kind, Failed) else kind(words)
