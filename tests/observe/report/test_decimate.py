"""Long curves become short ones, and no peak is lost."""

from __future__ import annotations

import math
import random

import pytest

from ithaca.observe.report.decimate import pick, pick_stacked, running_mean


@pytest.mark.parametrize("count", [0, 1, 2, 1999, 2000])
def test_short_curves_stay_whole(count: int):
    assert pick([1.0] * count) == list(range(count))


@pytest.mark.parametrize("count", [2001, 2500, 9999, 100_000])
@pytest.mark.parametrize("limit", [4, 10, 2000])
def test_long_curves_keep_their_extremes(count: int, limit: int):
    noise = random.Random(count)
    ys = [noise.gauss(0, 1) for _ in range(count)]
    kept = pick(ys, limit)
    assert len(kept) <= limit and kept == sorted(set(kept))
    assert kept[0] == 0 and kept[-1] == count - 1
    assert ys.index(max(ys)) in kept and ys.index(min(ys)) in kept


def test_every_stretch_keeps_its_own_extremes():
    ys = [math.sin(index / 50) for index in range(10_000)]  # 31 waves
    kept = pick(ys, 400)
    tops = [index for index in range(1, 9_999) if ys[index - 1] < ys[index] > ys[index + 1]]
    assert len(tops) == 32 and set(tops) <= set(kept)


def test_one_spike_in_a_million_stays():
    ys = [1.0] * 1_000_000
    ys[777_777] = 40.0
    kept = pick(ys)
    assert 777_777 in kept and len(kept) <= 2000


def test_stacked_curves_share_their_places():
    noise = random.Random(0)
    layers = [[noise.random() for _ in range(30_000)] for _ in range(14)]
    kept = pick_stacked(layers)
    totals = [sum(column) for column in zip(*layers, strict=True)]
    assert len(kept) <= 2000 and kept[0] == 0 and kept[-1] == 29_999
    for each in [totals, *layers]:
        assert each.index(max(each)) in kept and each.index(min(each)) in kept
    assert pick_stacked([]) == [] and pick_stacked([[1.0, 2.0]]) == [0, 1]


def test_the_calm_line_is_a_mean():
    assert running_mean([1.0] * 100) == ([], [], 0)
    ys = [float(index % 2) for index in range(4000)]
    places, means, window = running_mean(ys)
    assert window == 101 and places[0] == 0 and places[-1] == 3999 and len(places) == len(means) == 240
    assert means[0] == ys[0] and all(abs(mean - 0.5) < 0.01 for mean in means[10:-10])
    straight = running_mean([float(index) for index in range(1000)])
    assert straight[1] == pytest.approx([float(place) for place in straight[0]])
