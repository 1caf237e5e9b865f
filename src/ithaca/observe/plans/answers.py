"""What the planner says, as the page shows it. The numbers are those of `ithaca plan --json`, by the same functions.

`answer` is for while somebody types: tens of milliseconds. The others take longer and run apart (slow.py): each yields pieces of
the answer, {"part": name, "value": ...}, as they come.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any

from ...base.hub import local
from ...base.units import format_tokens
from ...engine.model.presets import PRESETS
from ...planner.config import run_yaml
from ...planner.ladder import ladder
from ...planner.plan import HOST_SHARE, Plan
from ...planner.search import is_own, max_context, plan, what_would_fit
from ...planner.text import condition, verdict
from ...stack import Stack
from ..report import gather, view
from ..report.values import said
from .asking import LONGEST, Asked, gpus_text, read, spelled

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # GPUs of the grid
SHORTER, LONGER = 4, 3  # contexts of the grid: so many halves below the one that was asked for, and doubles above it
Say = Callable[[str], object]
Piece = dict[str, Any]


def answer(asked: Asked) -> dict[str, Any] | None:
    """None: a dry run has to count it, which takes a while (`pieces`)."""
    return None if by_dry_run(asked) else shown(asked, _planned(asked.question, _stamp(asked.model)))


def by_dry_run(asked: Asked) -> bool:
    """Whether the model has no arithmetic here."""
    return is_own(asked.model, Stack(engine=asked.pinned.get("engine", "auto")))


def shown(asked: Asked, planned: Plan, advice: list[Piece] | None = None) -> dict[str, Any]:
    """A plan as the page shows it. advice: where it was looked for."""
    seen = view(gather(None, {"plan": planned.json()}))
    advice = advice if advice is not None else [{"words": words, "change": {}} for words in planned.advice]
    cost, kernel = _cost(asked, planned), asked.options.get("kernel")
    return {
        "words": asked.words,
        "title": f"{planned.model.name} at {format_tokens(planned.context)} on {asked.words['gpus']}",
        "facts": seen["heading"]["facts"],
        "fits": planned.fits,
        "verdict": verdict(planned).partition(", if ")[0],
        "condition": condition(planned, remedy=False).removeprefix(", ") if planned.fits else None,
        "figures": _figures(planned, cost),
        "phases": seen["phases"],
        "times": seen["times"],
        "stack": [{"field": name, "value": said(value), "why": why} for name, value, why in planned.reasons],
        "assumed": planned.assumed,
        "too_long": planned.too_long,
        "counted": planned.json()["counted_by"] if planned.executed else None,
        "untimed": planned.untimed,
        "advice": advice,
        "cost": cost,
        "yaml": run_yaml(planned, asked.model, kernel=kernel, steps=cost["steps"] if cost else None) if planned.fits else None,
        "command": asked.command,
        "plan": planned.json(),
    }  # fmt: skip


def pieces(asked: Asked, say: Say) -> Iterator[Piece]:
    """All that takes longer than typing, what is looked for first first."""
    if by_dry_run(asked):
        yield {"part": "answer", "value": shown(asked, _plan(asked, say=say))}
        return
    planned = _planned(asked.question, _stamp(asked.model))
    if not planned.fits:
        yield {"part": "advice", "value": advice_of(asked, planned)}
    yield from _tried("ladder", lambda: rungs(asked))
    yield from _tried("longest", lambda: longest(asked))
    yield from grid(asked)


def advice_of(asked: Asked, planned: Plan) -> list[Piece]:
    """What would fit, in words and as a change of the question."""
    return [
        {"words": words, "change": spelled(change, asked.words["gpus"])}
        for words, change in what_would_fit(planned, asked.pinned)
    ]


def rungs(asked: Asked) -> Piece | None:
    whole = ladder(asked.model, gpus=asked.gpus, context=asked.context, **asked.options, **asked.pinned).json()
    return view(gather(None, {"ladder": whole}))["ladder"]


def longest(asked: Asked) -> Piece:
    planned = max_context(asked.model, gpus=asked.gpus, advise=False, **asked.options, **asked.pinned)
    if not planned.fits:
        return {"context": None, "peak": None, "rate": None}
    rate = planned.predicted and planned.predicted.tokens_per_second
    return {"context": format_tokens(planned.context), "peak": planned.peak, "rate": rate}


def grid(asked: Asked) -> Iterator[Piece]:
    """GPUs × context: whether it fits, and how fast the fastest stack is there."""
    hardware, here = asked.gpus, asked.context
    counts = sorted({*COUNTS, hardware.count})
    halves = (here >> n for n in range(1, SHORTER + 1))
    doubles = (here << n for n in range(1, LONGER + 1))
    contexts = sorted({here, *(n for n in halves if n >= 1024), *(n for n in doubles if n <= LONGEST)})
    yield {
        "part": "grid",
        "value": {
            "gpus": [gpus_text(replace(hardware, count=count), asked.words["gpus"]) for count in counts],
            "contexts": [*map(format_tokens, contexts)],
            "at": [counts.index(hardware.count), contexts.index(here)],
        },
    }
    for row, count in enumerate(counts):
        for column, context in enumerate(contexts):
            cell: Piece = {"row": row, "column": column}
            there = replace(asked, gpus=replace(hardware, count=count), context=context)
            try:
                planned = _plan(there, only_fit=True)
                planned = _plan(there, advise=False) if planned.fits else planned
            except ValueError as error:
                yield {"part": "cell", "value": {**cell, "fits": None, "why": str(error)}}
                continue
            if not planned.fits:
                yield {"part": "cell", "value": {**cell, "fits": False}}
                continue
            rate = planned.predicted and planned.predicted.tokens_per_second
            cell |= {"fits": True, "peak": planned.peak, "rate": rate, "why": verdict(planned)}
            yield {"part": "cell", "value": cell}


def longest_counted(asked: Asked, say: Say) -> Iterator[Piece]:
    """Of a model without arithmetic, which takes minutes: when it is asked for."""
    planned = max_context(asked.model, gpus=asked.gpus, say=say, **asked.options, **asked.pinned)
    found = format_tokens(planned.context) if planned.fits else None
    yield {"part": "longest", "value": {"context": found, "peak": planned.peak, "rate": None}}


def _tried(part: str, make: Callable[[], Any]) -> Iterator[Piece]:
    try:
        yield {"part": part, "value": make()}
    except ValueError as error:
        yield {"part": part, "value": None, "why": str(error)}


def _plan(asked: Asked, **more: Any) -> Plan:
    return plan(asked.model, gpus=asked.gpus, context=asked.context, **more, **asked.options, **asked.pinned)


@lru_cache(256)
def _planned(question: tuple[tuple[str, str], ...], stamp: Any) -> Plan:
    return _plan(read(dict(question)), advise=False)


def _stamp(model: str) -> tuple[int, int] | None:
    """Of a config.json that may change between two questions."""
    if model in PRESETS:
        return None
    path = local(model)
    try:
        found = os.stat(path / "config.json" if path.is_dir() else path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def _cost(asked: Asked, planned: Plan) -> dict[str, Any] | None:
    """Of training on so many tokens. Steps are whole."""
    if not planned.predicted or not planned.fits or not asked.tokens:
        return None
    hours = asked.tokens / planned.predicted.tokens_per_second / 3600
    return {
        "tokens": asked.tokens,
        "steps": ceil(asked.tokens / (planned.rows * planned.context)),
        "gpu_hours": hours,
        "seconds": hours * 3600 / planned.hardware.count,
        "money": None if asked.price is None else hours * asked.price,
    }


def _figures(planned: Plan, cost: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The large numbers, as the report draws them."""
    hardware, speed = planned.hardware, planned.predicted
    host = HOST_SHARE * hardware.host if hardware.host is not None else None
    figures = [
        {"label": "Peak GPU memory", "kind": "bytes", "value": planned.peak, "of": planned.budget},
        {"label": "Host memory", "kind": "bytes", "value": planned.host, "of": host, "note": "a machine"},
    ]
    if planned.disk:
        figures.append(
            {"label": "Disk", "kind": "bytes", "value": planned.disk, "of": hardware.disk, "note": "a machine"}
        )
    if speed is not None:
        figures += [
            {"label": "Tokens/s per GPU", "kind": "rate", "value": speed.tokens_per_second},
            {"label": "Step time", "kind": "seconds", "value": speed.seconds, "note": f"bound by {speed.bound_by}"},
        ]
    if cost is not None:
        figures.append(
            {
                "label": "GPU-hours",
                "kind": "rate",
                "value": cost["gpu_hours"],
                "note": f"for {cost['tokens'] / 1e9:,g}B tokens",
            }
        )
    return figures
