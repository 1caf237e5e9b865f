"""Combinations that cover every pair of settings.

A full sweep over models, degrees, stages, recompute, stores, tiles, packing and adapters has tens of thousands of cases; bugs
of composition nearly always need two settings to meet. So the matrix is a covering array: every pair of values that may
stand together occurs in at least one case, in a few dozen cases. Deterministic for a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

from ..engine.model.presets import TINY
from ..stack import Stack
from .case import Case

AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(name.removeprefix("tiny_") for name in TINY),
    "ulysses": (1, 2, 4, 8),
    "ring": (1, 2),
    "heads_per_stage": (None, 1, 2),
    "recompute": ("none", "layer", "keep_attention"),
    "store": ("gpu", "host", "disk"),
    "engine": ("composed", "streamed"),
    "hold": (True, False),
    "tile": (None, 61),
    "shard_parameters": (True, False),
    "packed": (False, True),
    "lora": (False, True),
}
Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def allowed(row: Row, world: int) -> bool:
    """Whether a (partial) combination may run: fits the world and is not refused by Stack."""
    if row.get("ulysses", 1) * row.get("ring", 1) > world:
        return False
    kept_whole = row.get("store") in ("host", "disk") or row.get("engine") == "streamed"
    return not (row.get("recompute") == "none" and kept_whole)


def pairs_of(row: Row) -> set[Pair]:
    return {(a, row[a], b, row[b]) for a, b in combinations(AXES, 2)}


def all_pairs(world: int, models: tuple[str, ...] = AXES["model"]) -> set[Pair]:
    """Every pair of values that some allowed combination has."""
    axes, pairs = {**AXES, "model": models}, set()
    for a, b in combinations(axes, 2):
        for x, y in product(axes[a], axes[b]):
            if allowed({a: x, b: y}, world):
                pairs.add((a, x, b, y))
    return pairs


def cover(world: int, seed: int = 0, models: tuple[str, ...] = AXES["model"]) -> list[Row]:
    """Rows that together have every pair: each starts from a pair still missing and grows by what covers most others."""
    rng, every = random.Random(seed), {**AXES, "model": models}
    missing, rows = all_pairs(world, models), []
    while missing:
        a, x, b, y = min(missing, key=repr)
        row: Row = {a: x, b: y}
        axes = [axis for axis in AXES if axis not in row]
        rng.shuffle(axes)
        for axis in axes:
            values = [v for v in every[axis] if allowed({**row, axis: v}, world)]
            row[axis] = max(values, key=_gain(row, axis, missing, rng))
        rows.append({axis: row[axis] for axis in AXES})
        missing -= pairs_of(row)
    return rows


def _gain(row: Row, axis: str, missing: set[Pair], rng: random.Random) -> Callable[[Any], tuple[int, float]]:
    order = list(AXES)

    def gain(value: Any) -> tuple[int, float]:
        new = 0
        for other, held in row.items():
            first = order.index(other) < order.index(axis)
            new += ((other, held, axis, value) if first else (axis, value, other, held)) in missing
        return new, rng.random()

    return gain


def cases(rows: Iterable[Row], world: int, length: int = 1021) -> list[Case]:
    """Cases with as many ranks as the stack needs, doubled for data parallelism where the world has room."""
    cases = []
    for number, row in enumerate(rows):
        stack = Stack(**{name: row[name] for name in Stack.__dataclass_fields__ if name in row})
        ranks = stack.context_ranks
        if 2 * ranks <= world and number % 2:
            ranks *= 2
            if stack.shard_parameters and number % 4 == 1:
                stack = Stack(**{**stack.__dict__, "replicate": 2})
        cases.append(
            Case(
                model=row["model"], stack=stack, world=ranks, length=length, packed=row["packed"], lora=row["lora"],
                rows=1 + number % 3 // 2, seed=number,
            )
        )  # fmt: skip
    return sorted(cases, key=lambda case: case.world)  # a change of world size costs new connections
