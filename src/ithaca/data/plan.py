"""The row plan: for each row, which tokens of which documents.

It follows from (lengths of the documents, which of them are held out, context, policy for long documents, seed) alone. No token is
read, so it is there before the first step, together with the count of everything that will not be seen as it is: what is split,
dropped, or padded.

Documents longer than the context, by policy:

- "split": cut into pieces of the context length, each a row of its own; the rest is packed like a document. No token is
  lost, but the first token of a later piece is predicted by nobody.
- "drop": left out and counted.
- "error": refused.

A unit (source.py) says something only as a whole: it is never cut, and with "split" left out as with "drop". Where its parts share
what they begin with (branches.py), it is as long as the tokens that are computed, and so many more fit into a row.

A piece in which no token is supervised (the long prompt of a chat, say) would cost time and teach nothing. It is left
out and counted, so every row has something to learn from.

A plan is three arrays, kept under `rows/` in the packed folder and memory-mapped from there: every rank reads the same
one.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import inside, read_json, sha256_of
from .fit import best_fit
from .folder import Packed
from .publish import publish
from .split import Split

POLICIES = ("split", "drop", "error")
_RECIPE = 2  # of fit.py and this file: another number for other rows, or for another form of them
_ARRAYS = ("pieces", "bounds", "supervised")
_LIMIT = 1 << 16  # bytes of plan.json


@dataclass(frozen=True)
class Counts:
    """What a plan does with the documents. Everything is counted, in tokens too."""

    documents: int
    tokens: int
    rows: int
    long_documents: int  # longer than the context
    longest: int
    split_pieces: int  # what they became
    unpredicted: int  # tokens at the start of a later piece
    dropped_documents: int
    dropped_tokens: int
    unlearnable_pieces: int  # without a supervised token, left out
    unlearnable_tokens: int
    padding: int
    shared: int = 0  # tokens of units in rows that are not computed again; not in `tokens`

    @property
    def full(self) -> float:
        """Share of the rows' places that hold a token."""
        places = self.tokens - self.dropped_tokens - self.unlearnable_tokens + self.padding
        return 1 - self.padding / places


@dataclass(frozen=True)
class RowPlan:
    context: int
    pieces: np.ndarray  # [pieces, 3] int64: document, first token in it, one past the last; by row
    bounds: np.ndarray  # [rows + 1] int64: where the pieces of a row start
    supervised: np.ndarray  # [rows] int64: supervised tokens
    counts: Counts
    share: bool = (
        False  # parts of units share what they begin with; pieces of units are then of what is computed of them
    )

    def __len__(self) -> int:
        return len(self.bounds) - 1


def check_context(context: int, long_documents: str) -> None:
    if not isinstance(context, int) or context < 2:
        raise ValueError(f"context={context!r}: a row needs at least 2 tokens, one to read and one to predict")
    if long_documents not in POLICIES:
        raise ValueError(
            f"long_documents={long_documents!r} is unknown; choose one of {', '.join(map(repr, POLICIES))}"
        )


