"""Evaluations for the page: the grid of needles as heat maps, loss by position, tasks. The newest, and the first beside it."""

from __future__ import annotations

from typing import Any

from .inputs import Inputs
from .values import at, number, positive, table, tables, text


def evaluation(inputs: Inputs) -> dict[str, Any] | None:
    found = inputs.evaluations
    if not found:
        return None
    shown = found[-1:] if len(found) == 1 else [found[0], found[-1]]
    maps = [each for each in map(_map, shown) if each]
    lines = [each for each in map(_positions, shown) if each]
    tasks = [
        {
            "task": text(each.get("task")) or "?",
            "length": positive(each.get("length")),
            **{name: number(each.get(name)) for name in ("accuracy", "exact", "log_probability")},
        }
        for each in tables(found[-1].get("tasks"))
    ]
    if not (maps or lines or tasks):
        return None
    return {
        "maps": maps,
        "positions": lines,
        "tasks": tasks,
        "count": len(found),
        "step": number(found[-1].get("step")),
    }


def _map(record: dict[str, Any]) -> dict[str, Any] | None:
    needle = table(record.get("needle"))
    lengths, depths, rows = (needle.get(name) for name in ("lengths", "depths", "accuracy"))
    if not (isinstance(lengths, list) and isinstance(depths, list) and isinstance(rows, list)):
        return None
    cells = [[number(cell) for cell in row] for row in rows if isinstance(row, list)]
    lengths, depths = [positive(each) for each in lengths], [number(each) for each in depths]
    if len(cells) != len(lengths) or any(len(row) != len(depths) for row in cells) or None in [*lengths, *depths]:
        return None
    known = [cell for row in cells for cell in row if cell is not None]
    mean = sum(known) / len(known) if known else None
    return {
        "step": number(record.get("step")), "lengths": lengths, "depths": depths, "cells": cells, "mean": mean,
        "samples": positive(needle.get("samples")),
    }  # fmt: skip


def _positions(record: dict[str, Any]) -> dict[str, Any] | None:
    points = [
        {"from": number(each.get("from")), "to": number(each.get("to")), "loss": number(each.get("loss"))}
        for each in tables(at(record, "held_out", "positions"))
    ]
    points = [each for each in points if None not in each.values()]
    return {"step": number(record.get("step")), "points": points} if len(points) > 1 else None
