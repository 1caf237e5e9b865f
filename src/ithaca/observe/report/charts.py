"""What the charts and tables of the page show, part by part. A part without data is None and is not drawn."""

from __future__ import annotations

from typing import Any

from ...base.holding import PHASES
from ...config.dump import origins
from ..record import StepRecord
from .about import meaning
from .decimate import pick, pick_stacked, running_mean
from .inputs import Inputs
from .summary import gpu_memory, per
from .values import CATEGORIES, at, number, ordered, parts, positive, said, table, tables, text

TIMES = ("attention", "matmul", "other", "pcie", "disk", "links")
ROWS = 40
"""Rows of a table; a profile has thousands of kernels, and the first few hold the time."""


def phases(inputs: Inputs) -> dict[str, Any] | None:
    """Memory by category in each phase of the plan; a profile adds what it measured, and knows what was planned of that."""
    plan, profiled = table(inputs.plan), table(at(inputs.profile, "planned"))
    plan = profiled if profiled.get("phases") and inputs.run is None else plan
    measured_phases = table(at(inputs.profile, "phases")) if plan is profiled else {}
    given = table(plan.get("phases"))
    names = [name for name in PHASES if name in given] + [name for name in given if name not in PHASES]
    bars = [
        {"label": name, "parts": sizes, "total": sum(sizes.values())} for name in names if (sizes := parts(given[name]))
    ]
    if not bars:
        return None
    peak_phase = text(plan.get("peak_phase"))
    for bar in bars:
        bar["peak"] = bar["label"] == peak_phase
        bar["measured"] = sum(parts(measured_phases.get(bar["label"])).values()) or None
    measured = [
        {"label": name, "parts": sizes, "total": sum(sizes.values())}
        for name in names
        if (sizes := parts(measured_phases.get(name)))
    ]
    return {
        "measured": measured,
        "bars": bars,
        "limit": gpu_memory(inputs),
        "budget": positive(plan.get("budget")),
        "fits": _flag(plan.get("fits")),
    }


def at_peak(inputs: Inputs) -> dict[str, Any] | None:
    """Memory by category when it was largest: as planned, and as the profile found it."""
    plan, profile = table(inputs.plan), table(inputs.profile)
    around = parts(profile.get("around"))
    measured = parts({**table(profile.get("categories")), **around})
    if not measured:
        return None
    own = table(profile.get("planned")) if inputs.run is None else {}
    peak_phase = text(own.get("peak_phase")) or text(plan.get("peak_phase"))
    whole = parts(at(plan, "phases", peak_phase)) if peak_phase else {}
    planned = parts(at(own, "phases", peak_phase)) if peak_phase else {}
    if planned:  # what surrounds the tensors is planned and measured on a GPU only
        planned = parts({**planned, **{name: whole[name] for name in around if name in whole}})
    planned = planned or whole
    both = ((f"planned ({peak_phase})", planned), ("measured", measured))
    bars = [{"label": label, "parts": sizes, "total": sum(sizes.values())} for label, sizes in both if sizes]
    return {"bars": bars, "limit": gpu_memory(inputs)}


def times(inputs: Inputs) -> dict[str, Any] | None:
    """Predicted seconds of a step by what they are spent on; parts overlap, so they do not add up."""
    time = table(at(inputs.plan, "time"))
    given = parts(time.get("parts"))
    names = [name for name in TIMES if name in given] + [name for name in given if name not in TIMES]
    if not names:
        return None
    bound = text(time.get("bound_by"))
    bars = [{"label": name, "value": given[name], "bound": name == bound} for name in names]
    return {"bars": bars, "step": positive(time.get("step"))}


def ladder(inputs: Inputs) -> dict[str, Any] | None:
    rungs = [rung for row in tables(at(inputs.ladder, "rungs")) if (rung := _rung(row))]
    if not rungs:
        return None
    limit = positive(at(inputs.ladder, "hardware", "gpu_memory")) or gpu_memory(inputs)
    if limit and max(rung["total"] for rung in rungs) < 0.05 * limit:
        limit = None  # it would flatten every bar
    return {"rungs": rungs, "limit": limit, "sweeps": _sweeps(inputs)}


def _rung(rung: dict[str, Any]) -> dict[str, Any] | None:
    sizes = parts(rung.get("holders"))
    if not sizes:  # without holders: those of its largest phase
        every = [parts(phase) for phase in table(rung.get("phases")).values()]
        sizes = max(every, key=lambda phase: sum(phase.values()), default={})
    total = positive(rung.get("peak")) or sum(sizes.values())
    if not total:
        return None
    rest = total - sum(sizes.values())
    if rest > 0.001 * total:  # the bar has to be as long as the peak
        sizes["other"] = sizes.get("other", 0) + rest
    largest = text(rung.get("largest"))
    return {
        "label": text(rung.get("name")) or "?",
        "adds": text(rung.get("adds")),
        "parts": sizes,
        "total": total,
        "largest": largest,
        "largest_bytes": sizes.get(largest) if largest else None,
        "rate": positive(rung.get("tokens_per_second")),
        "fits": _flag(rung.get("fits")),
        "measured": positive(at(rung, "measured", "peak")),
        "problem": text(at(rung, "measured", "problem")),
        "measured_rate": positive(at(rung, "measured", "tokens_per_second")),
    }


