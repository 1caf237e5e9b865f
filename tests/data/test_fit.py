"""Best-fit packing: rows are full, nothing is lost, nothing depends on anything but lengths and seed."""

from __future__ import annotations

from bisect import insort

import numpy as np
import pytest

from ithaca.data import fit
from ithaca.data.fit import best_fit


def realistic(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as in crawled text with books and code: log-normal around 900 tokens, one in a hundred of a heavy tail."""
    rng = np.random.default_rng(seed)
    tail = count // 100
    lengths = np.concatenate([rng.lognormal(np.log(900), 1.1, count - tail), (rng.pareto(1.1, tail) + 1) * 20_000])
    rng.shuffle(lengths)
    return lengths.astype(np.int64).clip(2)


def check(lengths: np.ndarray, context: int, rows: np.ndarray) -> float:
    """Every row within the context, no row number left out; -> share of places that are used."""
    held = np.bincount(rows, weights=lengths)
    assert held.max() <= context and held.min() > 0
    return float(lengths.sum() / (len(held) * context))


@pytest.mark.parametrize(("context", "count"), [(2048, 50_000), (8192, 50_000), (32_768, 50_000), (131_072, 100_000)])
def test_rows_are_98_percent_full_on_a_realistic_mix(context: int, count: int):
    lengths = realistic(count)
    rest = lengths % context  # longer documents are split into full rows and a rest
    rest = rest[rest > 1]
    assert check(rest, context, best_fit(rest, context)) > 0.995
    whole = int((lengths // context).sum()) * context
    assert (whole + rest.sum()) / (whole + (best_fit(rest, context).max() + 1) * context) > 0.98


def test_rows_are_full_at_a_million_tokens():
    lengths = realistic(200_000).clip(max=1 << 20)
    full = check(lengths, 1 << 20, best_fit(lengths, 1 << 20))
    assert full > 0.98


@pytest.mark.parametrize("low", [2, 1024])
def test_documents_that_are_large_against_the_context(low: int):
    lengths = np.random.default_rng(1).integers(low, 8192, 30_000)
    assert check(lengths, 8192, best_fit(lengths, 8192)) > 0.98


def test_rows_are_alike_where_documents_are_short():
    """Longest first would make rows of long documents and rows of short ones; here every row is a mixture."""
    lengths = np.random.default_rng(2).lognormal(np.log(300), 1.0, 60_000).astype(np.int64).clip(2, 8000)
    rows = best_fit(lengths, 131_072)
    documents = np.bincount(rows)[:-1]  # the last is not full
    assert documents.std() < 0.15 * documents.mean()  # chance alone gives 0.08; longest first 1.1


def test_the_seed_and_the_lengths_decide():
    lengths = realistic(3000).clip(max=4096)
    assert np.array_equal(best_fit(lengths, 4096, 3), best_fit(lengths, 4096, 3))
    assert not np.array_equal(best_fit(lengths, 4096, 3), best_fit(lengths, 4096, 4))


@pytest.mark.parametrize(
    ("lengths", "rows"), [([], 0), ([5], 1), ([8], 1), ([8, 8, 8], 3), ([4, 4, 4, 4], 2), ([7, 1, 6, 2, 5, 3], 3)]
)
def test_small_cases(lengths: list[int], rows: int):
    found = best_fit(np.array(lengths, np.int64), 8)
    assert len(found) == len(lengths) and len(set(found.tolist())) == rows


def test_time_grows_with_the_documents_not_their_square(monkeypatch: pytest.MonkeyPatch):
    """However many windows there are, a document looks for its place among the rows of its own and the few that are handed on."""
    sizes: list[int] = []
    monkeypatch.setattr(fit, "_WINDOW", 1000)
    monkeypatch.setattr(fit, "insort", lambda rows, row: (sizes.append(len(rows)), insort(rows, row)))
    lengths = np.random.default_rng(3).integers(4097, 8192, 20_000)  # no two fit together: every row stays open
    lengths[0] = 1
    assert best_fit(lengths, 8192).max() >= 19_998 and len(sizes) > 19_000
    assert max(sizes) < 1000 + fit._CARRY
