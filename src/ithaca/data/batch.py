"""From rows to an `ithaca.Batch`, without any rank holding a row.

`shard_batch` cuts a global [B, S] tensor that every rank has in memory. Here there is no such tensor: a rank reads the
tokens it holds (one contiguous range per chunk of the layout) and takes the rest, document lengths and counts, from the
row plan. The result is the same batch, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..engine.batch import Batch, Units
from ..engine.mesh import Mesh
from ..engine.objective.cross_entropy import IGNORE
from ..engine.sequence import Layout
from ..engine.trees import leaves_below
from ..stack import Stack
from .rows import RowSource, UnitSource, places_of, positions_of

Scores = Callable[[int, int], np.ndarray]  # of a range of a packed folder's tokens


def batch_of_units(
    rows: UnitSource, indices: Sequence[int], mesh: Mesh, stack: Stack, vocabulary: int, reference: Scores | None = None
) -> Batch:
    """The same with what objectives ask of units. reference: log-probabilities that a reference gave the tokens."""
    batch = batch_from_rows(rows, indices, mesh, stack, vocabulary)
    found = [rows.units(index) for index in indices]
    starts = np.cumsum([0, *batch.documents_of_rows])
    sizes = [count for units in found for count in units.counts]
    documents = [start + units.documents for start, units in zip(starts, found, strict=False)]
    columns = [np.concatenate(each) for each in zip(*((u.parts, u.lengths, u.values) for u in found), strict=True)]
    batch.units = Units(
        torch.from_numpy(np.concatenate(documents)), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        *map(torch.from_numpy, columns),
    )  # fmt: skip
    per_group = len(found) // mesh.data.size
    own = indices[mesh.data.rank * per_group : (mesh.data.rank + 1) * per_group]
    held = list(held_ranges(batch.layout, mesh.ring.rank, mesh.ulysses.rank))

    def numbers(read: Callable[[int, int, int], np.ndarray | None]) -> torch.Tensor | None:
        """Of this rank's labels; None where a row has none."""
        each = [
            _numbers(lambda start, stop, index=index: read(index, start, stop), held, rows.context) for index in own
        ]
        known = [values for values in each if values is not None]
        return torch.from_numpy(np.stack(known)).to(mesh.device) if len(known) == len(each) else None

    batch.old = numbers(rows.old)
    if reference is not None:
        batch.reference = numbers(lambda index, start, stop: rows.numbers(index, start, stop, reference))
    return batch


def _numbers(
    read: Callable[[int, int], np.ndarray | None], held: Sequence[tuple[int, int]], length: int
) -> np.ndarray | None:
    """Of the labels of the tokens that a rank holds; 0 behind the end of the row."""
    parts = []
    for start, stop in held:
        end = max(start, min(stop, length))
        found = read(start, end) if end > start else np.zeros(0, np.float32)
        if found is None:
            return None
        parts += [found, np.zeros(stop - end, np.float32)]
    return np.concatenate(parts)


