"""A record of a source, with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Record(NamedTuple):
    values: dict[str, Any]
    place: Callable[[], str]  # file and line, in words
    size: int = 0  # bytes read since the record before, for the progress bar


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
