"""Every pair of settings on real NCCL ranks, on 2, 4 and 8 of them.

In float32, by the formula: loss, logits and every gradient within 1e-5 of the untouched model, as on the CPU. In bf16, by the
kernels of a GPU: gradients no further from float32 than the untouched model's. Over several batches, for a parameter of a few dozen
numbers scatters from one to the next; and without experts, of which bf16 chooses another one each time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ithaca.engine.model.families import FAMILIES
from ithaca.engine.model.presets import TINY
from ithaca.verify.case import BFLOAT16_LIMIT, Case
from ithaca.verify.matrix import cases, cover
from ithaca.verify.reference import SINGLE_LIMIT

from ..gpu.batches import WIDE, ratios
from .formula import run_exactly

pytestmark = pytest.mark.ranks


def cases_of(world: int) -> list[Case]:
    """Of the matrix for so many ranks those that use them all."""
    every = cases(cover(world), world, length=509)
    return [replace(case, device="cuda") for case in every if case.world == world]


CASES = {f"{world}-{i}-{case.model}": case for world in (2, 4, 8) for i, case in enumerate(cases_of(world))}
# without experts, and without Phi-3, whose widths are tied
DENSE = {
    name: case
    for name, case in CASES.items()
    if case.model != "phi3" and not FAMILIES[TINY[f"tiny_{case.model}"]["model_type"]].experts
}


@pytest.mark.parametrize("name", CASES)
def test_float32(ranks, name):
    case = CASES[name]
    items = ranks.run(run_exactly, case, ("logits", "case"), world=case.world)[0]
    assert {item.name.split(" (")[0] for item in items} >= {"logits", "loss", "gradients"}
    missed = [f"{item.name}: {item.error:.2e} > {item.limit:.0e} at {item.where}" for item in items if not item.ok]
    assert not missed, f"{case}: {missed}"


@pytest.mark.parametrize("name", DENSE)
def test_bf16(ranks, name):
    case = replace(DENSE[name], dtype="bfloat16", changes=WIDE)
    apart = ranks.run(ratios, case, batches=4, world=case.world)[0]
    print(name, round(apart[""], 3), round(max(apart.values()), 3))
    assert apart[""] <= BFLOAT16_LIMIT and max(apart.values()) <= SINGLE_LIMIT
