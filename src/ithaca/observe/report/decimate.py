"""A curve of a million steps as at most two thousand points, with every peak and valley still there.

Averaging would hide exactly what a reader looks for: the step whose loss jumped, the moment memory peaked. So the points are cut
into stretches of equal length, and of each stretch the smallest and the largest point stay, at their own place. First and
last point stay too.
"""

from __future__ import annotations

from collections.abc import Sequence

LIMIT = 2000


def pick(values: Sequence[float], limit: int = LIMIT) -> list[int]:
    """Places to keep, in order: at most `limit`, with the first, the last, and the extremes of every stretch."""
    assert limit >= 4, limit
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = (limit - 2) // 2
    kept = {0, count - 1}
    for index in range(stretches):
        stretch = range(index * count // stretches, (index + 1) * count // stretches)
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)


def pick_stacked(layers: Sequence[Sequence[float]], limit: int = LIMIT) -> list[int]:
    """Places to keep of curves that are stacked and so share them: the extremes of every stretch of their sum, and the
    smallest and largest point of each curve by itself."""
    count = len(layers[0]) if layers else 0
    if count <= limit:
        return list(range(count))
    kept = set(pick([sum(column) for column in zip(*layers, strict=True)], limit - 2 * len(layers)))
    for layer in layers:
        kept.add(min(range(count), key=layer.__getitem__))
        kept.add(max(range(count), key=layer.__getitem__))
    return sorted(kept)


def running_mean(values: Sequence[float], points: int = 240) -> tuple[list[int], list[float], int]:
    """A calm line through a noisy one: places, means, and the steps in a mean. Empty where the curve is short enough to read."""
    count = len(values)
    window = count // 40 | 1  # odd: as many on both sides
    if window < 5:
        return [], [], 0
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    places = sorted({round(index * (count - 1) / (points - 1)) for index in range(points)})
    means = []
    for place in places:
        reach = min(window // 2, place, count - 1 - place)  # shorter at the ends, but still even
        means.append((sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    return places, means, window
