"""The top of the page: what ran, on what, how it ended, the figures that matter, and the plan beside the measurement.

Rates and times are medians over the logged steps without the first, which also compiles and allocates; memory is the largest. Of
a run in phases it is the last one's: the phases differ in length, and the plan is that of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ...base.units import parse_tokens
from .inputs import Inputs
from .values import at, number, positive, table, tables, text


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; None where nothing was."""

    steps: int = 0  # logged steps behind the medians
    peak: float | None = None
    host: float | None = None
    disk: float | None = None
    seconds: float | None = None
    rate: float | None = None
    mfu: float | None = None


def measure(inputs: Inputs) -> Measured:
    """Of the run; what it did not log comes from the profile."""
    steps = last_phase(inputs)
    warm = steps[1:] or steps
    profile = table(inputs.profile)
    profiled = tables(profile.get("steps"))
    return Measured(
        steps=len(warm),
        peak=_largest(steps, "gpu_peak") or positive(profile.get("peak")) or _largest(profiled, "peak"),
        host=_largest(steps, "host_peak"),
        disk=_largest(steps, "disk_peak"),
        seconds=_median(warm, "seconds") or _median(profiled, "seconds"),
        rate=_median(warm, "tokens_per_second") or positive(profile.get("tokens_per_second")),
        mfu=_median(warm, "mfu"),
    )


def last_phase(inputs: Inputs) -> list[dict[str, Any]]:
    """The logged steps of the phase that came last; all of them, if there are no phases."""
    ends = list(accumulate(int(positive(phase.get("steps")) or 0) for phase in tables(inputs.config.get("phases"))))
    last = inputs.steps[-1]["step"] if inputs.steps else 0
    begin = max((end for end in ends if end < last), default=0)
    return [line for line in inputs.steps if line["step"] > begin]


def on_cpu(inputs: Inputs) -> bool:
    profiled = inputs.run is None and at(inputs.profile, "device") == "CPU"
    return profiled or positive(at(inputs.config, "launch", "cpu")) is not None


def per(inputs: Inputs) -> str:
    return "per process" if on_cpu(inputs) else "per GPU"


def gpu_memory(inputs: Inputs) -> float | None:
    """Memory of one GPU; nothing that a profile of CPU tensors could be held against."""
    if inputs.run is None and inputs.profile and on_cpu(inputs):
        return None
    known = (at(source, "hardware", "gpu_memory") for source in (inputs.plan, inputs.ladder, inputs.profile))
    return next((size for size in map(positive, [*known, at(inputs.config, "launch", "gpu_memory")]) if size), None)


def heading(inputs: Inputs) -> dict[str, Any]:
    """Title, state, and the facts in the line below."""
    kinds = [name for name in ("plan", "ladder", "profile") if getattr(inputs, name)]
    name = text(at(inputs.config, "run", "name")) or (inputs.run and inputs.run.resolve().name)
    model = _model(inputs)
    title = name or text(model.get("name")) or (kinds or ["run"])[0].capitalize()
    return {
        "title": title,
        "kind": "run" if inputs.run else " and ".join(kinds),
        "description": text(inputs.config.get("description")),
        "facts": _facts(inputs, model, title),
        "state": _state(inputs),
    }


def figures(inputs: Inputs) -> list[dict[str, Any]]:
    """The large numbers: label, kind of number, value, and a note. `of` is what a share is of."""
    measurement = measure(inputs)
    if inputs.steps:
        return _run_figures(inputs, measurement)
    if at(inputs.profile, "planned"):
        return _profile_figures(inputs)
    if inputs.plan:
        return _plan_figures(inputs, measurement)
    if inputs.ladder:
        return _ladder_figures(inputs)
    return _profile_figures(inputs)


def comparison(inputs: Inputs) -> list[dict[str, Any]]:
    """Plan against measurement: rows with both numbers, and how far the measured one is off as a share of the plan's."""
    measurement, plan = measure(inputs), table(inputs.plan)
    planned = table(at(inputs.profile, "planned"))
    pairs: tuple[tuple[str, str, Any, Any], ...] = (
        # of tensors, as torch counts them: the plan's peak has the CUDA context and the allocator's slack on top
        ("Peak GPU memory", "bytes", plan.get("allocated") or plan.get("peak"), measurement.peak),
        ("Host memory", "bytes", plan.get("host"), measurement.host),
        ("Disk", "bytes", plan.get("disk"), measurement.disk),
        ("Step time", "seconds", at(plan, "time", "step"), measurement.seconds),
        (f"Tokens/s {per(inputs)}", "rate", at(plan, "time", "tokens_per_second"), measurement.rate),
    )
    if planned and not inputs.steps:  # a profile knows what was planned of exactly the layers that it ran
        pairs = (
            ("Tensors at the peak", "bytes", planned.get("peak"), positive(at(inputs.profile, "peak"))),
            ("Step time", "seconds", planned.get("step"), measurement.seconds),
            (f"Tokens/s {per(inputs)}", "rate", planned.get("tokens_per_second"), measurement.rate),
        )
    rows = []
    for label, kind, predicted, measured in pairs:
        predicted = number(predicted)
        if predicted is None or measured is None or not (predicted or measured):
            continue
        off = (measured - predicted) / predicted if predicted else None
        rows.append({"label": label, "kind": kind, "predicted": predicted, "measured": measured, "deviation": off})
    return rows


