"""The order of samples: permutations, shares, and that it is a function of seed and index alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ithaca.data.mixing import below, mix, mix_array
from ithaca.data.order import Order, shuffled


def test_mixing_gives_the_same_numbers_for_ever():
    """A run that resumes with another numpy must see the same samples: these values may never change."""
    assert mix(0) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0, as published
    assert [mix(1, 2), mix(2, 1), mix(1, 2, 3)] == [0xBCD9DBB49673066B, 0xE06DD043328BD285, 0x6AE515C1C0AC7E37]
    order = Order([7, 11], [0.6, 0.4], seed=5)
    assert [order.row(i) for i in range(6)] == [(0, 4), (1, 10), (0, 1), (1, 5), (0, 2), (0, 5)]
    values = np.arange(100)
    assert mix_array(mix(7), values).tolist() == [mix(7, int(value)) for value in values]
    assert set(below(3, np.arange(1000), 5).tolist()) == set(range(5))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000])
def test_every_row_once_an_epoch(count: int):
    assert sorted(shuffled(i, count, key=9) for i in range(count)) == list(range(count))


def test_small_permutations_are_all_there_and_equally_often():
    seen = Counter(tuple(shuffled(i, 4, mix(key)) for i in range(4)) for key in range(4800))
    assert len(seen) == 24 and min(seen.values()) > 120 and max(seen.values()) < 300  # 200 each, ± 7 deviations


def test_large_permutations_need_no_memory():
    count = 10**15
    found = {shuffled(i, count, 3) for i in range(0, count, count // 50)}
    assert len(found) >= 50 and all(0 <= row < count for row in found)


def test_epochs_have_different_orders_and_all_rows():
    order = Order([50], seed=1)
    first, second = ([order.row(i)[1] for i in range(50 * e, 50 * e + 50)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert [Order([50], seed=2).row(i)[1] for i in range(50)] != first
    assert order.epochs(75) == [1.5]


@pytest.mark.parametrize(
    "weights",
    [
        (1.0,),
        (1, 1),
        (0.7, 0.3),
        (0.7, 0.2, 0.1),
        (5, 3, 1, 1),
        (1, 2, 3, 4, 5, 6, 7),
        (0.5, 0.25, 0.125, 0.125),
        (1, 100),
    ],
)
def test_shares_are_exact_to_within_one_sample_at_every_point(weights: tuple[float, ...]):
    order = Order([10] * len(weights), weights)
    shares = np.array(weights) / sum(weights)
    counts = np.zeros(len(weights))
    for index in range(1000):
        assert order.drawn(index) == counts.tolist()
        counts[order.row(index)[0]] += 1
        # Tijdeman's bound, below one
        assert np.abs(counts - shares * (index + 1)).max() <= 1 - 1 / max(2 * len(weights) - 2, 1) + 1e-9


def test_weights_that_are_no_simple_ratio_are_near_enough():
    weights = [0.123456789, 0.987654321, 1e-9]
    order = Order([10, 10, 10], weights)
    drawn = np.array(order.drawn(10**9)) / 1e9
    assert np.abs(drawn - np.array(weights) / sum(weights)).max() < 2 / 65536
    assert drawn[2] > 0  # rounded up, never away


def test_a_source_goes_through_its_own_epochs():
    order = Order([3, 5], [1, 1], seed=4)
    seen = {0: [], 1: []}
    for index in range(30):
        source, row = order.row(index)
        seen[source].append(row)
    assert all(sorted(seen[0][i : i + 3]) == [0, 1, 2] for i in range(0, 15, 3))
    assert all(sorted(seen[1][i : i + 5]) == [0, 1, 2, 3, 4] for i in range(0, 15, 5))


def test_a_sample_depends_on_nothing_but_seed_and_index():
    """Any world size, any batch size, from any point on: the same samples in the same places."""
    order = Order([7, 11], [0.6, 0.4], seed=5)
    whole = [order.row(i) for i in range(96)]
    for start, batch in ((0, 8), (24, 4), (40, 2), (94, 1)):
        fresh = Order([7, 11], [0.6, 0.4], seed=5)
        assert [fresh.row(i) for i in range(start, start + batch)] == whole[start : start + batch]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there is no source"),
        (([5, 5], [1.0, -0.5]), r"source 1 has the weight -0.5; use a number above 0"),
        (([5, 5], [1.0, 0.0]), "source 1 has the weight 0.0"),
        (([5], [float("nan")]), "source 0 has the weight nan"),
        (([5, 5], [1.0]), "1 weights for 2 sources"),
        (([5, 0],), "source 1 has 0 rows"),
        (([5], None, -1), "the seed is -1"),
    ],
)
def test_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Order(*arguments)
