"""The ladder, measured: every rung runs for real, in a process of its own, and the next one starts with an empty GPU.

A rung that runs out of memory says so and the ladder goes on: which rungs do not fit is what it is for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from ...base.processes.apart import run_apart
from ...base.processes.process import how_it_ended
from ...planner.ladder import Ladder, Measurable
from .case import OUT_OF_MEMORY, answer, problem
from .wanted import ROOM, Wanted


def measure_ladder(
    ladder: Ladder,
    model: str,
    *,
    layers: int | None,
    steps: int,
    cpu: bool,
    limit: int | None,
    sweeps: bool = False,
    kernel: str | None = None,
    say: Callable[[str], object] = lambda line: None,
    run: Callable[[Wanted], dict[str, Any]] | None = None,
) -> None:
    """Fill in what was measured, rung by rung. sweeps: the sweeps too. kernel: the one to attend with, not the machine's best.
    run: measures one case (default: in another process)."""
    if cpu:  # all of it, so that the bars of one drawing can be compared
        for case in [*ladder.rungs, *(point for points in ladder.sweeps.values() for point in points)]:
            case.plan = replace(case.plan, around=False)
    named: list[tuple[str, Measurable]] = [(rung.name, rung) for rung in ladder.rungs]
    if sweeps:
        named += [(f"{name}={point.value}", point) for name, points in ladder.sweeps.items() for point in points]
    for name, case in named:
        say(f"measuring {name}")
        job = case.plan.job
        groups = job.world // job.stack.context_ranks
        if job.rows % groups:  # GPUs that do not share a sequence have one each
            job = replace(job, rows=groups)
        if kernel is not None:
            job = replace(job, stack=replace(job.stack, attention=kernel))
        wanted = Wanted(job=job, model=model, layers=layers, steps=steps, cpu=cpu, limit=limit)
        planned = case.plan.allocated
        if cpu and planned > ROOM * psutil.virtual_memory().available:
            found = problem(OUT_OF_MEMORY)
        else:
            found = (run or apart)(wanted)
        case.measured = {**found, "planned": planned}


def apart(wanted: Wanted) -> dict[str, Any]:
    """What a case answers, or what stopped it."""
    ended = run_apart(answer, wanted, preload=[answer.__module__])
    if ended.status == 0:
        return ended.value
    if ended.status == -signal.SIGKILL:
        return problem("killed, probably for want of host memory")
    said = [line for line in ended.printed.splitlines() if line.strip()]
    return problem(said[-1].strip() if said else how_it_ended(ended.status or 0))
