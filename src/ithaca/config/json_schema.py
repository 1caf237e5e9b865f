"""The YAML of a run as a JSON Schema (2020-12), for editors that complete and check it: `ithaca config schema`.

Made from the same dataclasses as docs/reference/config.md. It says what `load` takes of one value: type, choices, range, names.
What values say together, and what must be given (which a recipe or the command line may do), is left to `ithaca train --check`.
Numbers may be written as YAML reads them; what YAML takes for text and `load` for a number (1e-5) is a pattern here.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from ..stack import CHOICES, PER_LAYER, Stack
from .option import Kind, about, default_of, has_default, kinds
from .schema import Config, StackOptions

_NUMBER = {"type": "string", "pattern": r"^[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+$"}
_SIZES = {
    "tokens": {"type": "string", "pattern": r"^[0-9]+(_[0-9]+)*(\.[0-9]+)? *[KMGkmg]?$"},
    "bytes": {"type": "string", "pattern": r"^[0-9]+(_[0-9]+)*(\.[0-9]+)? *([KMGTkmgt]?[Ii]?[Bb])?$"},
}
_LIMITS = {"least": "minimum", "most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def json_schema() -> dict[str, Any]:
    sections: dict[str, Any] = {}
    top = _section(Config, sections)
    top["properties"] = {
        "recipe": {"type": ["string", "null"], "description": "A recipe that this file lies over (ithaca recipes ls)."},
        **top["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of ithaca",
        **top,
        "$defs": sections,
    }


def _section(cls: type, sections: dict[str, Any]) -> dict[str, Any]:
    properties = {}
    for setting in fields(cls):
        facts = about(cls, setting)
        if issubclass(cls, Stack) and setting.name in CHOICES:  # of which a stack's fields have words of their own
            facts = {**facts, "choices": CHOICES[setting.name], "free": setting.name in PER_LAYER}
        entry = _value(kinds(cls)[setting.name], facts, sections)
        if facts["help"]:
            entry["description"] = facts["help"]
        if has_default(setting) and isinstance(default := default_of(setting), str | int | float | tuple | None):
            entry["default"] = list(default) if isinstance(default, tuple) else default
        properties[setting.name] = entry
    words = " ".join((inspect.getdoc(cls) or "").split())
    return {"type": "object", "description": words, "properties": properties, "additionalProperties": False}


def _value(kind: Kind, facts: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """What may stand for a field: one of several, where there are several."""
    ways = [_scalar(scalar, facts) for scalar in kind.scalars]
    if int in kind.scalars and facts.get("unit"):
        ways.append(_SIZES[facts["unit"]])
    elif float in kind.scalars and str not in kind.scalars:
        ways.append(_NUMBER)
    if kind.section is not None:
        ways.append(_reference(kind.section, sections))
        if kind.section is StackOptions:
            ways.append({"const": "auto"})
    if kind.items:
        inner = [_value(item, facts, sections) for item in kind.items]
        if kind.length is None:
            ways.append({"type": "array", "items": inner[0]})
            if kind.items[0].scalars == (str,):
                ways.append(inner[0])  # a list of one need not be a list
            elif kind.items[0].section is not None:
                ways.append({"type": "string"})
        else:
            ways.append({"type": "array", "prefixItems": inner, "minItems": kind.length, "maxItems": kind.length})
    # an empty section is one with nothing to say
    if kind.optional or kind.section is not None:
        ways.append({"type": "null"})
    return dict(ways[0]) if len(ways) == 1 else {"anyOf": ways}


def _scalar(scalar: type, facts: dict[str, Any]) -> dict[str, Any]:
    if scalar is bool:
        return {"type": "boolean"}
    if scalar is str:
        choices = facts.get("choices")
        return {"enum": list(choices)} if choices and not facts.get("free") else {"type": "string"}
    limits = {word: facts[name] for name, word in _LIMITS.items() if name in facts}
    return {"type": "integer" if scalar is int else "number", **limits}


def _reference(cls: type, sections: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in sections:
        sections[cls.__name__] = {}  # one that holds itself would be walked for ever
        sections[cls.__name__] = _section(cls, sections)
    entry = {"$ref": f"#/$defs/{cls.__name__}"}
    short = getattr(cls, "SHORT", None)
    return {"anyOf": [entry, {"type": "string"}]} if short else entry