def _sweeps(inputs: Inputs) -> list[dict[str, Any]]:
    sweeps = []
    for name, given in table(at(inputs.ladder, "sweeps")).items():
        points = [
            {
                "value": said(point.get("value")),
                "peak": positive(point.get("peak")),
                "rate": positive(point.get("tokens_per_second")),
                "fits": _flag(point.get("fits")),
                "measured_peak": positive(at(point, "measured", "peak")),
                "measured_rate": positive(at(point, "measured", "tokens_per_second")),
                "problem": text(at(point, "measured", "problem")),
            }
            for point in tables(given)
        ]
        points = [point for point in points if point["peak"] or point["rate"]]
        if points:
            sweeps.append({"name": name, "points": points})
    return sweeps


def timeline(inputs: Inputs) -> dict[str, Any] | None:
    """Memory by category over time, as the profile saw it."""
    given = table(at(inputs.profile, "timeline"))
    seconds, layers = given.get("seconds"), table(given.get("categories"))
    if not isinstance(seconds, list) or len(seconds) < 2:
        return None
    layers = {
        name: values for name, values in layers.items() if isinstance(values, list) and len(values) == len(seconds)
    }
    whole = sorted(
        (index for index, second in enumerate(seconds) if number(second) is not None), key=seconds.__getitem__
    )
    clean = {name: [max(number(layers[name][index]) or 0, 0) for index in whole] for name in ordered(layers)}
    clean = {name: values for name, values in clean.items() if any(values)}
    if not clean or len(whole) < 2:
        return None
    if len(clean) > 2 * len(CATEGORIES):  # names that nobody could tell apart
        rest = [clean.pop(name) for name in list(clean) if name not in CATEGORIES or name == "other"]
        clean["other"] = [sum(column) for column in zip(*rest, strict=True)]
    kept = pick_stacked(list(clean.values()))
    return {
        "seconds": [round(seconds[whole[index]], 6) for index in kept],
        "layers": [{"name": name, "values": [values[index] for index in kept]} for name, values in clean.items()],
        "samples": len(whole),
        "limit": gpu_memory(inputs),
        "phases": [
            {"label": name, "x": begin}
            for phase in tables(given.get("phases"))
            if (name := text(phase.get("name"))) and (begin := number(phase.get("from"))) is not None
        ][:ROWS],
    }


def curves(inputs: Inputs) -> list[dict[str, Any]]:
    """Charts over steps, each with one or more lines: of what a metric says of itself, and some of several."""
    memory = {"gpu_peak": "GPU", "host_peak": "host", "disk_peak": "disk"}
    charts = [
        (name, shown.chart, shown.kind, True, name != "lr", {name: shown.label})
        for name, shown in StepRecord.shown().items()
        if shown.chart
    ]
    wanted = (  # name, title, kind of number, axis from zero, a calm line through it, fields of a line of metrics
        ("loss", "Loss", "loss", False, True, {"loss": "loss", "eval_loss": "evaluation"}),
        *charts[:2],
        ("rate", f"Tokens/s {per(inputs)}", "rate", True, True, {"tokens_per_second": "tokens/s"}),
        ("memory", "Peak memory", "bytes", True, False, memory),
        *charts[2:],
    )
    plots = []
    for name, title, kind, zero, smooth, fields in wanted:
        lines = [line for field, label in fields.items() if (line := line_of(inputs, field, label))]
        if not lines:
            continue
        limit = gpu_memory(inputs) if lines[0]["name"] == "gpu_peak" else None
        lines = [thinned(line, smooth) for line in lines]
        plots.append({"name": name, "title": title, "kind": kind, "zero": zero, "limit": limit, "lines": lines})
    return plots


def line_of(inputs: Inputs, name: str, label: str) -> dict[str, Any] | None:
    points = [(line["step"], value) for line in inputs.steps if (value := number(line.get(name))) is not None]
    if not points or (name in ("host_peak", "disk_peak") and not any(value for _, value in points)):
        return None
    return {"name": name, "label": label, "x": [step for step, _ in points], "y": [value for _, value in points]}


def thinned(line: dict[str, Any], smooth: bool) -> dict[str, Any]:
    xs, ys = line["x"], line["y"]
    kept = pick(ys)
    short = {**line, "x": [xs[index] for index in kept], "y": [ys[index] for index in kept], "points": len(xs)}
    places, means, window = running_mean(ys) if smooth else ([], [], 0)
    if places:
        short["mean"] = {
            "x": [xs[place] for place in places],
            "y": [float(f"{mean:.6g}") for mean in means],
            "of": window,
        }
    return short


