"""Mutations of JSON and YAML: one small change each, and whether it is nonsense whatever the file is for."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Path_ = tuple[Any, ...]  # keys and indices
Bytes = Callable[[bytes, random.Random], bytes]

HUGE = 99999999999999999999
NESTED = "[" * 100 + "]" * 100


def nodes(value: Any, at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every place in a tree, but the top."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*at, key), each
        yield from nodes(each, (*at, key))


def put(tree: Any, at: Path_, value: Any) -> Any:
    """The same tree with another value there; `DROP`: without it."""
    tree = json.loads(json.dumps(tree))
    inner = tree
    for key in at[:-1]:
        inner = inner[key]
    if value is DROP:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return tree


DROP = object()
RAW = "\x00raw:"  # stands for text that is no JSON value


def dumped(tree: Any) -> bytes:
    """JSON, with raw texts where they were asked for."""
    text = json.dumps(tree)
    while (start := text.find(json.dumps(RAW)[:-1])) >= 0:
        value, end = json.JSONDecoder().raw_decode(text, start)
        text = text[:start] + value.removeprefix(RAW) + text[end:]
    return text.encode()


def other_values(value: Any, rng: random.Random) -> Any:
    """Something else in the place of a value."""
    choices: list[Any] = [
        DROP,
        None,
        "x",
        "",
        -1,
        HUGE,
        1.5,
        True,
        [],
        {},
        [[]],
        {"a": 1},
        "../../x",
        "\u202e\ud7ff",
        "\n",
    ]
    choices += [RAW + each for each in ("NaN", "1e999", "-Infinity", NESTED, "1" * 5000, '"\\ud800"')]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        choices += [-value - 1, value * 10**12 + 1, str(value), -(10**30)]
    if isinstance(value, list):
        choices += [value * 3, value[:-1], dict(enumerate(map(str, value)))]
    if isinstance(value, str):
        choices += [value + "x", value[:-1], value * 50, "\0", "/etc/passwd"]
    if isinstance(value, dict):
        choices += [list(value), {**value, "../x": 1}]
    return rng.choice(choices)


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that are no JSON object any more, and no YAML mapping of settings."""
    kinds: list[Bytes] = [
        lambda raw, rng: raw[: rng.randrange(1, max(2, len(raw) - 2))],
        lambda raw, rng: rng.randbytes(rng.randrange(1, 200)),
        lambda raw, rng: b"",
        lambda raw, rng: b"[]",
        lambda raw, rng: b'"' + raw[:20].hex().encode() + b'"',
        lambda raw, rng: b"7",
        lambda raw, rng: raw + b"}",
        lambda raw, rng: b"\xff\xfe" + raw,
        lambda raw, rng: b'{"a":' * 3000 + b"1" + b"}" * 3000,
        lambda raw, rng: raw.rstrip()[:-1] + b', "more": NaN}',
        lambda raw, rng: raw.rstrip()[:-1] + b', "more": 1e999}',
    ]
    return rng.choice(kinds)(raw, rng)


def replace_by(kind: str, path: Path) -> None:
    """Something that is no file in the place of one."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "nowhere":
        path.symlink_to("nowhere")
    else:
        path.symlink_to(path.name)  # a circle


KINDS = ("pipe", "folder", "endless", "nowhere", "circle")
