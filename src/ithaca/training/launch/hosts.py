"""Slurm's short forms, read without Slurm: `node[003-005,9]` is four hosts, `8(x2),4` is 8, 8 and 4 tasks."""

from __future__ import annotations

import re
from itertools import product
from math import prod

_ITEM = r"(?:[^,\[\]\s]|\[[^\[\]]+\])+"  # a name, parts of which stand in brackets
_MOST = 100_000  # hosts: more than any cluster has, and a bound on what a broken variable can cost


def expand_hosts(text: str, name: str = "the node list") -> list[str]:
    """The hosts of a list in Slurm's short form, in order. Ranges keep their leading zeros; brackets may repeat (r[1-2]n[1-4])."""
    if not re.fullmatch(rf"{_ITEM}(,{_ITEM})*", text):
        raise ValueError(f"{name}={text!r} is not a list of hosts")
    hosts: list[str] = []
    for part in re.finditer(_ITEM, text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", part[0])
        choices = [_ranges(inside, text, name) if inside else [plain] for inside, plain in pieces]
        if prod(map(len, choices)) > _MOST:
            raise ValueError(f"{name}={text!r} has more than {_MOST} hosts")
        hosts += ["".join(each) for each in product(*choices)]
    return hosts


def _ranges(inside: str, text: str, name: str) -> list[str]:
    """What stands in brackets: `003-005,9` -> 003 004 005 9"""
    found: list[str] = []
    for each in inside.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", each, re.ASCII)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) > _MOST:
            raise ValueError(f"{name}={text!r} has a range that cannot be read: [{inside}]")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def tasks_per_node(text: str, name: str) -> list[int]:
    """`8(x2),4` -> [8, 8, 4]"""
    counts: list[int] = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", each, re.ASCII)
        if match is None:
            raise ValueError(f"{name}={text!r} cannot be read; it should look like 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
