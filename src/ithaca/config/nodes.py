"""YAML as a tree of texts with places, safely.

PyYAML's `compose` gives nodes with line and column and runs nothing. Values stay texts here: what `1e-5`, `no` or `1M` means
is for the field to say that receives it, so YAML's own guesses (1e-5 is a text, `no` is false) never get in the way.

Refused with a message: Python tags (`!!python/...` could run code elsewhere), duplicate keys, merge keys (`<<`), several
documents, files that are large or deep. Aliases (`*name`) are followed, within a limit: nine nested lists of nine aliases are
a billion items (the "YAML bomb").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.files import open_regular

if TYPE_CHECKING:
    import yaml

LARGEST = 256 * 1024  # bytes of a file: a recipe has 2 KB
DEEPEST = 20
MOST = 10_000  # nodes, each alias counted as often as it is used
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "value")
}


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and line, or a flag of the command line."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Scalar:
    text: str
    place: Place
    plain: bool = True  # not quoted: may be a number, true, null


@dataclass(frozen=True)
class Sequence:
    items: list[Node]
    place: Place


@dataclass(frozen=True)
class Mapping:
    items: list[tuple[Scalar, Node]]
    place: Place


@dataclass(frozen=True)
class Refused:
    """Stands where something was refused; the problem has been noted."""

    place: Place


Node = Scalar | Sequence | Mapping | Refused


def read_file(path: Path, shown: str, problems: list[str]) -> Mapping | None:
    """The tree of a file. Whatever is wrong with it is added to `problems`."""
    try:
        return read_text(_text(path), shown, problems)
    except UnicodeDecodeError as error:
        problems.append(f"{shown}: not UTF-8 text (byte {error.start}); save it as UTF-8")
    except (OSError, ValueError) as error:
        problems.append(f"{shown}: cannot be read: {getattr(error, 'strerror', None) or error}")
    return None


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(4 * LARGEST).decode("utf-8-sig")


def read_plain(path: Path) -> tuple[Any, str]:
    """What a YAML file of another ithaca holds, as plain values, and its text. The same limits, but no schema; ValueError."""
    try:
        text = _text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return load_plain(text, str(path)), text


def load_plain(text: str, shown: str) -> Any:
    """Plain values of a YAML text; ValueError where it is none, or beyond the limits of a config."""
    import yaml

    problems: list[str] = []
    if read_text(text, shown, problems) is None or problems:
        raise ValueError("; ".join(problems[:3]))
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date that there is not
        raise ValueError(f"{shown}: not YAML that can be read: {' '.join(str(error).split())[:200]}") from None


def read_text(text: str, shown: str, problems: list[str]) -> Mapping | None:
    """The tree of a text whose top is a mapping; an empty text is an empty mapping."""
    if len(text) > LARGEST:
        problems.append(f"{shown}: {len(text):,} characters; the limit is {LARGEST:,}")
        return None
    tree = _compose(text, shown, problems, first=1)
    if tree is None or isinstance(tree, Mapping):
        return tree
    if isinstance(tree, Refused):
        return None
    if isinstance(tree, Scalar) and tree.plain and tree.text == "":
        return Mapping([], tree.place)
    problems.append(f"{tree.place}: the file must be sections of key: value lines, such as 'train:'")
    return None


def read_value(text: str, flag: str, problems: list[str]) -> Node | None:
    """A value of the command line: `[a, b]` and `{a: 1}` are YAML, everything else is taken as it stands."""
    if not text.lstrip().startswith(("[", "{")):
        return Scalar(text, Place(flag))
    return _compose(text[:LARGEST], flag, problems, first=None)


def _compose(text: str, shown: str, problems: list[str], first: int | None) -> Node | None:
    import yaml

    try:
        # The events come first: compose() calls itself for every level, and a deep file would exhaust Python's stack.
        depth = documents = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > DEEPEST or count > 2 * MOST or documents > 1:
                what = "several documents (---)" if documents > 1 else f"more than {DEEPEST} levels or {MOST:,} values"
                problems.append(f"{shown}:{event.start_mark.line + 1}: {what}; a run needs one, flat")
                return None
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark and first else shown
        hint = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        problems.append(f"{where}: not valid YAML: {error.problem or error.context}{hint}")
        return None
    except yaml.YAMLError as error:
        problems.append(f"{shown}: not valid YAML: {' '.join(str(error).split())}")
        return None
    if root is None:
        return Scalar("", Place(shown, first, first))
    return _Walk(shown, first is not None, problems).node(root, 0)


@dataclass
class _Walk:
    """Copies PyYAML's nodes into ours, following aliases up to a limit."""

    shown: str
    lines: bool
    problems: list[str]
    count: int = 0
    full: bool = False

    def place(self, node: yaml.Node) -> Place:
        if not self.lines:
            return Place(self.shown)
        return Place(self.shown, node.start_mark.line + 1, node.start_mark.column + 1)

    def node(self, node: yaml.Node, depth: int) -> Node:
        import yaml

        place = self.place(node)
        self.count += 1
        if self.full or self.count > MOST or depth > DEEPEST:
            if not self.full:  # say it once
                self.problems.append(
                    f"{place}: aliases (*name) expand to more than {MOST:,} values or {DEEPEST} levels"
                )
            self.full = True
            return Refused(place)
        if node.tag not in _PLAIN_TAGS and not node.tag.endswith(":merge"):
            self.problems.append(
                f"{place}: the tag {_short(node.tag)} is refused; only plain values are read, no objects"
            )
            return Refused(place)
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, place, plain=node.style is None)
        if isinstance(node, yaml.SequenceNode):
            return Sequence([self.node(item, depth + 1) for item in node.value], place)
        assert isinstance(node, yaml.MappingNode)
        return self.mapping(node, place, depth)

    def mapping(self, node: yaml.MappingNode, place: Place, depth: int) -> Mapping:
        import yaml

        pairs: list[tuple[Scalar, Node]] = []
        seen: dict[str, Place] = {}
        for key, value in node.value:
            where = self.place(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{where}: a key must be a word, not a list or a section")
            elif key.tag.endswith(":merge"):
                self.problems.append(f"{where}: merge keys (<<) are not read; write the keys out, or use a recipe")
            elif key.value in seen:
                self.problems.append(f"{where}: duplicate key {key.value}; it is also at {seen[key.value]}")
            else:
                seen[key.value] = where
                pairs.append((Scalar(key.value, where), self.node(value, depth + 1)))
        return Mapping(pairs, place)


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
