"""Values from files that somebody else wrote: the number, text or table that is there, or None.

A page is drawn in JavaScript, where one text in place of a number shows up as NaN somewhere far away. So every value passes
through here before it goes into the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from ...base import holding

CATEGORIES = tuple(holding.CATEGORIES)
"""What holds memory, in stacking order. Others may come; they are stacked behind these."""


def number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if isfinite(value) else None
    except OverflowError:  # an int beyond what a float holds
        return None


def positive(value: Any) -> int | float | None:
    """A number above zero: a size or a time that was measured."""
    amount = number(value)
    return amount if amount is not None and amount > 0 else None


def text(value: Any) -> str | None:
    """A short text; a number is one too."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    return str(value) or None


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def at(record: Any, *names: str) -> Any:
    """record[name][name]..., or None where the path ends early."""
    for name in names:
        record = table(record).get(name)
    return record


def parts(value: Any) -> dict[str, int | float]:
    """Sizes by category, in stacking order, without those that are nothing."""
    sizes = {name: positive(size) for name, size in table(value).items()}
    return {name: sizes[name] for name in ordered(sizes) if sizes[name] is not None}  # pyright: ignore[reportReturnType]


def ordered(names: Iterable[str]) -> list[str]:
    """Categories in stacking order; unknown ones behind them, as they come."""
    names = list(names)
    return [name for name in CATEGORIES if name in names] + [name for name in names if name not in CATEGORIES]


def said(value: Any) -> str:
    """A setting as a person writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        runs: list[list[Any]] = []  # one for each layer: ["layer", "layer", "none"] -> "2 × layer, none"
        for word in map(said, value):
            if runs and runs[-1][0] == word:
                runs[-1][1] += 1
            else:
                runs.append([word, 1])
        if len(runs) == 1:
            return runs[0][0]
        return ", ".join(word if count == 1 else f"{count} × {word}" for word, count in runs)
    return str(value)
