"""From a tree of texts to typed values: each text is read as the type of the field it is given to.

The result is flat: `{"train.steps": Given(100, run.yaml:7)}`. Flat values of several files lie over one another by a
dictionary update, and each keeps its place for messages. Everything that is wrong is noted and reading goes on.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping as Table
from dataclasses import dataclass, field, fields
from typing import Any

from ..base.units import parse_bytes, parse_tokens
from .nodes import Mapping, Node, Place, Refused, Scalar, Sequence
from .option import Kind, about, expectation, has_default, kinds
from .schema import Config, StackOptions
from .suggest import close_choice, unknown

_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_DIGITS = (*"0123456789", ".")
_NULL = ("", "~", "null", "none")


@dataclass(frozen=True)
class Given:
    value: Any
    place: Place


class Wrong(Exception):
    """A value that does not fit its field; the text says what does."""


@dataclass
class Reader:
    """Reads sections into `given`; notes problems, and in `failed` the paths they are about."""

    problems: list[str]
    failed: set[str] = field(default_factory=set)
    given: dict[str, Given] = field(default_factory=dict)

    def top(self, tree: Mapping) -> str | None:
        """Read a whole file. Returns the name under `recipe`, the one key that is not a setting."""
        recipe = None
        for key, value in tree.items:
            if key.text == "recipe" and isinstance(value, Scalar):
                recipe = None if value.plain and value.text.lower() in _NULL else value.text
            elif key.text == "recipe":
                self.problem("", key.place, "recipe must be the name of a recipe; 'ithaca recipes ls' lists them")
        self.section(Mapping([pair for pair in tree.items if pair[0].text != "recipe"], tree.place), Config, "")
        return recipe

    def one(self, path: str, node: Node) -> None:
        """Read one value of the command line, `path` being dotted."""
        for name in reversed(path.split(".")):
            node = Mapping([(Scalar(name, node.place), node)], node.place)
        assert isinstance(node, Mapping)
        self.section(node, Config, "")

    def take(self) -> dict[str, Given]:
        """What was read since the last time."""
        given, self.given = self.given, {}
        return given

    def problem(self, path: str, place: Place, text: str) -> None:
        self.problems.append(f"{place}: {text}")
        if path:
            self.failed.add(path)

    def section(self, node: Mapping, cls: type, prefix: str) -> None:
        declared = {setting.name: setting for setting in fields(cls)}
        for key, value in node.items:
            name = key.text if key.text in declared else key.text.replace("-", "_")
            name = getattr(cls, "WAS", {}).get(name, name)  # what it was called in older files
            path = prefix + name
            if name not in declared:
                self.problem("", key.place, unknown(prefix + key.text, [*declared]))
                continue
            kind = kinds(cls)[name]
            if isinstance(value, Refused):
                self.failed.add(path)
            elif kind.section is not None:
                self.inner(value, kind, path)
            else:
                try:
                    facts = about(cls, declared[name])
                    self.given[path] = Given(self.value(value, kind, facts, path), value.place)
                except Wrong as wrong:
                    self.problem(path, value.place, str(wrong))

    def inner(self, node: Node, kind: Kind, path: str) -> None:
        """A section inside a section. Null switches an optional one off and leaves any other as it is."""
        assert kind.section is not None
        if isinstance(node, Mapping):
            if kind.optional and not node.items:
                self.given[path] = Given({}, node.place)  # `lora: {}` = on, with defaults
            if kind.section is StackOptions and kind.optional and node.items:  # of a phase: fields switch auto off
                given = {key.text for key, _ in node.items}
                if "auto" not in given and given - {"scratch"}:
                    self.given[f"{path}.auto"] = Given(False, node.place)
            self.section(node, kind.section, path + ".")
        elif isinstance(node, Scalar) and node.plain and node.text.lower() in _NULL:
            if kind.optional:
                self.given[path] = Given(None, node.place)
        elif isinstance(node, Scalar) and kind.section is StackOptions and node.text == "auto":
            self.given[f"{path}.auto"] = Given(True, node.place)
        elif isinstance(node, Scalar) and node.text and hasattr(kind.section, "SHORT"):
            short = Mapping([(Scalar(kind.section.SHORT, node.place), node)], node.place)  # pyright: ignore
            self.section(short, kind.section, path + ".")
        else:
            also = ", or the word auto" if kind.section is StackOptions else ""
            want = expectation(kind, {}) + also
            self.problem(path, node.place, f"{path}={_shown(node)} must be {want}")

    def value(self, node: Node, kind: Kind, facts: Table[str, Any], path: str) -> Any:
        if isinstance(node, Mapping):
            raise Wrong(f"{path} is a section here, but must be {expectation(kind, facts)}")
        if isinstance(node, Sequence):
            return self.list(node.items, node, kind, facts, path)
        if isinstance(node, Refused):  # inside a list; the problem has been noted
            self.failed.add(path.partition("[")[0])
            raise Wrong(f"{path} cannot be read")
        assert isinstance(node, Scalar)
        if kind.optional and node.plain and node.text.lower() in _NULL:
            return None
        flag = node.place.line is None  # of the command line, where a,b is a list
        if kind.items and (not kind.scalars or (flag and "," in node.text)):
            if not flag and kind.items[0].scalars != (str,) and kind.items[0].section is None:
                raise Wrong(f"{path}={node.text!r} must be {expectation(kind, facts)}")
            texts = [text.strip() for text in node.text.split(",")] if flag else [node.text]
            texts = [] if texts in ([""], ["[]"]) else texts
            return self.list([Scalar(text, node.place, node.plain) for text in texts], node, kind, facts, path)
        value = _scalar(node, kind, facts, path)
        choices = facts.get("choices")
        if choices and value not in choices:
            want = f"{path}={value!r} must be {expectation(kind, facts)}"
            raise Wrong(want + close_choice(str(value), choices))
        return os.path.expanduser(value) if facts.get("path") else value

    def list(self, items: list[Node], node: Node, kind: Kind, facts: Table[str, Any], path: str) -> tuple:
        if not kind.items or (kind.length is not None and len(items) != kind.length):
            raise Wrong(f"{path}={_shown(node)} must be {expectation(kind, facts)}")
        values = []
        for index, item in enumerate(items):
            inside, where = kind.items[index if kind.length else 0], f"{path}[{index}]"
            if inside.section is not None:
                values.append(self.entry(item, inside.section, where))
            else:
                values.append(self.value(item, inside, facts, where))
        return tuple(values)

    def entry(self, item: Node, cls: type, path: str) -> Any:
        """One section of a list. A plain text is the field the section names as its short form."""
        if isinstance(item, Scalar) and item.text and hasattr(cls, "SHORT"):
            item = Mapping([(Scalar(cls.SHORT, item.place), item)], item.place)  # pyright: ignore
        if not isinstance(item, Mapping):
            raise Wrong(f"{path}={_shown(item)} must be a section (key: value lines)")
        inner = Reader(self.problems, self.failed)
        inner.section(item, cls, path + ".")
        self.given.update(inner.given)
        return build(cls, inner.given, path + ".", self.failed, self.problems)


def _scalar(node: Scalar, kind: Kind, facts: Table[str, Any], path: str) -> Any:
    """The first type of the field that can read the text. Quoted text is text, except for sizes ("1M")."""
    text, low = node.text.strip(), node.text.strip().lower()
    for scalar in kind.scalars:
        if scalar is str:
            if node.text or not node.plain:
                return node.text
        elif scalar is int and facts.get("unit"):
            try:
                return {"tokens": parse_tokens, "bytes": parse_bytes}[facts["unit"]](text)
            except ValueError as error:
                raise Wrong(f"{path}={error}{' or null' if kind.optional else ''}") from None
        elif not node.plain:
            continue
        elif scalar is bool and low in (*_TRUE, *_FALSE):
            return low in _TRUE
        elif scalar is int and _WHOLE.fullmatch(text) and len(text) < 30:
            return int(text.replace("_", ""))
        elif scalar is float:
            number = _float(text)
            if number is not None:
                return number
    hint = "; drop the quotes" if not node.plain and str not in kind.scalars else ""
    raise Wrong(f"{path}={node.text!r} must be {expectation(kind, facts)}{hint}")


def _float(text: str) -> float | None:
    try:
        number = float(text) if text.isascii() and text[-1:] in _DIGITS else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shown(node: Node) -> str:
    if isinstance(node, Scalar):
        return repr(node.text) if len(node.text) <= 60 else repr(node.text[:57] + "...")
    return "a list" + (f" of {len(node.items)}" if isinstance(node, Sequence) else "")


def build(cls: type, given: Table[str, Given], prefix: str, failed: set[str], problems: list[str]) -> Any:
    """A section from flat values. A required field that is missing is a problem and gets a stand-in, so that the checks
    between fields can still run; what they find about a failed path is dropped."""
    values: dict[str, Any] = {}
    for setting in fields(cls):
        path, kind = prefix + setting.name, kinds(cls)[setting.name]
        if path in given and not (kind.section is not None and given[path].value == {}):
            values[setting.name] = given[path].value
        elif kind.section is not None:
            inside = path in given or any(name.startswith(path + ".") for name in given)
            if inside or not kind.optional:
                values[setting.name] = build(kind.section, given, path + ".", failed, problems)
        elif not has_default(setting):
            values[setting.name] = "" if str in kind.scalars else 1
            if not any(path == name or path.startswith(name + ".") for name in failed):
                failed.add(path)
                problems.append(
                    f"{path} is missing: {setting.metadata['help'][0].lower()}{setting.metadata['help'][1:]}"
                )
    return cls(**values)
