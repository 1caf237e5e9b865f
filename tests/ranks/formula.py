"""Real ranks by the kernel `math`, which computes in float32 on any device, so that they can be held to the float32 limits."""

from __future__ import annotations

from dataclasses import replace

from ithaca.verify.case import Case, run_case
from ithaca.verify.reference import Item


def run_exactly(case: Case, checks: tuple[str, ...]) -> list[Item]:
    """`run_case` in float32 by the formula."""
    return run_case(replace(case, dtype="float32", stack=replace(case.stack, attention="math")), checks)
