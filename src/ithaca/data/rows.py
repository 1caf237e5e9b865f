"""Rows: packed documents as the rows a model is trained on, read a slice at a time.

Row i is a list of pieces of documents (plan.py), one behind the other, and padding where they do not fill the context.
A rank asks for the token range it holds and gets ids, labels and positions of just that range. What has to be known of
the whole row, the lengths of its documents and the count of its supervised tokens, comes from the plan without reading
a token.

Labels are shifted here: the label of a token is the next token of the same piece, or -100 where that one is not
supervised. So a range reads one token more than it has. Padding is a document of its own behind the others: token 0,
label -100, positions from 0.

A unit comes apart here: its parts are documents of the row, one behind the other, or, where they share what they begin with, the
leaves of a tree of documents (branches.py). What objectives ask of them, which belong together and how they were judged, is
`units`; numbers of tokens (`old`) are read by range, as tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from .branches import Node, tree_of
from .folder import Packed
from .order import Order
from .plan import RowPlan, open_plan
from .split import Split

IGNORE = -100  # activations.loss.IGNORE, which would bring torch


class Slice(NamedTuple):
    """A token range of a row, int64 each."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class RowUnits(NamedTuple):
    """The units of a row: how many parts each has, in order; and of each part which document of the row it is (the one it ends
    with, where it shares others), its number in the packed folder, its supervised tokens and its value (manifest.PART)."""

    counts: list[int]
    documents: np.ndarray
    parts: np.ndarray
    lengths: np.ndarray
    values: np.ndarray


class RowSource(Protocol):
    """Whatever rows come from: packed data (`Rows`), a synthetic task (`Recall`), a mixture of them (`Stream`)."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def largest_token(self) -> int: ...
    def __len__(self) -> int: ...
    def documents(self, row: int) -> list[int]:
        """Lengths of the documents of a row, padding included; they add up to the context."""
        ...

    def parents(self, row: int) -> list[int | None]:
        """Of the documents of a row, which earlier one each goes on from; empty where none does (engine/trees.py)."""
        ...

    def segments(self, row: int) -> list[tuple[int, int, int]]:
        """Document, start and stop of every piece: to name the data of a step."""
        ...

    def supervised(self, row: int) -> int:
        """Supervised tokens of the whole row."""
        ...

    def read(self, row: int, start: int, stop: int) -> Slice:
        """Tokens start … stop of a row."""
        ...


class UnitSource(RowSource, Protocol):
    """Rows of units."""

    def units(self, row: int) -> RowUnits: ...
    def old(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Log-probabilities of the labels of tokens start … stop by whoever sampled them; None = not known."""
        ...

    def numbers(
        self, row: int, start: int, stop: int, read: Callable[[int, int], np.ndarray | None]
    ) -> np.ndarray | None: ...


class OneDocument:
    """What sources share whose rows are made to order: each is a single document, as long as the context."""

    context: int
    rows: int

    def __len__(self) -> int:
        return self.rows

    def documents(self, row: int) -> list[int]:
        return [self.context]

    def parents(self, row: int) -> list[int | None]:
        return []

    def segments(self, row: int) -> list[tuple[int, int, int]]:
        return [(row, 0, self.context)]


