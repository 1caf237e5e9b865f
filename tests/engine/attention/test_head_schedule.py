"""The head schedule, proved by exhaustion.

`broken_rules` states what a schedule must be, in arrays, so that many schedules are judged at once. It is run on every
(heads, kv_heads, ranks) up to 128 heads and 64 ranks in `make families`, on a third of them here, and it is itself tested: it must
reject the order of the published reference and every small damage done to a right schedule.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain

import numpy as np
import pytest

from ithaca.engine.attention import head_schedule as module
from ithaca.engine.attention.head_schedule import Stage, head_schedule

LONG = os.environ.get("ITHACA_FAMILIES") == "long"
HEADS, RANKS = 128, 64
PAIRS = [(group * kv, kv) for group in range(1, HEADS + 1) for kv in range(1, HEADS // group + 1)]
BREAK_THE_REFERENCE = [(32, 8, 2), (64, 16, 8), (32, 32, 8), (32, 8, 16), (16, 8, 4)]


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    """Neighbouring shapes share most ranks: remember the helpers' answers. And spare the collector 20M tuples."""
    for name in ("_stage_count", "_plan", "_column"):
        monkeypatch.setattr(module, name, lru_cache(maxsize=1 << 15)(getattr(module, name)))
    gc.disable()
    yield
    gc.enable()