def make_plan(
    packed: Packed, context: int, *, long_documents: str = "split", seed: int = 0, source: int | None = None,
    split: Split | None = None, share: bool = False,
) -> RowPlan:  # fmt: skip
    """Compute the plan for all documents, for those of one source, or for one side of a split of them. share: with one copy of
    what parts of units begin with."""
    check_context(context, long_documents)
    share = share and packed.has_units(source) and packed.knows_shared
    lengths, supervised = packed.lengths(source, share=share), packed.supervised(source)
    saved = packed.lengths(source) - lengths
    first = 0 if source is None else packed.manifest["sources"][source]["range"][0]
    name = packed.folder if source is None else f"{packed.folder}, source {packed.manifest['sources'][source]['name']}"
    numbers = np.arange(first, first + len(lengths))
    if split is not None:
        side = split.select(packed.hashes(source), name)
        numbers, lengths, supervised, saved = numbers[side], lengths[side], supervised[side], saved[side]
        name = f"{name}, {'what validation holds out' if split.held_out else 'without what validation holds out'}"
    is_long = lengths > context
    units = packed.has_units(source)
    if units and len(lengths) and is_long.all():
        raise ValueError(
            f"{name}: all {len(lengths):,} units are longer than the context of {context:,} tokens, and a unit is never cut; the "
            f"shortest has {int(lengths.min()):,}. Raise the context, or shorten prompts or answers"
        )
    if long_documents == "error" and is_long.any():
        at = int(np.argmax(lengths))
        raise ValueError(
            f"{name}: {int(is_long.sum()):,} documents are longer than the context of {context:,} tokens; document "
            f"{int(numbers[at]):,} is the longest with {int(lengths[at]):,}. Raise the context, or choose long_documents: split or "
            "drop"
        )
    cuts = long_documents == "split" and not units
    document, start, stop = _cut(lengths, context, split=cuts)
    learn = _learnable(packed, numbers, document, start, stop, supervised, lengths)
    document = numbers[document]
    keep = learn > 0
    idle = int((stop - start)[~keep].sum())
    document, start, stop, learn = document[keep], start[keep], stop[keep], learn[keep]
    size = stop - start
    if not len(size):
        raise ValueError(
            f"{name}: nothing is left to learn from of {len(lengths):,} documents at a context of {context:,} tokens: "
            f"{int(is_long.sum()) if not cuts else 0:,} are longer and dropped, the others have no supervised token. Raise the "
            "context, or add data"
        )
    full = size == context
    rows = np.empty(len(size), np.int64)
    rows[full] = np.arange(int(full.sum()))
    rows[~full] = best_fit(size[~full], context, seed) + int(full.sum())
    order = np.argsort(rows, kind="stable")
    count = int(rows.max()) + 1
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=bounds[1:])
    cut = cuts and bool(is_long.any())
    dropped = lengths[:0] if cuts else lengths[is_long]
    counts = Counts(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        rows=count,
        long_documents=int(is_long.sum()),
        longest=int(lengths.max(initial=0)),
        split_pieces=int((-(-lengths[is_long] // context)).sum()) if cut else 0,
        unpredicted=int((-(-lengths[is_long] // context) - 1).sum()) if cut else 0,
        dropped_documents=len(dropped),
        dropped_tokens=int(dropped.sum()),
        unlearnable_pieces=int((~keep).sum()),
        unlearnable_tokens=idle,
        padding=count * context - int(size.sum()),
        shared=int(saved[~is_long].sum()),
    )
    pieces = np.stack([document, start, stop], axis=1)[order]
    return RowPlan(context, pieces, bounds, np.add.reduceat(learn[order], bounds[:-1]), counts, share)


def _cut(lengths: np.ndarray, context: int, split: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document, start and stop of every piece."""
    parts = -(-lengths // context)
    if not split:
        parts = (parts == 1).astype(np.int64)
    document = np.repeat(np.arange(len(lengths)), parts)
    # 0, 1, 2 … inside each document
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = number * context
    return document, start, np.minimum(start + context, lengths[document])


def _learnable(
    packed: Packed, numbers: np.ndarray, document: np.ndarray, start: np.ndarray, stop: np.ndarray, supervised: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Supervised tokens of every piece. Those of whole documents are known; a part is counted from the index of its mask."""
    if not packed.masked:
        return stop - start - 1
    learn = supervised[document].astype(np.int64)
    for at in np.flatnonzero(stop - start < lengths[document]).tolist():
        begin = int(packed.offsets[numbers[document[at]]])
        learn[at] = packed.count(begin + int(start[at]) + 1, begin + int(stop[at]))
    return learn


def open_plan(
    packed: Packed, context: int, *, long_documents: str = "split", seed: int = 0, source: int | None = None,
    split: Split | None = None, share: bool = False, keep: bool = True,
) -> RowPlan:  # fmt: skip
    """The plan from `rows/` in the packed folder; made and put there if it is not yet. A folder that cannot be written to is no
    error: the plan then lives in memory, as it does without keep."""
    check_context(context, long_documents)
    share = share and packed.has_units(source) and packed.knows_shared
    asked = [_RECIPE, packed.identity, context, long_documents, seed, source, *(astuple(split) if split else ())]
    asked += ["shared"] if share else []
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    folder = packed.folder / "rows" / key
    if not (folder / "plan.json").is_file():
        more: dict[str, Any] = dict(source=source, split=split, share=share)
        plan = make_plan(packed, context, long_documents=long_documents, seed=seed, **more)
        with suppress(OSError, ValueError):  # read-only, or another process was first
            if keep:
                _save(plan, folder)
        if not (folder / "plan.json").is_file():
            return plan
    return _load(folder, packed, context, source, split, share)


def _save(plan: RowPlan, folder: Path) -> None:
    def fill(into: Path) -> None:
        for name in _ARRAYS:
            np.save(into / f"{name}.npy", getattr(plan, name), allow_pickle=False)
        about = {
            "counts": plan.counts.__dict__,
            "sha256": {name: sha256_of(into / f"{name}.npy") for name in _ARRAYS},
        }
        (into / "plan.json").write_text(json.dumps(about, indent=1))

    publish(folder, fill)


def _load(folder: Path, packed: Packed, context: int, source: int | None, split: Split | None, share: bool) -> RowPlan:
    """A plan that was made before. Its numbers are used as places in files, so none is believed."""
    try:
        about = read_json(inside(packed.folder, str((folder / "plan.json").relative_to(packed.folder))), _LIMIT)
        counts = Counts(**about["counts"])
        for name in _ARRAYS:
            if sha256_of(inside(packed.folder, f"rows/{folder.name}/{name}.npy")) != about["sha256"][name]:
                raise ValueError(f"SHA-256 of {name}.npy differs")
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
        if not all(isinstance(array, np.ndarray) and array.dtype == np.int64 for array in arrays):
            raise ValueError("its arrays are not whole numbers")
        pieces, bounds, supervised = arrays
        plan = RowPlan(context, pieces, bounds, supervised, counts, share)
        _check(plan, packed, source, split)
    except (OSError, ValueError, TypeError, KeyError, EOFError, OverflowError) as error:
        raise ValueError(f"{folder} is damaged ({str(error)[:200]}); remove that folder, it is made again") from None
    return plan


def _check(plan: RowPlan, packed: Packed, source: int | None, split: Split | None) -> None:
    """Does the plan make rows of the documents that are there?"""
    pieces, bounds, supervised = plan.pieces, plan.bounds, plan.supervised
    if bounds.ndim != 1 or supervised.ndim != 1 or len(bounds) < 2 or pieces.shape != (int(bounds[-1]), 3):
        raise ValueError("its arrays do not match")
    counts = plan.counts.__dict__.values()
    if len(supervised) != len(plan) or len(plan) != plan.counts.rows or not all(type(count) is int for count in counts):
        raise ValueError("its arrays do not match")
    if bounds[0] != 0 or (np.diff(bounds) < 1).any():
        raise ValueError("its rows are not in order")
    lengths = packed.lengths(source, share=plan.share)
    first = 0 if source is None else packed.manifest["sources"][source]["range"][0]
    document, start, stop = pieces.T
    if document.min() < first or document.max() >= first + len(lengths):
        raise ValueError("it has pieces of documents that are not there")
    if split is not None and not split.select(packed.hashes(source), packed.folder)[document - first].all():
        raise ValueError("it has pieces of documents of the other side of the split")
    if (start < 0).any() or (start >= stop).any() or (stop > lengths[document - first]).any():
        raise ValueError("it has pieces that do not lie in their documents")
    if packed.has_units(source) and ((start > 0) | (stop < lengths[document - first])).any():
        raise ValueError("it has pieces of units")
    sizes = np.add.reduceat(stop - start, bounds[:-1])
    # tokens that are shared count once for each part
    most = plan.context + plan.counts.shared if plan.share else plan.context
    if (sizes > plan.context).any() or (supervised < 1).any() or (supervised >= most).any():
        raise ValueError("it has rows that are too long, or have too much or nothing to learn from")
    if plan.counts.padding != len(plan) * plan.context - int(sizes.sum()):
        raise ValueError("its rows and its counts do not match")