class Rows:
    """The rows of a packed folder, or of one of its sources."""

    def __init__(self, packed: Packed, plan: RowPlan, name: str | None = None, source: int | None = None):
        self.packed, self.plan, self.source = packed, plan, source
        self.name = str(packed.folder) if name is None else name
        self.context = plan.context
        self.largest_token = packed.largest_token

    def __len__(self) -> int:
        return len(self.plan)

    def segments(self, row: int) -> list[tuple[int, int, int]]:
        return [(node.part, node.start, node.stop) for node in self._nodes(row)]

    def parents(self, row: int) -> list[int | None]:
        parents = [node.parent for node in self._nodes(row)] if self.plan.share else []
        return parents if any(parent is not None for parent in parents) else []

    def _nodes(self, row: int) -> list[Node]:
        """The documents of a row, as ranges of those of the folder."""
        first, stop = self.plan.bounds[row : row + 2]
        pieces = self.plan.pieces[first:stop].tolist()
        if not self.has_units:
            return [Node(*piece) for piece in pieces]
        nodes: list[Node] = []
        for document, _, _ in pieces:
            lengths = self.packed.parts(document)[1]["length"].tolist()
            shared = self.packed.shared(document) if self.plan.share else [0] * len(lengths)
            starts, before = np.cumsum([0, *lengths]).tolist(), len(nodes)
            for part, start, stop, parent, leaf in tree_of(lengths, shared):
                parent = None if parent is None else before + parent
                nodes.append(Node(document, starts[part] + start, starts[part] + stop, parent, leaf))
        return nodes

    @cached_property
    def has_units(self) -> bool:
        return self.packed.has_units(self.source)

    def units(self, row: int) -> RowUnits:
        """What belongs together in a row of units."""
        first, stop = self.plan.bounds[row : row + 2]
        found = [self.packed.parts(document) for document in self.plan.pieces[first:stop, 0].tolist()]
        parts = np.concatenate([part for _, part in found])
        numbers = np.concatenate([np.arange(at, at + len(part)) for at, part in found])
        leaves = np.flatnonzero([node.leaf for node in self._nodes(row)])
        return RowUnits([len(part) for _, part in found], leaves, numbers, parts["supervised"], parts["value"])

    def numbers(
        self, row: int, start: int, stop: int, read: Callable[[int, int], np.ndarray | None]
    ) -> np.ndarray | None:
        """Numbers of the labels of tokens start … stop, 0 where there is none. read: those of a range of the folder's tokens, or
        None where they are not known."""
        values = np.zeros(stop - start, np.float32)
        for begin, end, first in self._places(row, start, stop):
            found = read(first + 1, first + 1 + end - begin)
            if found is None:
                return None
            values[begin - start : end - start] = found
        return values

    def old(self, row: int, start: int, stop: int) -> np.ndarray | None:
        return self.numbers(row, start, stop, self.packed.old)

    def put(self, row: int, values: np.ndarray, write: Callable[[int, np.ndarray], None]) -> None:
        """Numbers of the labels of a whole row, to where these tokens are in the folder."""
        for begin, end, first in self._places(row, 0, self.context):
            write(first + 1, values[begin:end])

    def _places(self, row: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Of each piece in a range of the row, the tokens that have another one behind them: from, to, and where the first of
        them is in the folder."""
        at = 0
        for document, first, last, _, leaf in self._nodes(row):
            begin, end = max(start, at), min(stop, at + last - first - leaf)
            if begin < end:
                yield begin, end, int(self.packed.offsets[document]) + first + begin - at
            at += last - first

    def documents(self, row: int) -> list[int]:
        lengths = [stop - start for _, start, stop in self.segments(row)]
        padding = self.context - sum(lengths)
        return lengths + [padding] if padding else lengths

    def supervised(self, row: int) -> int:
        return int(self.plan.supervised[row])

    def read(self, row: int, start: int, stop: int) -> Slice:
        ids = np.zeros(stop - start, np.int64)
        labels = np.full(stop - start, IGNORE, np.int64)
        at = 0  # where the piece begins in the row
        for document, first, last, _, leaf in self._nodes(row):
            size = last - first
            begin, end = max(start, at), min(stop, at + size)
            if begin < end:
                # in the numbering of all tokens: `origin` is where the row's token 0 would be
                origin = int(self.packed.offsets[document]) + first - at
                more = min(end + 1, at + size + (not leaf))  # the last token's label, if the piece goes on
                tokens = self.packed.read(origin + begin, origin + more)
                ids[begin - start : end - start] = tokens[: end - begin]
                following = tokens[1:].astype(np.int64)
                seen = self.packed.mask(origin + begin + 1, origin + more)
                if seen is not None:
                    following[~seen] = IGNORE
                labels[begin - start : begin - start + len(following)] = following
            at += size
            if at >= stop:
                break
        return Slice(ids, labels, positions_of(self.documents(row), start, stop, self.parents(row)))

    def read_slice(self, row: int, tokens: np.ndarray) -> Slice:
        """Tokens of a row by index, as `Layout.tokens` gives them. Only the contiguous ranges among them are read."""
        parts = [self.read(row, start, stop) for start, stop in ranges(np.asarray(tokens))]
        return Slice(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def ranges(indices: np.ndarray) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a list of indices."""
    if len(indices):
        cuts = np.flatnonzero(np.diff(indices) != 1) + 1
        for run in np.split(indices, cuts):
            yield int(run[0]), int(run[-1]) + 1


def positions_of(documents: list[int], start: int, stop: int, parents: Sequence[int | None] = ()) -> np.ndarray:
    """Position of tokens start … stop of a row inside their documents; in a tree, on the way from its root."""
    ends = np.cumsum(documents)
    begins = ends - documents - places_of(documents, parents)
    where = np.arange(start, stop)
    return where - begins[np.searchsorted(ends, where, side="right")]


def places_of(documents: list[int], parents: Sequence[int | None]) -> list[int]:
    """The position of each document's first token: 0, or where its parent ends."""
    places: list[int] = []
    for _, parent in zip_longest(documents, parents):
        places.append(0 if parent is None else places[parent] + documents[parent])
    return places


def open_rows(
    packed: Packed,
    context: int,
    *,
    long_documents: str = "split",
    seed: int = 0,
    validation: Sequence[int | float] | None = None,
    held_out: bool = False,
    share: bool = False,
    keep: bool = True,
) -> list[Rows]:
    """The rows of every source of a packed folder, for a `Stream` to mix. share: parts of units share what they begin with.

    validation: of each source, how many documents, or which share of them, are held out (split.py); 0 = none. held_out: the rows of
    those documents, of the sources that have any, instead of the rows of all others."""
    rows = []
    for number, about in enumerate(packed.manifest["sources"]):
        aside = 0 if validation is None else validation[number]
        if aside or not held_out:
            split = Split(aside, seed, held_out) if aside else None
            more: dict[str, Any] = dict(source=number, split=split, share=share, keep=keep)
            plan = open_plan(packed, context, long_documents=long_documents, seed=seed, **more)
            rows.append(Rows(packed, plan, about["name"], number))
    return rows


class Stream:
    """Samples without end: several sources mixed by weight, addressed by the global sample index (order.py).

    It is a source of rows itself. Rows of different sources must have the same length.
    """

    def __init__(self, sources: list, weights: list[float] | None = None, seed: int = 0):
        if len({source.context for source in sources}) > 1:
            listed = ", ".join(f"{source.name}: {source.context:,}" for source in sources)
            raise ValueError(f"the sources have rows of different lengths ({listed}); make all with the same context")
        self.sources: list[RowSource] = list(sources)
        self.order = Order([len(source) for source in sources], weights, seed)

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def contents(self) -> dict[str, str]:
        """Name -> what changes with the content, of the sources that are files; a run goes on with these only."""
        return {source.name: source.packed.identity for source in self.sources if isinstance(source, Rows)}

    @property
    def context(self) -> int:
        return self.sources[0].context

    @property
    def largest_token(self) -> int:
        return max(source.largest_token for source in self.sources)

    def __len__(self) -> int:
        """One epoch over all sources; indices may go on beyond it."""
        return sum(len(source) for source in self.sources)

    def where(self, index: int) -> tuple[RowSource, int]:
        """Source and row of a sample."""
        source, row = self.order.row(index)
        return self.sources[source], row

    def documents(self, row: int) -> list[int]:
        source, row = self.where(row)
        return source.documents(row)

    def parents(self, row: int) -> list[int | None]:
        source, row = self.where(row)
        return source.parents(row)

    def segments(self, row: int) -> list[tuple[int, int, int]]:
        source, row = self.where(row)
        return source.segments(row)

    def supervised(self, row: int) -> int:
        source, row = self.where(row)
        return source.supervised(row)

    def read(self, row: int, start: int, stop: int) -> Slice:
        source, row = self.where(row)
        return source.read(row, start, stop)

    # Of rows of units, all of which come from one packed folder.

    def units(self, row: int) -> RowUnits:
        source, row = self._packed(row)
        return source.units(row)

    def old(self, row: int, start: int, stop: int) -> np.ndarray | None:
        source, row = self._packed(row)
        return source.old(row, start, stop)

    def numbers(
        self, row: int, start: int, stop: int, read: Callable[[int, int], np.ndarray | None]
    ) -> np.ndarray | None:
        source, row = self._packed(row)
        return source.numbers(row, start, stop, read)

    def put(self, row: int, values: np.ndarray, write: Callable[[int, np.ndarray], None]) -> None:
        source, row = self._packed(row)
        source.put(row, values, write)

    def _packed(self, row: int) -> tuple[Rows, int]:
        source, row = self.where(row)
        assert isinstance(source, Rows)
        return source, row
