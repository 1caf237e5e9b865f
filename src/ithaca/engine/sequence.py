"""Which tokens a rank holds, and which tokens may see each other.

A sequence of S tokens is padded to a length every rank can share. With a ring of R it is cut into 2R chunks, and ring
rank r holds chunks r and 2R-1-r (zigzag): one early, one late, so that the causal triangle weighs the same on every rank.
Inside a ring rank the tokens lie contiguous over the P Ulysses ranks, and the first all-to-all brings them together again
in that order. R = 1 is plain Ulysses: rank u holds tokens [u·s, (u+1)·s).

Documents are given as lengths per row. Tokens attend inside their own document only and positions restart with it; padding
behind the last token is a document of its own. A document may go on where an earlier one ends, its parent: trees.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """How one sequence lies on ring × ulysses ranks."""

    length: int  # tokens the user gave
    ulysses: int
    ring: int

    @property
    def padded(self) -> int:
        step = self.ulysses if self.ring == 1 else lcm(2 * self.ring, self.ring * self.ulysses)
        return -(-self.length // step) * step

    @property
    def local(self) -> int:
        """Tokens on one rank."""
        return self.padded // (self.ulysses * self.ring)

    def chunks(self, ring_rank: int) -> list[tuple[int, int]]:
        """The token ranges of one ring rank, in the order in which they lie in its buffers."""
        if self.ring == 1:
            return [(0, self.padded)]
        size = self.padded // (2 * self.ring)
        return [(i * size, (i + 1) * size) for i in (ring_rank, 2 * self.ring - 1 - ring_rank)]

    def pieces(self, ring_rank: int, ulysses_rank: int) -> list[tuple[int, int]]:
        """The token ranges of one rank, in the order in which they lie there."""
        first, last, found = ulysses_rank * self.local, (ulysses_rank + 1) * self.local, []
        for start, stop in self.chunks(ring_rank):
            a, b = max(start, start + first), min(stop, start + last)
            found += [(a, b)] if a < b else []
            first, last = first - (stop - start), last - (stop - start)
        return found

    def tokens(self, ring_rank: int, ulysses_rank: int) -> torch.Tensor:
        """Indices into the padded sequence of the tokens on one rank, in order."""
        return torch.cat([torch.arange(a, b) for a, b in self.pieces(ring_rank, ulysses_rank)])


def read_documents(documents: Sequence | torch.Tensor | None, rows: int, length: int) -> list[list[int]] | None:
    """Document lengths per row, checked: positive whole numbers that add up to the sequence length."""
    if documents is None:
        return None
    documents = [plain(row) for row in plain(documents)]
    if rows == 1 and documents and all(isinstance(n, int) for n in documents):
        documents = [documents]
    odd = [type(row).__name__ for row in documents if not isinstance(row, (list, tuple))]
    if len(documents) != rows or odd:
        entries = f"{len(documents)} entries" + (f" of type {odd[0]}" if odd else "")
        raise ValueError(
            f"documents has {entries} for a batch of {rows} rows; give one list of document lengths per row, for "
            "example documents=[[600, 424], [1024]] for two rows of 1,024 tokens"
        )
    checked = []
    for row, lengths in enumerate([[plain(n) for n in row] for row in documents]):
        wrong = [n for n in lengths if not isinstance(n, int) or isinstance(n, bool) or n < 1]
        if wrong:
            raise ValueError(
                f"documents[{row}] has the length {wrong[0]!r}; every length must be a whole number above 0"
            )
        if sum(lengths) != length:
            raise ValueError(
                f"documents[{row}] adds up to {sum(lengths):,} tokens but the sequence has {length:,}; give the lengths "
                "of all documents in the row, padding included as a document of its own"
            )
        checked.append(list(lengths))
    return checked


def plain(value: Any) -> Any:
    """Tensors and numpy's arrays and numbers as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def document_bounds(lengths: Sequence[int], padded: int) -> list[tuple[int, int]]:
    """(start, stop) of each document of a row; tokens behind the last one are a document of their own."""
    ends = list(accumulate(lengths))
    if padded > ends[-1]:
        ends.append(padded)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def places(bounds: Sequence[tuple[int, int]], parents: Sequence[int | None]) -> list[int]:
    """The position of each document's first token: 0, or where its parent ends. Those behind the last parent named have none."""
    out: list[int] = []
    for at in range(len(bounds)):
        parent = parents[at] if at < len(parents) else None
        out.append(0 if parent is None else out[parent] + bounds[parent][1] - bounds[parent][0])
    return out


def positions(
    documents: list[list[int]] | None, rows: int, padded: int, *, parents: list[list[int | None]] | None = None
) -> torch.Tensor:
    """Position of every token inside its document, [rows, padded]; in a tree, on the way from its root."""
    if documents is None:
        return torch.arange(padded).expand(rows, padded)
    out = torch.empty(rows, padded, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        bounds = document_bounds(lengths, padded)
        for (start, stop), place in zip(bounds, places(bounds, parents[row] if parents else ()), strict=True):
            out[row, start:stop] = torch.arange(place, place + stop - start)
    return out


def shift_labels(labels: torch.Tensor, documents: list[list[int]] | None, ignore: int) -> torch.Tensor:
    """The label of a token is the next token's: shifted here, before any sharding, so no rank needs its neighbour's.

    The last token of a document predicts nothing: its next token belongs to another document.
    """
    shifted = torch.full_like(labels, ignore)
    shifted[:, :-1] = labels[:, 1:]
    if documents is not None:
        for row, lengths in enumerate(documents):
            ends = torch.tensor(list(accumulate(lengths)), device=labels.device) - 1
            shifted[row, ends] = ignore
    return shifted
