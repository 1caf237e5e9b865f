"""What a received JSON file must hold, field by field, and words for the first thing that it does not.

    STATE = {"step": COUNT, "world": {"size": COUNT, "stack": TABLE}, "rng": [TEXT], "note?": TEXT}
    wrong(state, STATE)     # "world.size is -1, which is no whole number from 0 on", or None

A dict is an object with these fields (with `?` at the end: it may be missing), a list of one is a list of such, `Table` an object
with any names, `OrNull` may be null. Fields that are not named are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MOST = 1 << 62


@dataclass(frozen=True)
class Rule:
    words: str
    good: Callable[[Any], bool]


@dataclass(frozen=True)
class Table:
    """An object whose values are all alike."""

    inner: Any


@dataclass(frozen=True)
class OrNull:
    inner: Any


COUNT = Rule("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < _MOST)
POSITIVE = Rule("a whole number from 1 on", lambda value: type(value) is int and 1 <= value < _MOST)
WHOLE = Rule("a whole number", lambda value: type(value) is int and -_MOST < value < _MOST)
NUMBER = Rule("a number", lambda value: type(value) in (int, float) and -1e300 < value < 1e300)
TEXT = Rule("a text", lambda value: isinstance(value, str))
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
ANYTHING = Rule("anything", lambda value: True)


def one_of(*values: Any) -> Rule:
    return Rule(
        f"one of {', '.join(map(str, values))}",
        lambda value: any(value is allowed or value == allowed for allowed in values),
    )


def wrong(value: Any, want: Any, name: str = "") -> str | None:
    """The first field that is not what it must be, in words; None: all are."""
    if isinstance(want, OrNull):
        return None if value is None else wrong(value, want.inner, name)
    if isinstance(want, Rule):
        return None if want.good(value) else f"{name or 'it'} is {shown(value)}, not {want.words}"
    if isinstance(want, list):
        if not isinstance(value, list):
            return f"{name or 'it'} is {shown(value)}, not a list"
        problems = (wrong(item, want[0], f"{name}[{at}]") for at, item in enumerate(value))
    elif not isinstance(value, dict):
        return f"{name or 'it'} is {shown(value)}, not an object"
    elif isinstance(want, Table):
        problems = (wrong(item, want.inner, _below(name, key)) for key, item in value.items())
    else:
        missing = [key for key in want if not key.endswith("?") and key not in value]
        if missing:
            return f"{_below(name, missing[0])} is missing"
        names = {key.removesuffix("?"): inner for key, inner in want.items()}
        problems = (wrong(value[key], inner, _below(name, key)) for key, inner in names.items() if key in value)
    return next((problem for problem in problems if problem is not None), None)


def shown(value: Any) -> str:
    """A value in a message: short, on one line."""
    text = repr(value) if not isinstance(value, int) or abs(value) < _MOST else "a number of too many digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _below(name: str, key: str) -> str:
    return f"{name}.{key[:80]}" if name else key[:80]
