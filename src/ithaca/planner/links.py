"""How fast GPUs talk to each other, as it was measured on this machine: plans take it in place of the makers' figures.

`ithaca doctor --links` measures (observe/profiler/links.py) and keeps it in the user's cache, or in the file that ITHACA_LINKS
names, which a team may share: a record for each kind of GPU, number of them in a machine, and number of machines. A plan looks for
its own; there is no guessing from one number of GPUs to another. No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.fields import POSITIVE, TEXT, Rule, wrong
from ..base.files import cache_folder, read_json, write_atomically

FILE = "ITHACA_LINKS"
RATE = Rule("a number of bytes a second", lambda value: type(value) in (int, float) and 1e6 <= value <= 1e14)
_RECORD = {
    "gpu": TEXT, "per_node": POSITIVE, "nodes": POSITIVE, "all_to_all": RATE, "gather": RATE, "reduce": RATE, "ring": RATE,
    "date": TEXT, "software": TEXT,
}  # fmt: skip


@dataclass(frozen=True)
class Links:
    """Bytes a second that one rank sends to the others, all of them busy."""

    gpu: str  # as the table of GPUs has it, or as it calls itself
    per_node: int
    nodes: int
    all_to_all: float
    gather: float  # all-gather
    reduce: float  # reduce-scatter
    ring: float  # to the next rank
    date: str
    software: str


def links_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """None: there is no place for it, or nobody wants it: ITHACA_LINKS is empty."""
    if FILE in environ:
        return Path(environ[FILE]) if environ[FILE] else None
    try:
        return cache_folder(environ) / "links.json"
    except RuntimeError:  # a user without a home
        return None


def read_links(environ: Mapping[str, str] = os.environ) -> list[Links]:
    path = links_file(environ)
    if path is None:
        return []
    try:
        records = read_json(path, limit=1 << 20)
    except OSError:  # there is none, or it is not ours to read: then nothing was measured for us
        return []
    except ValueError as error:
        raise ValueError(_damaged(path, str(error))) from None
    problem = wrong(records, [_RECORD])
    if problem is not None:
        raise ValueError(_damaged(path, problem))
    return [Links(**{name: record[name] for name in _RECORD}) for record in records]


def keep_links(links: Links, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Beside those of other machines, in place of an older record of the same. None: it is not to be kept."""
    path = links_file(environ)
    if path is None:
        return None
    try:
        before = read_links(environ)
    except ValueError:
        before = []  # this is what mends it
    others = [other for other in before if _key(other) != _key(links)]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps([asdict(record) for record in (*others, links)], indent=1) + "\n")
    return path


def find_links(gpu: str, per_node: int, nodes: int, environ: Mapping[str, str] = os.environ) -> Links | None:
    return next((links for links in read_links(environ) if _key(links) == (gpu.lower(), per_node, nodes)), None)


def _key(links: Any) -> tuple[str, int, int]:
    return links.gpu.lower(), links.per_node, links.nodes


def _damaged(path: Path, why: str) -> str:
    return f"{path} does not say how fast links are ({why}); delete it, or measure again: ithaca doctor --links"
