"""`dump`: a config as YAML with every field written out. `load` reads it back equal, and so does any YAML reader:
numbers are written the way YAML 1.1 knows them (1.0e-05), and text that looks like something else is quoted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from .nodes import Place
from .schema import Config, StackOptions

_WORD = re.compile(r"(\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./-]*")
_LINE = re.compile(r"(?P<indent> *)(?P<item>- )?(?P<name>[A-Za-z_]\w*):(?P<rest>.*)")
_ORIGIN = re.compile(r" {2}# (.*)$")
_NOT_TEXT = {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n"}


def dump(config: Config, origins: Mapping[str, Place] | None = None) -> str:
    """The config as YAML. origins: where values came from; each is added as a comment."""
    return "\n".join(_section(config, "", "", origins or {})) + "\n"


def origins(text: str) -> dict[str, Place]:
    """What the comments of such a text say: setting -> where it came from. What lies in lists has none of its own."""
    found: dict[str, Place] = {}
    above: list[tuple[int, str]] = []  # indent and name of the sections around a line; "-" is an item of a list
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        if match["item"] or any(name == "-" for _, name in above):
            above.append((indent, "-"))
            continue
        above.append((indent, match["name"]))
        if place := _ORIGIN.search(match["rest"]):
            found[".".join(name for _, name in above)] = Place(place[1])
    return found


def _section(section: Any, indent: str, path: str, origins: Mapping[str, Place]) -> Iterator[str]:
    for field in fields(section):
        name, value = path + field.name, getattr(section, field.name)
        comment = _comment(origins.get(name))
        if isinstance(value, StackOptions) and value.auto and value.scratch is None:
            yield f"{indent}{field.name}: auto{_comment(origins.get(f'{name}.auto'))}"
        elif isinstance(section, StackOptions) and section.auto and field.name not in ("auto", "scratch"):
            continue  # not chosen yet
        elif is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _section(value, indent + "  ", name + ".", origins)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            yield f"{indent}{field.name}:{comment}"
            for index, item in enumerate(value):
                lines = list(_section(item, indent + "    ", f"{name}[{index}].", origins))
                yield f"{indent}  - {lines[0].lstrip()}"
                yield from lines[1:]
        else:
            yield f"{indent}{field.name}: {as_yaml(value)}{comment}"


def _comment(place: Place | None) -> str:
    """File names may hold anything; a comment ends with its line."""
    return "" if place is None else "  # " + "".join(c if c.isprintable() else "?" for c in str(place))


def as_yaml(value: Any) -> str:
    """One value on one line."""
    import yaml

    if isinstance(value, tuple):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str):
        if _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT:
            return value
        return yaml.safe_dump(value, default_style='"', width=float("inf")).rstrip("\n")
    return yaml.safe_dump(value, width=float("inf")).split("\n")[0]
