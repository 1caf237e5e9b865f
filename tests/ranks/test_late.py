"""Seeded delays on every stream and on one rank's host: gradients are those of the run without, bit for bit where repeats are."""

from __future__ import annotations

import pytest

from ithaca.stack import Stack
from ithaca.verify.case import Case

from .late import late_runs

pytestmark = pytest.mark.ranks

SEEDS = 17
STACKS = [
    Stack(ulysses=2, heads_per_stage=1, recompute=recompute, store=store, engine=engine, tile=61, hold=hold)
    for engine, recompute, hold in (
        ("streamed", "keep_attention", True),
        ("streamed", "layer", False),
        ("composed", "keep_attention", True),
    )
    for store in ("gpu", "host", "disk")
] + [
    Stack(ring=2, recompute="keep_attention", store="host", engine="streamed"),
    Stack(ring=2, recompute="layer", store="host", engine="composed"),
    Stack(ulysses=2, heads_per_stage=2, recompute="keep_attention", store=("host", "gpu"), engine="streamed"),
]


@pytest.mark.parametrize(
    "number", range(len(STACKS)), ids=[f"{s.engine}-{s.recompute}-{s.store}-{s.ring}" for s in STACKS]
)
def test_nobody_reads_too_early(ranks, number):
    case = Case("llama3", STACKS[number], 2, "cuda", "bfloat16", 509)
    for spread, distances, sleeps in ranks.run(late_runs, case, list(range(SEEDS)), world=2):
        print(f"{number}: repeats {spread:.1e} apart, delayed {max(distances.values()):.1e}")
        assert sleeps["compute"] > SEEDS and (case.stack.offload == "gpu" or sleeps["beside"] > SEEDS)
        assert spread < 0.01 and len(distances) == SEEDS
        assert {seed: far for seed, far in distances.items() if far > spread} == {}, f"repeats: {spread}"


def test_a_missing_wait_would_be_seen(ranks):
    case = Case("llama3", STACKS[1], 2, "cuda", "bfloat16", 509)
    results = ranks.run(late_runs, case, list(range(5)), waiting=False, world=2)
    assert any(far > spread for spread, distances, _ in results for far in distances.values()), results
