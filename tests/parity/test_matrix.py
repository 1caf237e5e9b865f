"""Every pair of settings, on every family, equal to the untouched model: loss, logits and every gradient, float32."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import pytest

from ithaca.verify.case import Case, run_case
from ithaca.verify.matrix import AXES, all_pairs, allowed, cases, cover, pairs_of

EVERY = os.environ.get("ITHACA_FAMILIES") == "long"  # make families
WORLD = 8 if EVERY else 4  # more ranks than KV heads: test_odd_heads
# These have every kind of part that meets others in a stack: head counts that divide by nothing, biases, norms of a head and of
# all heads, a tied head, windows, experts.
FIRST = ("llama3", "qwen2_28", "qwen3", "qwen3_moe", "gemma3", "olmo2")
MODELS = AXES["model"] if EVERY else FIRST
MOST = 1021 if EVERY else 509
ROWS = cover(WORLD, seed=0 if EVERY else 18, models=MODELS)  # 18 needs fewest rows here, 21
LONG = cases(ROWS, WORLD, MOST)


def rows(case: Case) -> int:
    """Of all groups of ranks that share a sequence."""
    return case.rows * case.world // case.stack.context_ranks


# One case of each model has the most tokens, on four or eight ranks, the others less: the untouched model beside them takes
# long, by the square of it, and on each row; and the more tokens, the sooner two experts are equally good for one of them.
LONGEST = {case.model: case for case in sorted(LONG, key=lambda case: (case.stack.context_ranks >= 4, -rows(case)))}


def fewer(case: Case) -> int:
    """Tokens that still make several tiles on each rank."""
    ranks = case.stack.context_ranks
    return 509 if (ranks == 8 and (EVERY or case.stack.tile)) or (EVERY and rows(case) == 1) else 251


CASES = [case if case is LONGEST[case.model] else replace(case, length=fewer(case)) for case in LONG]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.model}" for i, case in enumerate(CASES)])
def test_case(workers, case):
    items = workers.run(run_case, case, ("logits", "case"), world=case.world)[0]
    # where the untouched model's own rotary angles are too far off, it is measured with exact ones as well
    names = {item.name.removeprefix("exact angles: ").split(" (")[0] for item in items}
    assert names == {"logits", "loss", "gradients"}
    missed = [f"{item.name}: {item.error:.2e} > {item.limit:.0e} at {item.where}" for item in items if not item.ok]
    assert not missed, f"{case}: {missed}"


def test_the_matrix_has_every_pair():
    """Counted apart from the generator: each two values of each two axes, unless refused."""
    seen = set().union(*(pairs_of(row) for row in ROWS))
    assert seen == all_pairs(WORLD, MODELS)
    values = {**AXES, "model": MODELS, "ulysses": tuple(ranks for ranks in AXES["ulysses"] if ranks <= WORLD)}
    possible = sum(
        allowed({a: x, b: y}, WORLD)
        for i, a in enumerate(AXES)
        for b in list(AXES)[i + 1 :]
        for x, y in product(values[a], values[b])
    )
    refused = {("ulysses", WORLD, "ring", 2), ("recompute", "none", "engine", "streamed")}
    refused |= {("recompute", "none", "store", store) for store in ("host", "disk")}
    whole = sum(len(values[a]) * len(values[b]) for i, a in enumerate(AXES) for b in list(AXES)[i + 1 :])
    assert len(seen) == possible == whole - len(refused)


def test_the_matrix_covers_what_it_claims():
    assert {case.model for case in CASES} == set(MODELS)
    assert {case.stack.context_ranks for case in CASES} == {1, 2, 4, WORLD}
    assert any(case.stack.replicate > 1 for case in CASES)
    assert any(case.world > case.stack.context_ranks * case.stack.replicate for case in CASES)  # data-parallel shards
    assert any(case.rows > 1 for case in CASES)
    long = {case.model: case.stack.context_ranks for case in LONGEST.values() if case.length == MOST}
    assert set(long) == set(MODELS) and set(long.values()) <= {4, 8}
    assert {case.length for case in cases(ROWS, WORLD, 77)} == {77}
    assert {case.length for case in CASES} == {MOST, 509, 251}  # primes: neither ranks nor tiles divide them
    assert all(case.length // case.stack.context_ranks > 61 for case in CASES if case.stack.tile == 61)  # several tiles
