"""Evaluations for the page: the grid of needles as heat maps, loss by position, tasks. The newest, and the first beside it."""

from __future__ import annotations

from typing import Any

from .inputs import Inputs
from .values import at, number, positive, table, tables, text


def evaluation(inputs: Inputs) -> dict[str, Any] | None:
    records = inputs.evaluations
    if not records:
        return None
    shown = records[-1:] if len(records) == 1 else [records[0], records[-1]]
    maps = [heatmap for heatmap in map(_map, shown) if heatmap]
    lines = [line for line in map(_positions, shown) if line]
    tasks = [
        {
            "task": text(task.get("task")) or "?",
            "length": positive(task.get("length")),
            **{name: number(task.get(name)) for name in ("accuracy", "exact", "log_probability")},
        }
        for task in tables(records[-1].get("tasks"))
    ]
    if not (maps or lines or tasks):
        return None
    return {
        "maps": maps,
        "positions": lines,
        "tasks": tasks,
        "count": len(records),
        "step": number(records[-1].get("step")),
    }


def _map(record: dict[str, Any]) -> dict[str, Any] | None:
    needle = table(record.get("needle"))
    lengths, depths, rows = (needle.get(name) for name in ("lengths", "depths", "accuracy"))
    if not (isinstance(lengths, list) and isinstance(depths, list) and isinstance(rows, list)):
        return None
    cells = [[number(cell) for cell in row] for row in rows if isinstance(row, list)]
    lengths, depths = [positive(length) for length in lengths], [number(depth) for depth in depths]
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
        {"from": number(point.get("from")), "to": number(point.get("to")), "loss": number(point.get("loss"))}
        for point in tables(at(record, "held_out", "positions"))
    ]
    points = [point for point in points if None not in point.values()]
    return {"step": number(record.get("step")), "points": points} if len(points) > 1 else None
