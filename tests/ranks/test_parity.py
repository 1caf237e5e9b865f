"""Every pair of settings on real NCCL ranks: loss, logits and every gradient within bf16's own distance, on 2, 4 and 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ithaca.verify.case import Case, run_case
from ithaca.verify.matrix import cases, cover

pytestmark = pytest.mark.ranks


def cases_of(world: int) -> list[Case]:
    """Of the matrix for so many ranks those that use them all."""
    every = cases(cover(world), world, length=509)
    return [replace(case, device="cuda", dtype="bfloat16") for case in every if case.world == world]


CASES = [case for world in (2, 4, 8) for case in cases_of(world)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.world}-{i}-{case.model}" for i, case in enumerate(CASES)])
def test_case(ranks, case):
    items = ranks.run(run_case, case, ("logits", "case"), world=case.world)[0]
    assert {item.name.split(" (")[0] for item in items} == {"logits", "loss", "gradients", "worst gradient"}
    missed = [f"{item.name}: {item.error:.2f} > {item.limit:.1f} at {item.where}" for item in items if not item.ok]
    assert not missed, f"{case}: {missed}"
