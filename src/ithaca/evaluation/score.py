"""Scoring rows: one forward, summed up so that every layout gives the same numbers.

A rank knows the loss of the tokens it holds and whether each was the likeliest. These are added up by row and by position, in
float64, over all ranks: whoever holds a token, it counts once. Rows are scored several at a time, as many as fit a forward of
the given number of tokens, and where they cannot be split evenly over data-parallel groups the last one is computed again
and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batch import batch_from_rows
from ..data.rows import RowSource
from ..engine.comm import total
from ..engine.objective.cross_entropy import IGNORE
from ..engine.run import Run


@dataclass(frozen=True)
class Scored:
    """Sums over the supervised tokens of each row [rows, 3] and of each range of positions [ranges, 3]:
    cross-entropy, tokens whose label was the likeliest, tokens."""

    rows: Tensor
    ranges: Tensor


def score_rows(
    run: Run,
    source: RowSource,
    rows: Sequence[int],
    *,
    tokens: int,
    edges: Sequence[int] = (0,),
    before: Callable[[], None] = lambda: None,
) -> Scored:
    """Collective; the same numbers on every rank.

    tokens: of one data-parallel group in one forward, at most (a single row always is one).
    edges: where ranges of positions begin, ascending from 0; the last has no end. before: called before each forward.
    """
    groups, vocabulary = run.mesh.data.size, run.decoder.config.vocab_size
    per_group = max(1, min(tokens // source.context, -(-len(rows) // groups)))
    by_row = torch.zeros(len(rows), 3, dtype=torch.float64, device=run.mesh.device)
    by_range = torch.zeros(len(edges), 3, dtype=torch.float64, device=run.mesh.device)
    limits = torch.tensor(list(edges)[1:], dtype=torch.int64, device=run.mesh.device)
    for start in range(0, len(rows), per_group * groups):
        before()
        numbers = [min(start + place, len(rows) - 1) for place in range(per_group * groups)]
        batch = batch_from_rows(source, [rows[number] for number in numbers], run.mesh, run.stack, vocabulary)
        losses, hits = run.score(batch)
        first = start + run.mesh.data.rank * per_group
        real = max(0, min(per_group, len(rows) - first))  # behind the last row come copies of it
        counted = (batch.labels[:real] != IGNORE).double()
        if batch.weights is not None:  # what branches share counts for each of them
            counted = batch.weights[:real].double()
        values = torch.stack((losses[:real] * counted, hits[:real] * counted, counted), -1)
        by_row[first : first + real] += values.sum(1)
        where = torch.bucketize(batch.positions.contiguous(), limits, right=True).expand_as(batch.labels)[:real]
        by_range.index_add_(0, where.flatten(), values.flatten(0, 1))
    return Scored(total(by_row, run.mesh.world).cpu(), total(by_range, run.mesh.world).cpu())


def position_edges(context: int, most: int = 12) -> list[int]:
    """Where ranges of positions begin: each is twice as long as the one before, and the last one ends with the context."""
    return [0, *(edge for power in range(most - 1, 0, -1) if (edge := context >> power) > 0)]
