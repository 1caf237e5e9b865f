"""Which row is trained on when: a pure function of (seed, global sample index).

Nothing is drawn, so nothing has to be remembered: the cursor of a run is one integer, the number of samples used so
far, and resuming at another world size or with another batch size continues with exactly the next sample.

Inside a source, epoch after epoch, rows come in a new order each time. `shuffled` is a small cipher (a Feistel network,
walked until it lands inside the range; Black and Rogaway, 2002), so a permutation of a billion rows needs no memory and
one entry of it a few microseconds.

Between sources, `weights` say how the samples are shared. Sample i comes from the source that a fixed table names, made
by Tijdeman's rule for the chairman assignment problem (1980): after every number of samples, each source has had its
share to within less than one sample. The table is as long as the weights are complicated: (0.7, 0.3) needs 10 entries.
Weights that would need more than 65,536 are rounded to that resolution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from math import ceil, gcd, isfinite, lcm

import numpy as np

from ..stack import require
from .mixing import mix

_LONGEST = 1 << 16  # entries of the table of sources
_ROUNDS = 8


def shuffled(index: int, count: int, key: int) -> int:
    """Where a permutation of range(count), one per key, sends `index`."""
    assert 0 <= index < count
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:  # the cipher permutes 4^half numbers, fewer than 4 · count; outside the range it is applied again
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix(key, turn, right) >> 32) & mask
        index = left << half | right
        if index < count:
            return index


class Order:
    """The order of samples over sources of `sizes` rows each, without end."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None, seed: int = 0):
        weights = [1.0] * len(sizes) if weights is None else list(weights)
        require(_violations(sizes, weights, seed), "these sources cannot be mixed")
        self.sizes = tuple(sizes)
        self.seed = seed
        self.counts = _whole_shares(weights)  # samples of each source in one turn of the table
        self._table = _chairman(self.counts)
        # _before[j, k]: samples of source k among the first j of a turn
        self._before = np.zeros((len(self._table) + 1, len(sizes)), np.int64)
        self._before[1:] = np.cumsum(self._table[:, None] == np.arange(len(sizes)), axis=0)

    def row(self, index: int) -> tuple[int, int]:
        """Source and row of sample `index`."""
        source = int(self._table[index % len(self._table)])
        epoch, at = divmod(self.drawn(index)[source], self.sizes[source])
        return source, shuffled(at, self.sizes[source], mix(self.seed, source, epoch))

    def drawn(self, index: int) -> list[int]:
        """How many of the samples before `index` came from each source."""
        turns, at = divmod(index, len(self._table))
        return [turns * count + int(before) for count, before in zip(self.counts, self._before[at], strict=True)]

    def epochs(self, index: int) -> list[float]:
        """How often each source has been gone through before sample `index`."""
        return [drawn / size for drawn, size in zip(self.drawn(index), self.sizes, strict=True)]

    def until(self, epochs: float) -> int:
        """The fewest samples after which every source has been gone through so often."""
        times = Fraction(Decimal(repr(epochs)))  # as written: 1.1 of ten rows are eleven
        wanted = [ceil(times * size) for size in self.sizes]

        def reached(index: int) -> bool:
            return all(drawn >= want for drawn, want in zip(self.drawn(index), wanted, strict=True))

        turns = max(-(-want // count) for want, count in zip(wanted, self.counts, strict=True))
        return bisect_left(range(turns * len(self._table)), True, key=reached)


def _violations(sizes: Sequence[int], weights: Sequence[float], seed: int) -> list[str]:
    violations = []
    if not sizes:
        violations.append("there is no source; give at least one")
    if len(sizes) != len(weights):
        violations.append(f"{len(weights)} weights for {len(sizes)} sources; give one weight per source")
    for number, size in enumerate(sizes):
        if size < 1:
            violations.append(f"source {number} has {size} rows; leave it out, or give it at least one")
    for number, weight in enumerate(weights):
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not isfinite(weight) or weight <= 0:
            violations.append(
                f"source {number} has the weight {weight!r}; use a number above 0, or leave the source out"
            )
    if not isinstance(seed, int) or seed < 0:
        violations.append(f"the seed is {seed!r}; use a whole number that is not negative")
    return violations


def _whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, or next to it where they would add up to more than the longest table."""
    exact = [Fraction(Decimal(repr(weight))) for weight in weights]  # as written: 0.1 is a tenth
    scale = lcm(*(fraction.denominator for fraction in exact))
    counts = [int(fraction * scale) for fraction in exact]
    counts = [count // gcd(*counts) for count in counts]
    total = sum(counts)
    if total > _LONGEST:
        shares = [Fraction(count * _LONGEST, total) for count in counts]
        counts = [max(1, int(share)) for share in shares]
        # largest remainders first; a source that was lifted to 1 has none
        by_rest = sorted(range(len(counts)), key=lambda k: (counts[k] - shares[k], k))
        for k in by_rest[: max(0, _LONGEST - sum(counts))]:
            counts[k] += 1
    return tuple(counts)


def _chairman(counts: Sequence[int]) -> np.ndarray:
    """A source for each of sum(counts) places so that every prefix has every source's share to within one.

    At place j a source may be taken once it is behind by 1/(2K-2) of a sample; of those, the one whose time runs out first.
    All in whole numbers: shares are counts / total.
    """
    total, kinds = sum(counts), len(counts)
    table = np.zeros(total, np.int32)
    if kinds == 1:
        return table
    taken = [0] * kinds
    width = 2 * kinds - 2
    for place in range(1, total + 1):
        best, soonest = -1, Fraction(0)
        for source, count in enumerate(counts):
            if (count * place - taken[source] * total) * width >= total:
                deadline = Fraction((taken[source] + 1) * width - 1, count)
                if best < 0 or deadline < soonest:
                    best, soonest = source, deadline
        assert best >= 0, "Tijdeman: at every place some source is behind"
        table[place - 1] = best
        taken[best] += 1
    return table