def broken_rules(
    schedules: list[tuple[Stage, ...]], heads: int, kv_heads: int, ranks: list[int], n: int | None
) -> list[str]:
    """Names of the rules that some schedule breaks; schedule i is for ranks[i] ranks. Empty: all are right."""
    group = heads // kv_heads
    for stages, size in zip(schedules, ranks, strict=True):
        if any(len(field) != size for stage in stages for field in vars(stage).values()):
            return ["one entry per rank"]

    # A cell is one (schedule, stage, rank); cells are numbered in that order. A row is one head in a cell.
    cells_of = np.array([len(stages) * size for stages, size in zip(schedules, ranks, strict=True)])
    size_of = np.repeat(ranks, cells_of)
    schedule_of = np.repeat(np.arange(len(schedules)), cells_of)
    within = np.arange(len(schedule_of)) - np.repeat(np.cumsum(cells_of) - cells_of, cells_of)
    stage_of = within // size_of
    rank_of = schedule_of * max(ranks) + within % size_of  # numbered over all schedules
    stages_in_all = int(stage_of.max()) + 1

    def rows(field: str) -> tuple[np.ndarray, np.ndarray]:
        lists = [entry for stages in schedules for stage in stages for entry in getattr(stage, field)]
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.repeat(np.arange(len(lists)), counts), np.fromiter(chain.from_iterable(lists), np.int64, counts.sum())

    q_cell, q_head = rows("queries")
    kv_cell, kv_head = rows("kv")
    q_count = np.bincount(q_cell, minlength=len(stage_of))
    kv_count = np.bincount(kv_cell, minlength=len(stage_of))
    # Every KV head that the query heads of a cell need, and how many of them need it.
    needed, uses = np.unique(q_cell * kv_heads + q_head // group, return_counts=True)
    needed_cell = needed // kv_heads
    # (rank, KV head, stage) as one number: sorted, the stages of a KV head on a rank stand side by side.
    held = np.sort((rank_of[kv_cell] * kv_heads + kv_head) * stages_in_all + stage_of[kv_cell])
    first = np.diff(held // stages_in_all, prepend=-1) != 0
    last = np.diff(held // stages_in_all, append=-1) != 0

    def moments(field: str) -> np.ndarray:
        cell, head = rows(field)
        return np.sort((rank_of[cell] * kv_heads + head) * stages_in_all + stage_of[cell])

    order = np.lexsort((q_head, rank_of[q_cell]))
    in_order = q_head[order]
    every_head_once = len(in_order) == len(schedules) * heads and bool(
        (in_order.reshape(-1, heads) == np.arange(heads)).all()
    )
    load = np.bincount(rank_of[q_cell], minlength=len(schedules) * max(ranks)).reshape(len(schedules), -1)
    busy = np.unique(rank_of[q_cell] * stages_in_all + stage_of[q_cell])
    nth = np.arange(len(busy)) - np.searchsorted(busy // stages_in_all, busy // stages_in_all)
    rules = {
        "every query head once, in rank order": every_head_once,
        "query heads ascend": bool((np.diff(q_cell * heads + q_head) > 0).all()),
        "largest load is ceil(heads / ranks)": bool((load.max(1) == -(-heads // np.array(ranks))).all()),
        "query head h uses KV head h // group": np.array_equal(needed, kv_cell * kv_heads + kv_head),
        "KV arrives once, at its first use": np.array_equal(moments("fresh"), held[first]),
        "KV leaves once, after its last use": np.array_equal(moments("done"), held[last]),
        "stages of a KV head are consecutive": bool((np.diff(held)[~first[1:]] == 1).all()),
        "idle stages come last": bool((busy % stages_in_all == nth).all()),
    }
    if n is None:
        rules["one stage"] = stages_in_all == 1
    else:
        alone = first & last  # KV heads that a rank uses in one stage only
        shared = np.sort((rank_of[kv_cell] * kv_heads + kv_head)[kv_count[kv_cell] > 1])
        rules |= {
            "at most n query heads": bool((q_count <= n).all()),
            "equal group sizes": bool((uses * kv_count[needed_cell] == q_count[needed_cell]).all()),
            "groups that share a stage are complete": bool(np.isin(shared, held[alone] // stages_in_all).all()),
        }
    return [name for name, holds in rules.items() if not holds]


def check(cases: dict[tuple[int, int], list[int]], n: int | None) -> int:
    for (heads, kv), ranks in cases.items():
        schedules = [head_schedule(heads, kv, size, n) for size in ranks]
        broken = broken_rules(schedules, heads, kv, ranks, n)
        assert not broken, (heads, kv, n, broken)
    return sum(map(len, cases.values()))


@pytest.mark.parametrize(
    ("n", "first", "covered"), [(None, 0, 20_672), (1, 1, 20_608)] if LONG else [(None, 0, 6_912), (1, 1, 6_912)]
)
def test_every_shape(n, first, covered):
    """Every pair with one of both, which takes half the time."""
    assert check({pair: list(range(1, RANKS + 1)) for pair in PAIRS[first :: 2 if LONG else 6]}, n) == covered


def test_many_heads_per_stage():
    covered = 0
    for index, (heads, kv) in enumerate(PAIRS[:: 6 if LONG else 18]):
        group = heads // kv
        ranks = list(range(1 + index % 5, RANKS + 1, 5))
        covered += sum(check({(heads, kv): ranks}, n) for n in {2, 3, 4, 5, 8, group, group + 1, 2 * group, heads})
    assert covered == (10_489 if LONG else 3_510)


def test_shapes_of_real_models():
    pairs = [
        (12, 2),
        (14, 2),
        (16, 2),
        (28, 4),
        (16, 8),
        (24, 8),
        (32, 8),
        (40, 8),
        (64, 8),
        (32, 32),
        (71, 1),
        (96, 8),
    ]
    covered = sum(check({pair: list(range(1, 17)) for pair in pairs}, n) for n in range(1, 13))
    assert covered == 12 * 16 * 12


@cache
def fewest_deliveries(heads: int, group: int, ranks: int) -> int:
    """By trying every contiguous cut (dynamic programming over ranks)."""
    largest = -(-heads // ranks)
    best = {0: 0}  # heads placed -> pieces
    for _ in range(ranks):
        more: dict[int, int] = {}
        for placed, pieces in best.items():
            for end in range(placed, min(placed + largest, heads) + 1):
                touched = -(-end // group) - placed // group if end > placed else 0
                more[end] = min(more.get(end, heads), pieces + touched)
        best = more
    return best[heads]


def test_deliveries_are_fewest():
    covered = 0
    for heads, kv in PAIRS:
        for ranks in range(1, 24):
            if heads <= 24:
                (stage,) = head_schedule(heads, kv, ranks, None)
                assert sum(map(len, stage.fresh)) == fewest_deliveries(heads, heads // kv, ranks), (heads, kv, ranks)
                covered += 1
    assert covered == 1_932


def test_one_kv_head_per_rank():
    (stage,) = head_schedule(32, 8, 8, None)
    assert stage.queries == tuple(tuple(range(4 * rank, 4 * rank + 4)) for rank in range(8))
    assert stage.kv == stage.fresh == stage.done == tuple((rank,) for rank in range(8))

    stages = head_schedule(32, 8, 8, 1)
    assert [stage.queries for stage in stages] == [tuple((4 * r + t,) for r in range(8)) for t in range(4)]
    assert [bool(stage.fresh[0]) for stage in stages] == [True, False, False, False]
    assert [bool(stage.done[0]) for stage in stages] == [False, False, False, True]


@pytest.mark.parametrize("heads,kv,ranks", [(28, 4, 8), (14, 2, 4)])
def test_two_ranks_per_kv_head(heads, kv, ranks):
    (stage,) = head_schedule(heads, kv, ranks, None)
    assert [len(heads) for heads in stage.queries] == [4, 3] * kv
    assert stage.kv == tuple((rank // 2,) for rank in range(ranks))
    # Three heads fit one stage, but the four of the neighbour need two: both ranks work in both.
    stages = head_schedule(heads, kv, ranks, 3)
    assert [[len(heads) for heads in stage.queries] for stage in stages] == [[2, 2] * kv, [2, 1] * kv]


def test_more_ranks_than_heads():
    (stage,) = head_schedule(8, 8, 16, 1)
    assert stage.queries == tuple((head,) for head in range(8)) + ((),) * 8
    assert stage.kv[8:] == stage.fresh[8:] == stage.done[8:] == ((),) * 8


def test_one_rank():
    stages = head_schedule(12, 3, 1, 8)
    assert [stage.queries[0] for stage in stages] == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11)]
    assert [stage.kv[0] for stage in stages] == [(0, 1), (2,)]


def test_unequal_groups_share_a_stage_only_without_a_limit():
    (stage,) = head_schedule(28, 4, 3, None)
    assert stage.queries[0] == tuple(range(10)) and stage.kv[0] == (0, 1)
    assert [stage.queries[0] for stage in head_schedule(28, 4, 3, 10)] == [tuple(range(7)), (7, 8, 9)]


def reference(heads: int, kv: int, ranks: int) -> tuple[Stage, ...]:
    """What the published code computes: wq cut contiguously, so stage t, rank r gets query head t·ranks + r."""
    repeats = max(1, ranks // kv)  # it repeats KV heads when there are fewer than ranks
    group = heads // (kv * repeats)
    stages = []
    for t in range(heads // ranks):
        queries = tuple((t * ranks + rank,) for rank in range(ranks))
        held = tuple(((t // group * ranks + rank) // repeats,) for rank in range(ranks))
        none = ((),) * ranks
        first, last = t % group == 0, t % group == group - 1
        stages.append(Stage(queries, held, held if first else none, held if last else none))
    return tuple(stages)


@pytest.mark.parametrize("heads,kv,ranks", BREAK_THE_REFERENCE)
def test_published_order_is_rejected(heads, kv, ranks):
    wrong = broken_rules([reference(heads, kv, ranks)], heads, kv, [ranks], 1)
    assert "every query head once, in rank order" in wrong
    # Without grouped queries (32, 32, 8) the pairing is right and only the order differs.
    assert ("query head h uses KV head h // group" in wrong) == (heads != kv)
    for n in (None, 1, 2, heads // kv):
        assert not broken_rules([head_schedule(heads, kv, ranks, n)], heads, kv, [ranks], n)


def edit(stages: tuple[Stage, ...], at: int, rank: int, **changes) -> tuple[Stage, ...]:
    """Stage `at` with new entries for one rank."""
    fields = {
        name: (*getattr(stages[at], name)[:rank], entry, *getattr(stages[at], name)[rank + 1 :])
        for name, entry in changes.items()
    }
    return (*stages[:at], replace(stages[at], **fields), *stages[at + 1 :])


@pytest.mark.parametrize(
    "rule,damage",
    [
        ("every query head once, in rank order", lambda s: edit(s, 0, 0, queries=(0,))),  # head 1 is lost
        ("every query head once, in rank order", lambda s: edit(s, 1, 0, queries=(1, 2))),  # head 1 is done twice
        ("query heads ascend", lambda s: edit(s, 0, 0, queries=(1, 0))),
        ("largest load is ceil(heads / ranks)", lambda s: edit(s, 2, 0, queries=(4, 5, 8))),
        ("query head h uses KV head h // group", lambda s: edit(s, 0, 0, kv=(1,), fresh=(1,))),
        ("query head h uses KV head h // group", lambda s: edit(s, 0, 0, kv=(0, 1))),  # one KV head too many
        ("KV arrives once, at its first use", lambda s: edit(s, 1, 0, fresh=(0,))),  # sent twice
        ("KV arrives once, at its first use", lambda s: edit(s, 0, 0, fresh=())),  # never sent
        ("KV leaves once, after its last use", lambda s: edit(s, 0, 1, done=(2,))),  # too early
        ("KV leaves once, after its last use", lambda s: edit(s, 3, 1, done=())),  # gradient lost
        ("stages of a KV head are consecutive", lambda s: (s[0], s[2], s[1], s[3])),
        ("idle stages come last", lambda s: (s[0], replace(s[0], **{f: ((), ()) for f in vars(s[0])}), *s[1:])),
        ("at most n query heads", lambda s: edit(s, 0, 0, queries=(0, 1, 2))),
        ("equal group sizes", lambda s: edit(s, 1, 0, queries=(2, 3, 4), kv=(0, 1))),
        ("groups that share a stage are complete", lambda s: edit(s, 1, 0, queries=(3, 4), kv=(0, 1))),
        ("one entry per rank", lambda s: (replace(s[0], queries=s[0].queries[:1]), *s[1:])),
    ],
)
def test_damage_is_noticed(rule, damage):
    stages = head_schedule(16, 4, 2, 2)
    assert [stage.queries for stage in stages] == [((2 * t, 2 * t + 1), (2 * t + 8, 2 * t + 9)) for t in range(4)]
    assert not broken_rules([stages], 16, 4, [2], 2)
    assert rule in broken_rules([damage(stages)], 16, 4, [2], 2)


@pytest.mark.parametrize(
    "arguments,words",
    [
        ((30, 8, 4, None), "heads=30 is not a multiple of kv_heads=8"),
        ((0, 1, 1, None), "heads is 0"),
        ((8, -2, 1, None), "kv_heads is -2"),
        ((8, 2, 0, None), "ranks is 0"),
        ((8, 2, 4, 0), "heads_per_stage is 0; give at least 1"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        head_schedule(*arguments)