def _facts(inputs: Inputs, model: dict[str, Any], title: str) -> list[dict[str, Any]]:
    every = (inputs.plan, inputs.ladder, inputs.profile)
    hardware = next((table(at(source, "hardware")) for source in every if at(source, "hardware")), {})
    profile = table(inputs.profile) if inputs.run is None else {}
    part = profile or table(inputs.ladder) if inputs.run is None else {}
    ran, depth = positive(part.get("layers")), positive(at(part, "model", "layers"))
    rank_of = positive(profile.get("rank_of"))
    gpus, gpu = positive(hardware.get("gpus")), text(hardware.get("gpu"))
    name = text(model.get("name"))
    cpus = positive(at(inputs.config, "launch", "cpu"))
    facts = [
        ("model", "text", name if name != title else None),
        ("family", "text", text(model.get("family"))),
        ("parameters", "count", positive(model.get("parameters"))),
        (
            "layers",
            "text",
            f"{ran} of {depth}" if ran and depth and ran != depth else text(positive(model.get("layers"))),
        ),
        ("context", "tokens", _context(inputs)),
        ("rows a step", "integer", positive(at(inputs.plan, "rows")) or positive(at(inputs.config, "train", "rows"))),
        ("planned for" if profile else "GPUs", "text", f"{gpus} × {gpu}" if gpus and gpu else text(gpus) or gpu),
        ("measured on", "text", text(profile.get("device"))),
        ("as rank 0 of", "integer", rank_of if rank_of and rank_of > 1 else None),
        ("CPU processes", "integer", cpus if not gpus else None),
        ("host memory", "bytes", positive(hardware.get("host_memory"))),
        ("disk", "bytes", positive(hardware.get("disk"))),
    ]
    return [{"label": label, "kind": kind, "value": value} for label, kind, value in facts if value is not None]


def _model(inputs: Inputs) -> dict[str, Any]:
    for source in (
        inputs.profile if inputs.run is None else None,
        inputs.plan,
        inputs.ladder,
    ):  # a plan may be of a slice
        model = at(source, "model")
        if isinstance(model, str):
            return {"name": model}
        if table(model):
            return table(model)
    folder = text(at(inputs.config, "model", "folder"))
    return {"name": Path(folder).name or folder} if folder else {}


def _context(inputs: Inputs) -> float | None:
    given = at(inputs.config, "data", "context")
    if isinstance(given, str):
        try:
            given = parse_tokens(given)
        except ValueError:
            given = None
    known = (at(source, "context") for source in (inputs.plan, inputs.ladder, inputs.profile))
    return next((count for count in map(positive, [given, *known]) if count), None)


def _state(inputs: Inputs) -> dict[str, Any] | None:
    status = inputs.status
    name = text(status.get("state"))
    if name is None:
        return None
    ended = name in ("stopped", "failed") or inputs.killed
    cause = text(status.get("cause"))
    if inputs.killed:
        name, cause = "killed", "The run is marked as running, but no process holds its folder any more."
    return {
        "name": name,
        "time": text(status.get("time")),
        "step": number(status.get("step")),
        "steps": positive(status.get("steps")),
        "cause": cause if ended else None,
        "exit_code": number(status.get("exit_code")) if ended else None,
        "resume": text(status.get("resume")) if ended else None,
    }


def _figure(label: str, kind: str, value: Any, note: str | None = None, **more: Any) -> dict[str, Any]:
    return {"label": label, "kind": kind, "value": value, "note": note, **more}


