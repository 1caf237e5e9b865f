"""Best-fit packing: which documents share a row.

A row has `context` tokens. Documents do not see each other, so what matters is only that rows are full: an empty place
costs as much time as a token. Finding the best arrangement is bin packing; best-fit-decreasing (longest document first,
each into the fullest row that still has room) is near it, and the usual choice since Ding et al., "Fewer Truncations
Improve Language Modeling" (2024).

Pure best-fit-decreasing has a flaw where documents are much shorter than the context, the common case here: it fills
the first rows with long documents and the last ones with tiny ones, so rows, and steps, differ in kind. Therefore:

- documents are taken in windows of a seeded shuffle, each a fair sample of all of them;
- in a window, documents longer than an eighth of the context go first, longest first: they decide how much is lost;
- the others follow in shuffled order, each into the fullest row with room: they fill the gaps, and no row is special.

Rows with room left are handed to the next window, the emptiest few of them; the others are as good as full. Time is n
log(window), a few microseconds a document; memory a few numbers a document. Everything follows from the lengths and the
seed alone, so every machine finds the same rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from .mixing import mix, mix_array

_WINDOW = 1 << 16  # documents
_CARRY = 256  # open rows that a window leaves to the next
_LARGE = 8  # a document above context / 8 is large


def best_fit(lengths: np.ndarray, context: int, seed: int = 0) -> np.ndarray:
    """The row of each document, rows numbered from 0 without gaps. Every length must be 1 to context."""
    rows = np.empty(len(lengths), np.int64)
    if len(lengths) == 0:
        return rows
    assert lengths.min() >= 1 and lengths.max() <= context
    order = np.argsort(mix_array(mix(seed, 1), np.arange(len(lengths))), kind="stable")
    smallest = int(lengths.min())
    # open rows in the order of the room they have left, as room << shift | row: bisect finds the best fit at once
    shift = max(1, len(lengths).bit_length())
    mask = (1 << shift) - 1
    spaces: list[int] = []
    count = 0
    for start in range(0, len(order), _WINDOW):
        window = order[start : start + _WINDOW]
        sizes = lengths[window]
        large = window[sizes > context // _LARGE]
        large = large[np.argsort(-lengths[large], kind="stable")]
        small = window[sizes <= context // _LARGE]
        sequence = np.concatenate([large, small])
        placed = []
        for length in lengths[sequence].tolist():
            at = bisect_left(spaces, length << shift)
            if at == len(spaces):
                row, room = count, context - length
                count += 1
            else:
                space = spaces.pop(at)
                row, room = space & mask, (space >> shift) - length
            placed.append(row)
            if room >= smallest:
                insort(spaces, room << shift | row)
        rows[sequence] = placed
        spaces = spaces[-_CARRY:]
    return rows