def events(inputs: Inputs) -> list[dict[str, Any]]:
    """Starts, resumes, saves and stops, with the step where it is known."""
    rows = []
    for line in inputs.events:
        name = text(line.get("event"))
        step = number(line.get("from_step"))
        step = number(line.get("at_step")) if step is None else step
        checkpoint = text(line.get("checkpoint"))
        if step is None and checkpoint and checkpoint.removeprefix("step-").isdecimal():
            step = int(checkpoint.removeprefix("step-"))
        about = text(line.get("cause")) or (checkpoint and f"checkpoint {checkpoint}")
        if name == "eval" and (needle := number(line.get("needle"))) is not None:
            about = f"{needle:.1%} of needles found"
        rows.append({"event": name, "step": step, "time": text(line.get("time")), "about": about})
    return rows


def tables_of_profile(inputs: Inputs) -> list[dict[str, Any]]:
    """Kernels, lines of code and modules by what they took, and the steps that were watched."""
    profile = table(inputs.profile)
    kernels = "Operators" if profile.get("device") == "CPU" else "Kernels"
    wanted = (
        ("kernels", kernels, "seconds", "name", ("calls",)),
        ("lines", "Lines of code", "bytes", "where", ()),
        ("modules", "Modules", "bytes", "name", ()),
    )
    rankings = []
    for key, title, measure, name, more in wanted:
        rows = [
            {"name": text(row.get(name)) or "?", "value": value, **{other: number(row.get(other)) for other in more}}
            for row in tables(profile.get(key))
            if (value := positive(row.get(measure))) is not None
        ]
        rows.sort(key=lambda row: -row["value"])
        if rows:
            whole = sum(row["value"] for row in rows)
            rankings.append(
                {
                    "key": key,
                    "title": title,
                    "measure": measure,
                    "rows": rows[:ROWS],
                    "more": len(rows[ROWS:]),
                    "whole": whole,
                }
            )
    return rankings


def profile(inputs: Inputs) -> dict[str, Any] | None:
    """The rest of a profile: copies, and the steps."""
    given = table(inputs.profile)
    copies = table(given.get("copies"))
    steps = [
        {"seconds": number(step.get("seconds")), "peak": positive(step.get("peak"))}
        for step in tables(given.get("steps"))
    ]
    rest = {
        "copies": number(copies.get("seconds")),
        "exposed": number(copies.get("exposed")),
        "out": positive(copies.get("bytes_out")),
        "in": positive(copies.get("bytes_in")),
        "alone": number(at(copies, "traced", "alone")),
        "busy": positive(given.get("busy")),
        "counted": positive(at(given, "allocated", "counted")),
        "peak": positive(given.get("peak")),
        "steps": steps[:ROWS],
        "missing": [item for item in map(text, _list(given.get("missing"))) if item],
    }
    return rest if rest["copies"] is not None or steps else None


def stack(inputs: Inputs) -> list[dict[str, Any]]:
    """Every switch with its value; why, where the plan says so, and else what it means; and where it was said."""
    planned = table(at(inputs.plan, "stack"))
    ran = {name: value for name, value in table(inputs.config.get("stack")).items() if name not in ("auto", "scratch")}
    reasons = {text(reason.get("field")): reason for reason in tables(at(inputs.plan, "reasons"))}
    places = origins(inputs.config_text or "")
    given = any(path.startswith("stack.") for path in places)
    values = {**planned, **ran}
    if values.get("attention") == "auto" and (kernel := _kernel(inputs)):
        values["attention"] = f"{kernel} (auto)"
    rows = []
    for name, value in values.items():
        differs = name in planned and name in ran and said(planned[name]) != said(ran[name])
        why = text(at(reasons.get(name), "why"))
        place = places.get(f"stack.{name}")
        rows.append({
            "field": name, "value": said(value), "planned": said(planned[name]) if differs else None,
            "why": meaning(f"stack.{name}") if why in (None, "given") else why,
            "from": str(place) if place else "default" if given else None,
        })  # fmt: skip
    for name, reason in reasons.items():  # what the plan decided beyond the stack, such as train.offload_optimizer
        if name and name not in values:
            why = text(reason.get("why"))
            rows.append({"field": name, "value": said(reason.get("value")), "planned": None, "why": why, "from": None})
    return rows


def _kernel(inputs: Inputs) -> str | None:
    """Of attention, as it ran: what a run says when it starts, or what was profiled."""
    known = (
        [text(line.get("attention")) for line in inputs.events] if inputs.run else [text(at(inputs.profile, "kernel"))]
    )
    return next((kernel for kernel in reversed(known) if kernel), None)


def _list(value: Any) -> list[Any]:
    return value[:ROWS] if isinstance(value, list) else []


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
