"""One case of a table: measured, and answered in a few numbers. What runs it runs it in a process of its own (rungs.py)."""

from __future__ import annotations

from statistics import median
from typing import Any

from ...base.exits import MEMORY, code_of
from .measure import measure
from .wanted import Wanted

OUT_OF_MEMORY = "out of memory"


def answer(wanted: Wanted) -> dict[str, Any]:
    try:
        measured = measure(wanted)
    except Exception as error:
        if code_of(error) == MEMORY:
            return problem(OUT_OF_MEMORY)
        return problem(str(error).splitlines()[0] if str(error) else type(error).__name__)
    seconds = median(step["seconds"] for step in measured.steps if step["seconds"] is not None)
    peaks = [step["peak"] for step in measured.steps if step["peak"] is not None]
    tensors = max(peaks) if peaks else measured.account.peak
    return {
        "peak": tensors + sum(measured.around.values()),
        "tensors": tensors,
        "tokens_per_second": measured.tokens / seconds,
        "seconds": seconds,
        "categories": measured.account.categories,
        "device": measured.device,
        "kernel": measured.kernels_of,
        "problem": None,
    }


def problem(words: str) -> dict[str, Any]:
    return {"peak": None, "tensors": None, "tokens_per_second": None, "problem": words}
