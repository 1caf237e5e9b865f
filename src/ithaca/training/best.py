"""The best evaluation of a run so far, and how many in a row have not been better: for `eval.stop_after` and `eval.keep_best`.

Rank 0 decides and all know: numbers that differ in their last bit between ranks must not end the run on some of them. The record
goes into every checkpoint, so a run that was stopped goes on counting where it was. It is of one question: where the evaluation
asks something else than before (other rows, tasks, lengths, another metric), numbers cannot be compared, and it starts anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..base.fields import COUNT, NUMBER, TEXT, OrNull
from ..config.schema import Config, Evaluate

FIELDS = {"metric": TEXT, "asked": TEXT, "value": OrNull(NUMBER), "step": OrNull(COUNT), "since": COUNT}
"""Of the record in a checkpoint."""


@dataclass(frozen=True)
class Best:
    metric: str  # a name of config.schema.METRICS
    asked: str  # what changes with the question
    value: float | None = None
    step: int | None = None
    since: int = 0  # evaluations that were not better

    @classmethod
    def of(cls, config: Config) -> Best | None:
        """Before the first evaluation; None where none are compared."""
        evaluate = config.eval
        if not (evaluate.keep_best or evaluate.stop_after):
            return None
        held_out = bool(evaluate.sources) or evaluate.packed is not None or config.data.holds_out
        metric = evaluate.metric or ("held_out" if held_out else evaluate.tasks[0])
        question = replace(
            evaluate, metric=metric, every=None, improvement=0.0, stop_after=None, keep_best=False, packed=None
        )
        asked = repr((question, config.data.context))
        return cls(metric, hashlib.sha256(asked.encode()).hexdigest()[:16])

    def after(self, scores: dict[str, float], step: int, improvement: float) -> Best:
        """With one evaluation more. A loss is to be low, an accuracy high."""
        value = scores[self.metric]
        gain = None if self.value is None else self.value - value if self.metric == "held_out" else value - self.value
        if gain is None or gain > improvement:
            return replace(self, value=value, step=step, since=0)
        return replace(self, since=self.since + 1)

    def enough(self, evaluate: Evaluate) -> bool:
        return evaluate.stop_after is not None and self.since >= evaluate.stop_after

    def resumed(self, record: dict[str, Any] | None) -> Best:
        """As a checkpoint has it, if it is of the same question."""
        if record is None or (record["metric"], record["asked"]) != (self.metric, self.asked):
            return self
        return Best(**{name: record[name] for name in FIELDS})

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        return f"{self.metric} {self.value:.6g} after step {self.step:,}"