def batch_from_rows(rows: RowSource, indices: Sequence[int], mesh: Mesh, stack: Stack, vocabulary: int) -> Batch:
    """This rank's slice of the batch of the rows `indices`, the same list on every rank.

    With a `Stream` the indices are global sample indices. Where every row is one single document the batch has no document
    bounds, which attention can use: one call for all rows.
    """
    indices = list(indices)
    if not indices or len(indices) % mesh.data.size:
        raise ValueError(
            f"a batch of {len(indices)} rows cannot be split over {mesh.data.size} data-parallel groups; use a multiple "
            f"of {mesh.data.size}, or raise ulysses or ring so that fewer groups are left"
        )
    length = rows.context
    documents = [rows.documents(index) for index in indices]
    parents = [rows.parents(index) for index in indices]
    trees = any(parents)
    supervised = sum(rows.supervised(index) for index in indices)
    if supervised == 0:
        raise ValueError(
            f"no token of rows {indices} of {rows.name} is supervised: the loss would be 0/0; leave such rows out"
        )
    layout = Layout(length, stack.ulysses, stack.ring)
    per_group = len(indices) // mesh.data.size
    own = slice(mesh.data.rank * per_group, (mesh.data.rank + 1) * per_group)
    whole = all(len(lengths) == 1 for lengths in documents)
    ids, labels, places = [], [], []
    for index in indices[own]:
        tokens, targets, place = _read(rows, index, layout, mesh, restart=not whole)
        _check(tokens, rows, index, vocabulary)
        ids.append(tokens)
        labels.append(targets)
        places.append(place)
    held = list(held_ranges(layout, mesh.ring.rank, mesh.ulysses.rank))
    valid = None
    if any(stop > length for _, stop in held):
        real = torch.cat([torch.arange(start, stop) < length for start, stop in held])
        valid = real.to(mesh.device).expand(per_group, -1)

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(parts)).to(mesh.device)

    return Batch(
        input_ids=tensor(ids),
        labels=tensor(labels),
        positions=tensor(places[:1] if whole else places),
        valid=valid,
        layout=layout,
        documents=None if whole else documents[own],
        longest=max(
            place + length
            for lengths, above in zip(documents, parents, strict=True)
            for place, length in zip(places_of(lengths, above), lengths, strict=True)
        ),
        supervised=supervised,
        tokens=len(indices) * length,
        documents_of_rows=[len(lengths) for lengths in documents],
        weights=tensor(_weights(documents[own], parents[own], labels, held)) if trees else None,
        parents=parents[own] if trees else None,
    )


def _weights(
    documents: list[list[int]],
    parents: list[list[int | None]],
    labels: list[np.ndarray],
    held: Sequence[tuple[int, int]],
) -> list[np.ndarray]:
    """Of the labels that a rank holds: how many leaves each is on the way to, 0 where there is none."""
    weights = []
    for lengths, above, targets in zip(documents, parents, labels, strict=True):
        leaves = leaves_below([*above, *[None] * (len(lengths) - len(above))])
        numbers = np.concatenate([np.searchsorted(np.cumsum(lengths), np.arange(*each), side="right") for each in held])
        counted = np.array([*leaves, 0], np.float32)[numbers]  # behind the end of the row is nothing
        weights.append(np.where(targets == IGNORE, np.float32(0), counted))
    return weights


def held_ranges(layout: Layout, ring_rank: int, ulysses_rank: int) -> Iterator[tuple[int, int]]:
    """The token ranges of one rank, in order: `Layout.tokens` without making a list of every token."""
    first, last = ulysses_rank * layout.local, (ulysses_rank + 1) * layout.local
    at = 0  # tokens of the ring rank before this chunk
    for start, stop in layout.chunks(ring_rank):
        begin, end = max(first - at, 0), min(last - at, stop - start)
        if begin < end:
            yield start + begin, start + end
        at += stop - start


def _read(
    rows: RowSource, index: int, layout: Layout, mesh: Mesh, restart: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, labels and positions of the tokens this rank holds; behind the end of the row there is layout padding."""
    parts = []
    for start, stop in held_ranges(layout, mesh.ring.rank, mesh.ulysses.rank):
        end = max(start, min(stop, layout.length))
        if end > start:
            parts.append(tuple(rows.read(index, start, end)))
        if stop > end:
            pad = positions_of([layout.length, layout.padded], end, stop) if restart else np.arange(end, stop)
            parts.append((np.zeros(stop - end, np.int64), np.full(stop - end, IGNORE, np.int64), pad))
    ids, labels, places = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, labels, places


def _check(ids: np.ndarray, rows: RowSource, index: int, vocabulary: int) -> None:
    """A token that the model does not know would be an illegal memory access on a GPU, far from its cause."""
    largest = int(ids.max())
    if largest >= vocabulary:
        raise ValueError(
            f"row {index} of {rows.name} has token {largest:,}, outside the model's vocabulary of {vocabulary:,} tokens (0 to "
            f"{vocabulary - 1:,}); pack the data with the tokenizer of this model"
        )
