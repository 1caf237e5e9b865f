"""The ladder, measured: every rung runs for real, in a process of its own, and the next one starts with an empty GPU.

A rung that runs out of memory says so and the ladder goes on: which rungs do not fit is what it is for.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import psutil

from ...base.exits import MEMORY
from ...planner.ladder import Ladder, Measurable
from .wanted import ROOM, Wanted

OUT_OF_MEMORY = "out of memory"


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
            answer = problem(OUT_OF_MEMORY)
        else:
            answer = (run or apart)(wanted)
        case.measured = {**answer, "planned": planned}


def apart(wanted: Wanted) -> dict[str, Any]:
    """What a case answers, or what stopped it."""
    done = subprocess.run(
        [sys.executable, "-m", "ithaca.observe.profiler"],
        input=json.dumps(wanted.json()),
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return {**json.loads(done.stdout.splitlines()[-1]), "problem": None}
    if done.returncode == MEMORY:
        return problem(OUT_OF_MEMORY)
    if done.returncode == -signal.SIGKILL:
        return problem("killed, probably for want of host memory")
    return problem(_last(done.stderr.splitlines()) or f"ended with code {done.returncode}")


def problem(words: str) -> dict[str, Any]:
    return {"peak": None, "tensors": None, "tokens_per_second": None, "problem": words}


def _last(lines: Iterable[str]) -> str:
    return next((line.strip() for line in reversed(list(lines)) if line.strip()), "")
