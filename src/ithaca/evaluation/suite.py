"""An evaluation: everything that `eval` of a config asks for, as one record of plain numbers.

    {"eval": 1, "step": 400, "context": 2048,
     "held_out": {"loss": 2.1, "perplexity": 8.2, "accuracy": 0.55, "tokens": 16376, "positions": [{"from": 0, "to": 2, …}, …]},
     "needle": {"lengths": [512, 1024, 2048], "depths": [0.0, …, 1.0], "accuracy": [[1.0, …], …], …},
     "tasks": [{"task": "multi_key", "length": 2048, "accuracy": 0.98, "exact": 0.97, "log_probability": -0.04, …}, …]}

With an objective of units (dpo, policy), held_out is the loss of that objective and its numbers, which are compared with the run's
reference: {"loss": 0.61, "margin": 0.2, "accuracy": 0.7, …, "units": 64}.

accuracy: share of answer tokens that are the likeliest ones, given the answer so far; exact: share of answers of which every
token is. log_probability: mean over answer tokens. The same rows are scored every time, so numbers of different steps, and of
different models with one tokenizer, can be compared. No random number is drawn and no state of a run is touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from ..data.batch import Scores
from ..data.rows import Stream
from ..engine.criterion import Criterion, units_of
from ..engine.run import Run
from ..observe.record import utc_now
from ..storage.state import at_rest
from .languages import Language
from .reference import batches_of
from .score import position_edges, score_rows
from .tasks import Task

GRID = "needle"


@dataclass(frozen=True)
class Suite:
    """What is evaluated, made once: a text that does not fit into a length is an error here, not after hours of training."""

    held_out: Stream | None
    grid: list[list[Task]]  # by length, then depth
    tasks: list[Task]
    rows: int  # of held-out data
    samples: int  # of each task, and of each cell of the grid
    tokens: int  # most tokens of a forward, for each data-parallel group
    language: str | None
    criterion: Criterion | None = None  # what held-out units are measured by
    reference: Scores | None = None  # scores of a reference that are read with them


def make_suite(config: Config, language: Language | None, held_out: Stream | None, groups: int) -> Suite:
    """groups: data-parallel groups. A forward takes no more tokens than one of training does."""
    evaluate, context = config.eval, config.data.context
    lengths = evaluate.lengths or tuple(sorted({max(context // 4, 1), max(context // 2, 1), context}))
    depths = [at / max(evaluate.depths - 1, 1) for at in range(evaluate.depths)]
    grid, tasks = [], []
    if evaluate.tasks:
        assert language is not None
        seed = evaluate.seed
        if GRID in evaluate.tasks:
            grid = [[Task(GRID, language, length, depth, seed) for depth in depths] for length in lengths]
        tasks = [
            Task(kind, language, length, None, seed) for kind in evaluate.tasks if kind != GRID for length in lengths
        ]
    return Suite(
        held_out=held_out,
        grid=grid,
        tasks=tasks,
        rows=0 if held_out is None else min(evaluate.rows, len(held_out)),
        samples=evaluate.samples,
        tokens=context * max(1, config.train.rows // config.train.accumulation // groups),
        language=language.name if language else None,
    )


class _LeftOff(Exception):
    pass


def run_suite(
    run: Run, suite: Suite, step: int, before: Callable[[str], bool] = lambda words: False
) -> dict[str, Any] | None:
    """Evaluate. Collective; every rank gets the same record.

    before: called before every forward with what comes, on every rank; where it says True the evaluation is left off and there
    is no record. Whoever runs for hours wants to be asked to stop in between.
    """
    try:
        return _run(run, suite, step, before)
    except _LeftOff:
        return None
    finally:
        at_rest(run)  # FSDP2 leaves what it gathered last whole until a backward; here there is none


def _run(run: Run, suite: Suite, step: int, before: Callable[[str], bool]) -> dict[str, Any]:
    def ask(words: str) -> None:
        if before(f"evaluating: {words}"):
            raise _LeftOff

    begin = time.perf_counter()
    record: dict[str, Any] = {"eval": 1, "step": step, "time": utc_now(), "language": suite.language}
    if suite.held_out is not None:
        record["context"] = suite.held_out.context
        measure = _by_position if suite.criterion is None else _of_units
        record["held_out"] = measure(run, suite, suite.held_out, ask)
    if suite.grid:
        cells = [[_answers(run, task, suite, ask) for task in row] for row in suite.grid]
        record["needle"] = {
            "lengths": [row[0].context for row in suite.grid],
            "depths": [task.depth for task in suite.grid[0]],
            **{
                name: [[cell[name] for cell in row] for row in cells]
                for name in ("accuracy", "exact", "log_probability")
            },
            "samples": suite.samples,
            "mean": _mean([cell["accuracy"] for row in cells for cell in row]),
        }
    results = []
    for task in suite.tasks:
        sums = _answers(run, task, suite, ask)
        results.append({"task": task.kind, "length": task.context, **sums, "samples": suite.samples})
    if results:
        record["tasks"] = results
    record["seconds"] = round(time.perf_counter() - begin, 3)
    return record


def _answers(run: Run, task: Task, suite: Suite, ask: Callable[[str], None]) -> dict[str, float]:
    sums = score_rows(run, task, range(suite.samples), tokens=suite.tokens, before=lambda: ask(task.name)).rows
    loss, hits, count = sums.sum(0).tolist()
    exact = (sums[:, 1] == sums[:, 2]).double().mean().item()
    return {"accuracy": hits / count, "exact": exact, "log_probability": -loss / count}


def _by_position(run: Run, suite: Suite, stream: Stream, ask: Callable[[str], None]) -> dict[str, Any]:
    edges = position_edges(stream.context)
    scored = score_rows(
        run, stream, range(suite.rows), tokens=suite.tokens, edges=edges, before=lambda: ask("held-out data")
    )
    ends = [*edges[1:], stream.context]
    ranges = [
        {"from": start, "to": stop, **_summary(sums)}
        for start, stop, sums in zip(edges, ends, scored.ranges, strict=True)
        if float(sums[2]) > 0
    ]
    return {**_summary(scored.rows.sum(0)), "rows": suite.rows, "positions": ranges}


@torch.no_grad()
def _of_units(run: Run, suite: Suite, stream: Stream, ask: Callable[[str], None]) -> dict[str, Any]:
    assert suite.criterion is not None
    found = batches_of(run, stream, range(suite.rows), suite.tokens, suite.reference)
    batches = [batch for batch, _ in found]
    losses, loss = suite.criterion.losses(run, batches), 0.0
    for _ in batches:
        ask("held-out data")
        loss += float(next(losses)[0])
    count = sum(units_of(batch).count for batch in batches)
    return {"loss": loss, **suite.criterion.numbers(), "units": count, "rows": suite.rows}


def _summary(sums: Tensor) -> dict[str, float]:
    loss, hits, count = sums.tolist()
    mean = loss / count
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "accuracy": hits / count, "tokens": int(count)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def headline(record: dict[str, Any]) -> dict[str, float]:
    """The few numbers of an evaluation that make curves."""
    scores: dict[str, float] = {}
    if "held_out" in record:
        scores["held_out"] = record["held_out"]["loss"]
        if "units" in record["held_out"]:
            names = [name for name in ("margin", "accuracy", "kl", "entropy") if name in record["held_out"]]
            scores.update({f"held_out_{name}": record["held_out"][name] for name in names})
    if "needle" in record:
        scores["needle"] = record["needle"]["mean"]
        scores["needle_longest"] = _mean(record["needle"]["accuracy"][-1])
    for kind in dict.fromkeys(result["task"] for result in record.get("tasks", [])):
        scores[kind] = _mean([result["accuracy"] for result in record["tasks"] if result["task"] == kind])
    return scores
