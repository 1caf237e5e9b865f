"""One question on several machines: what each makes of it, side by side. Every machine gets the stack that is its own fastest.

A machine that a question cannot be asked of (four GPUs, and a stack for eight) is a column that says so, not an error of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..base.units import format_bytes, format_tokens
from .hardware import Hardware
from .plan import HOST_SHARE, Plan
from .search import CONTEXT_STEP
from .text import columns, seconds

NONE = "-"


@dataclass(frozen=True)
class Answer:
    hardware: Hardware
    plan: Plan | None  # None: it cannot be asked
    refused: str | None = None
    longest: Plan | None = None  # None: finding it would take minutes

    def json(self) -> dict[str, Any]:
        reach = self.longest.context if self.longest and self.longest.fits else None
        return {
            "gpus": self.hardware.words, "refused": self.refused, "longest": reach,
            "plan": None if self.plan is None else self.plan.json(),
        }  # fmt: skip


def compare(machines: Sequence[Hardware], ask: Callable[..., Plan]) -> list[Answer]:
    """ask: the plan on `gpus`, and with `longest` that of the longest context there."""
    answers = []
    for hardware in machines:
        try:
            plan = ask(gpus=hardware)
            longest = None if plan.executed else ask(gpus=hardware, longest=True)
            answers.append(Answer(hardware, plan, None, longest))
        except ValueError as error:
            answers.append(Answer(hardware, None, str(error)))
    if not any(answer.plan for answer in answers):
        raise ValueError(answers[0].refused)  # it is not the machines
    return answers


def table(answers: Sequence[Answer]) -> list[str]:
    asked = next(answer.plan for answer in answers if answer.plan)
    rows = [["", *(answer.hardware.words for answer in answers)]]
    rows += [[name, *map(_cell(read), answers)] for name, read in _ROWS.items()]
    rows.append(["longest context", *map(_reach, answers)])
    fields = ("ulysses", "ring", "recompute", "store", "tile", "heads_per_stage")
    plans = [answer.plan for answer in answers if answer.plan]
    for name in fields:
        if len({str(asdict(plan.stack)[name]) for plan in plans}) > 1:
            rows.append([f"  {name}", *map(_cell(lambda plan, name=name: _word(plan.stack.words(name))), answers)])
    notes: dict[str, list[str]] = {}
    for answer in answers:
        for note in _notes(answer):
            notes.setdefault(note, []).append(answer.hardware.words)
    lines = [f"{asked.model.name} at {format_tokens(asked.context)} tokens", *columns(rows)]
    return [*lines, *(f"  {', '.join(of)}: {note}" for note, of in notes.items())]


def _cell(read: Callable[[Plan], str]) -> Callable[[Answer], str]:
    return lambda answer: NONE if answer.plan is None else read(answer.plan)


def _timed(read: Callable[[Any], str]) -> Callable[[Plan], str]:
    """Of a plan that does not fit there is no time."""
    return lambda plan: NONE if not plan.fits else "not known" if plan.predicted is None else read(plan.predicted)


def _word(value: Any) -> str:
    return NONE if value is None else str(value)


_ROWS: dict[str, Callable[[Plan], str]] = {
    "fits": lambda plan: "yes" if plan.fits else "no",
    "GPU memory": lambda plan: f"{format_bytes(plan.peak)} of {format_bytes(plan.budget)}",
    "host memory needed": lambda plan: format_bytes(plan.host / HOST_SHARE) if plan.host else NONE,
    "disk needed": lambda plan: format_bytes(plan.disk) if plan.disk else NONE,
    "step": _timed(lambda speed: seconds(speed.seconds)),
    "tokens/s per GPU": _timed(lambda speed: f"{speed.tokens_per_second:,.0f}"),
    "bound by": _timed(lambda speed: speed.bound_by),
    "rates": lambda plan: "not known" if plan.predicted is None else plan.hardware.rates,
}


def _reach(answer: Answer) -> str:
    if answer.longest is None:
        return NONE
    return format_tokens(answer.longest.context) if answer.longest.fits else f"below {format_tokens(CONTEXT_STEP)}"


def _notes(answer: Answer) -> list[str]:
    plan = answer.plan
    if plan is None:
        return [f"cannot be asked: {answer.refused}"]
    notes = [] if plan.fits else [f"does not fit: {', '.join(plan.shortages)}"]
    notes += [f"would fit: {suggestion}" for suggestion in plan.advice[:1]]
    notes += [plan.untimed] if plan.untimed else []
    notes += [plan.hardware.about_links] if plan.hardware.about_links and plan.predicted else []
    return [*notes, *(f"assumed {assumption}" for assumption in plan.assumed)]
