"""The longest context, with the dry run as the judge: it fits there, and does not one step further.

Arithmetic finds a stack and a first guess in a second; the dry run, which executes the code, takes half a minute a context and is
believed. Memory grows in proportion to the context, or nearly so, which makes the next guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..base.units import format_tokens
from ..engine.cost import RankCost
from ..engine.job import Memory
from ..engine.layer.cost import near
from .plan import Plan
from .search import CONTEXT_STEP


def confirmed(
    plan: Plan,
    counted: Callable[[int], Memory],
    say: Callable[[str], object] = lambda line: None,
    step: int = CONTEXT_STEP,
) -> tuple[int | None, list[Plan]]:
    """-> the longest context in multiples of `step` that fits with this plan's stack, or None, and what was counted on the way

    counted: what a step of so many tokens holds.
    """
    tried: dict[int, Plan] = {}
    fits, fails = 0, None
    at = max(1, plan.context // step)
    while fails is None or fails - fits > 1:
        say(f"dry run at {format_tokens(at * step)}")
        job, held = replace(plan.job, context=at * step), counted(at * step)
        # what a dry run does not see
        memory = replace(held, snapshot=plan.memory.snapshot, near=near(RankCost(job), held.disk))
        now = tried[at] = replace(plan, job=job, memory=memory)
        if now.excess:
            fails = at
        else:
            fits = at
        guess = int(at / max(now.shares.values()))
        at = max(guess, fits + 1) if fails is None else min(max(guess, fits + 1), fails - 1)
    return fits * step or None, [tried[multiple] for multiple in sorted(tried)]