def _kept(candidates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [figure for figure in candidates if figure["value"] is not None]


def _run_figures(inputs: Inputs, measurement: Measured) -> list[dict[str, Any]]:
    losses = [(line["step"], loss) for line in inputs.steps if (loss := number(line.get("loss"))) is not None]
    over = f"median of {measurement.steps:,} steps" if measurement.steps > 1 else "one step"
    over += " of the last phase" if len(last_phase(inputs)) < len(inputs.steps) else ""
    first = f"{losses[0][1]:.4g} at step {losses[0][0]:,}" if len(losses) > 1 else None
    at_step = inputs.steps[-1]
    ended = inputs.status.get("state") == "finished"
    return _kept(
        [
            _figure(f"Tokens/s {per(inputs)}", "rate", measurement.rate, over),
            _figure("Peak GPU memory", "bytes", measurement.peak, of=gpu_memory(inputs)),
            _figure("MFU", "share", measurement.mfu, "attention counted"),
            _figure(
                "Final loss" if ended else "Loss", "loss", losses[-1][1] if losses else None, first and f"from {first}"
            ),
            _figure("Step time", "seconds", measurement.seconds, "median"),
            _figure("Tokens trained", "count", positive(at_step.get("tokens")), f"in {at_step['step']:,} steps"),
            _figure("Host memory", "bytes", measurement.host or None, f"kept activations, {per(inputs)}"),
            _figure("Disk", "bytes", measurement.disk or None, f"kept activations, {per(inputs)}"),
        ]
    )


def _plan_figures(inputs: Inputs, measurement: Measured) -> list[dict[str, Any]]:
    plan = table(inputs.plan)
    time = table(plan.get("time"))
    bound = text(time.get("bound_by"))
    spare = number(plan.get("spare"))
    fits = plan.get("fits")
    fits = fits if isinstance(fits, bool) else None
    return _kept(
        [
            _figure("Fits", "yes", fits),
            _figure("Peak GPU memory", "bytes", positive(plan.get("peak")), "predicted", of=gpu_memory(inputs)),
            _figure("Spare" if spare is None or spare >= 0 else "Too much", "bytes", spare and abs(spare)),
            _figure("Tokens/s per GPU", "rate", positive(time.get("tokens_per_second")), "predicted"),
            _figure(
                "Step time",
                "seconds",
                positive(time.get("step")),
                f"predicted, bound by {bound}" if bound else "predicted",
            ),
            _figure("Host memory", "bytes", positive(plan.get("host")), "predicted, per GPU"),
            _figure("Disk", "bytes", positive(plan.get("disk")), "predicted, per GPU"),
            _figure("Measured peak", "bytes", measurement.peak, "profile", of=gpu_memory(inputs)),
        ]
    )


def _ladder_figures(inputs: Inputs) -> list[dict[str, Any]]:
    rungs = [rung for rung in tables(at(inputs.ladder, "rungs")) if positive(rung.get("peak"))]
    if not rungs:
        return []
    low = min(rungs, key=lambda rung: rung["peak"])
    fastest = max(
        (rate for rung in rungs if rung.get("fits") and (rate := positive(rung.get("tokens_per_second")))), default=None
    )
    return _kept(
        [
            _figure("Rungs that fit", "text", f"{sum(rung.get('fits') is True for rung in rungs)} of {len(rungs)}"),
            _figure("First rung", "bytes", rungs[0]["peak"], text(rungs[0].get("name"))),
            _figure("Lowest peak", "bytes", low["peak"], text(low.get("name")), of=gpu_memory(inputs)),
            _figure(
                "Less memory",
                "times",
                rungs[0]["peak"] / low["peak"] if low is not rungs[0] else None,
                "first to lowest",
            ),
            _figure("Fastest that fits", "rate", fastest, "tokens/s per GPU"),
        ]
    )


def _profile_figures(inputs: Inputs) -> list[dict[str, Any]]:
    measurement, profile = measure(inputs), table(inputs.profile)
    copies, exposed = number(at(profile, "copies", "seconds")), number(at(profile, "copies", "exposed"))
    hidden = 1 - exposed / copies if copies and exposed is not None else None
    phase, planned = text(profile.get("peak_phase")), positive(at(profile, "planned", "peak"))
    about = f"of tensors in {phase}" if phase else None
    return _kept(
        [
            _figure(
                "Peak of CPU tensors" if on_cpu(inputs) else "Peak GPU memory",
                "bytes",
                measurement.peak,
                about,
                of=gpu_memory(inputs),
            ),
            _figure("Planned peak", "bytes", planned),
            _figure("Step time", "seconds", measurement.seconds, "median"),
            _figure(f"Tokens/s {per(inputs)}", "rate", measurement.rate),
            _figure("Copies hidden", "share", hidden, "behind computation"),
        ]
    )


def _largest(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    return max((value for line in lines if (value := number(line.get(name))) is not None), default=None)


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for line in lines if (value := number(line.get(name))) is not None]
    return median(values) if values else None
