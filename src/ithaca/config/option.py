"""How a field of the config is declared and read back.

`option(default, "help")` puts everything about a field beside it, in the dataclass field's metadata: the explanation, the
unit (`tokens` or `bytes`, which lets `1M` and `80GB` in), the allowed words and the range. Loading, checking and
docs/reference/config.md all read it from there, so they cannot disagree. Types are the annotations themselves; `kind_of` turns one
into a `Kind`. Only what the schema uses is understood: int, float, bool, str, None, tuples, sections, and unions.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

LARGEST = 2**63 - 1  # of a whole number: what numpy and torch hold


def option(default: Any, help: str, **about: Any) -> Any:
    """A field with a default. about: unit, choices, path, least, most, above, below (see `Range`)."""
    return field(default=default, metadata={"help": help, **about})


def required(help: str, **about: Any) -> Any:
    """A field that every run has to give."""
    return field(metadata={"help": help, **about})


@dataclass(frozen=True)
class Kind:
    """What a field takes, read from its annotation."""

    scalars: tuple[type, ...] = ()  # of bool, int, float, str: in the order they are tried
    items: tuple[Kind, ...] = ()  # of a tuple; one kind stands for all items unless `length` is set
    length: int | None = None
    section: type | None = None
    optional: bool = False  # null is allowed


@cache
def kinds(cls: type) -> dict[str, Kind]:
    hints = typing.get_type_hints(cls)
    return {setting.name: kind_of(hints[setting.name]) for setting in fields(cls)}


def kind_of(hint: Any) -> Kind:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    scalars, items, length, inner = [], (), None, None
    for part in parts:
        if typing.get_origin(part) is tuple:
            inside = typing.get_args(part)
            length = None if inside[-1] is Ellipsis else len(inside)
            items = tuple(kind_of(item) for item in inside if item is not Ellipsis)
        elif is_dataclass(part):
            inner = part
        elif part is not type(None):
            assert part in (bool, int, float, str), f"the schema has a type that is not understood: {part}"
            scalars.append(part)
    order = (bool, int, float, str)
    return Kind(
        tuple(sorted(scalars, key=order.index)),
        items,
        length,
        inner,  # pyright: ignore[reportArgumentType]
        type(None) in parts,
    )


def accepts(kind: Kind, value: Any) -> bool:
    """Is a Python value of this kind? Whole numbers pass for numbers; booleans for nothing but booleans."""
    if value is None:
        return kind.optional
    if isinstance(value, tuple):
        if not kind.items or (kind.length is not None and len(value) != kind.length):
            return False
        return all(accepts(kind.items[i if kind.length else 0], item) for i, item in enumerate(value))
    if kind.section is not None and isinstance(value, kind.section):
        return True
    if isinstance(value, bool):
        return bool in kind.scalars
    return isinstance(value, (*kind.scalars, int) if float in kind.scalars else kind.scalars)


def expectation(kind: Kind, about: typing.Mapping[str, Any]) -> str:
    """In words: what may stand here."""
    if about.get("choices"):
        words = "one of " + ", ".join(about["choices"])
    elif kind.section is not None:
        words = "a section (key: value lines)"
    else:
        words = " or ".join(_words(scalar, about) for scalar in kind.scalars)
        if kind.items:
            inside = "sections" if kind.items[0].section else {str: "texts"}.get(kind.items[0].scalars[0], "numbers")
            count = f"{kind.length} " if kind.length else ""
            words += (" or " if words else "") + f"a list of {count}{inside}"
    return words + (" or null" if kind.optional else "")


def _words(scalar: type, about: typing.Mapping[str, Any]) -> str:
    if scalar is int and about.get("unit") == "tokens":
        return "a number of tokens such as 4096, 64K or 1M"
    if scalar is int and about.get("unit") == "bytes":
        return "a number of bytes such as 80GB or 64GiB"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[scalar]


def out_of_range(about: typing.Mapping[str, Any], value: float) -> str | None:
    """'must be at least 1', or None. least and most are included, above and below are not. No whole number is above LARGEST."""
    tests = {
        "least": ("at least", lambda limit: value >= limit),
        "most": ("at most", lambda limit: value <= limit),
        "above": ("above", lambda limit: value > limit),
        "below": ("below", lambda limit: value < limit),
    }
    if isinstance(value, int):
        about = {"most": LARGEST, **about}
    wrong = [
        f"{words} {about[name]}" for name, (words, good) in tests.items() if name in about and not good(about[name])
    ]
    return f"must be {' and '.join(wrong)}" if wrong else None


def about(cls: type, setting: Field) -> dict[str, Any]:
    """The metadata of a field; the help of the fields of `Stack` is the docstring under each one."""
    help = {} if "help" in setting.metadata else {"help": docstrings(cls).get(setting.name, "")}
    return {**help, **setting.metadata}


@cache
def docstrings(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass and its bases, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for declared, text in zip(body.body, body.body[1:], strict=False):
            if not isinstance(declared, ast.AnnAssign) or not isinstance(declared.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[declared.target.id] = " ".join(str(text.value.value).split())
    return texts


def has_default(setting: Field) -> bool:
    return setting.default is not MISSING or setting.default_factory is not MISSING


def default_of(setting: Field) -> Any:
    return setting.default if setting.default is not MISSING else setting.default_factory()  # pyright: ignore[reportCallIssue]
