"""Two runs side by side: what came of them, which settings differ, and their curves over each other.

Losses are compared at the last step that both have logged: a run that is ahead has the lower one for that alone.
"""

from __future__ import annotations

from typing import Any

from .charts import line_of, thinned
from .inputs import Inputs
from .summary import heading, measure
from .values import at, number, said, table, tables

_OF_NAME = {"description", "run.name", "run.folder"}  # which are always others
_CURVES = (
    ("loss", "Loss", "loss", False, "loss"),
    ("rate", "Tokens/s", "rate", True, "tokens_per_second"),
    ("grad_norm", "Gradient norm", "number", True, "grad_norm"),
    ("memory", "Peak GPU memory", "bytes", True, "gpu_peak"),
)


def versus(inputs: Inputs) -> dict[str, Any] | None:
    other = inputs.other
    if other is None:
        return None
    names = [heading(each)["title"] for each in (inputs, other)]
    if names[0] == names[1]:
        names = [str(inputs.run), str(other.run)]
    return {
        "names": names,
        "figures": _figures(inputs, other),
        "settings": _differences(_flat(inputs.config), _flat(other.config)),
        "environment": _differences(_about(inputs), _about(other)),
        "curves": [chart for chart in (_chart(inputs, other, names, *curve) for curve in _CURVES) if chart],
    }


def _figures(first: Inputs, second: Inputs) -> list[dict[str, Any]]:
    pair = (first, second)
    measured = [measure(each) for each in pair]
    losses = [
        {line["step"]: loss for line in each.steps if (loss := number(line.get("loss"))) is not None} for each in pair
    ]
    common = max(losses[0].keys() & losses[1].keys(), default=None)
    last = [each.steps[-1] if each.steps else {} for each in pair]
    rows: list[tuple[str, str, list[Any]]] = [
        ("Held-out loss", "loss", [_newest(each, "held_out", "loss") for each in pair]),
        ("Needles found", "share", [_newest(each, "needle", "mean") for each in pair]),
        ("Tokens/s", "rate", [each.rate for each in measured]),
        ("Step time", "seconds", [each.seconds for each in measured]),
        ("MFU", "share", [each.mfu for each in measured]),
        ("Peak GPU memory", "bytes", [each.peak for each in measured]),
        ("Host memory", "bytes", [each.host for each in measured]),
        ("Steps done", "integer", [number(line.get("step")) for line in last]),
        ("Tokens trained", "count", [number(line.get("tokens")) for line in last]),
    ]
    if common is not None:
        rows.insert(0, (f"Loss at step {common:,}", "loss", [each[common] for each in losses]))
    return [
        {"label": label, "kind": kind, "values": values, "change": values[1] / values[0] - 1 if all(values) else None}
        for label, kind, values in rows
        if any(values)  # what both have none of, or nothing, is left out
    ]


def _newest(inputs: Inputs, *path: str) -> Any:
    return next(
        (found for record in reversed(inputs.evaluations) if (found := number(at(record, *path))) is not None), None
    )


def _differences(first: dict[str, str], second: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "values": [first.get(name), second.get(name)]}
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            found |= _flat(value, f"{path}.")
        elif tables(value):  # sources and phases
            for place, item in enumerate(tables(value)):
                found |= _flat(item, f"{path}[{place}].")
        elif path not in _OF_NAME:
            found[path] = said(value)
    return found


def _about(inputs: Inputs) -> dict[str, str]:
    """Of the machine and the data what tells two runs apart."""
    given = table(inputs.about.get("environment"))
    facts = {name: given.get(name) for name in ("device", "ranks", "nodes", "host", "system", "cuda")}
    facts |= table(given.get("versions"))
    return {str(name): said(value) for name, value in facts.items() if value is not None}


def _chart(
    first: Inputs, second: Inputs, names: list[str], name: str, title: str, kind: str, zero: bool, field: str
) -> dict[str, Any] | None:
    found = [
        (style, line_of(each, field, label))
        for style, each, label in zip(("first", "second"), (first, second), names, strict=True)
    ]
    lines = [{**thinned(line, smooth=True), "name": style, "style": style} for style, line in found if line is not None]
    if len(lines) < 2:
        return None
    return {"name": f"versus-{name}", "title": title, "kind": kind, "zero": zero, "limit": None, "lines": lines}
