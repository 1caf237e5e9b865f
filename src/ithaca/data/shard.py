"""Writing one shard of a packed folder (folder.py says what its files are)."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ..base.files import sha256_of
from .manifest import BLOCK, INDEX, OLD, WRITTEN, token_dtype


class ShardWriter:
    """Documents go in one after the other: `add` their tokens in any number of calls, then `end`.

    units: a document is several that stay together, and each comes whole (`part`)."""

    def __init__(self, folder: Path, number: int, vocabulary: int, *, units: bool = False):
        self.folder, self.number, self.vocabulary = folder, number, vocabulary
        self.dropped: Counter[str] = Counter()
        self.tokens = self.documents = self.supervised = 0
        self.largest = -1
        self._dtype = token_dtype(vocabulary)
        self._file = open(folder / f"tokens-{number:05d}.bin", "wb", buffering=1 << 20)  # noqa: SIM115
        self._lengths = open(folder / f"lengths-{number:05d}.part", "wb", buffering=1 << 16)  # noqa: SIM115
        self._mask: _MaskWriter | None = None  # from the first token on that is not supervised
        self._units = open(folder / f"units-{number:05d}.part", "wb", buffering=1 << 16) if units else None  # noqa: SIM115
        self._old: IO[bytes] | None = None
        self._parts: list[tuple[int, int, float, int]] = []  # of the document being written: manifest.WRITTEN
        self._sampled: list[np.ndarray] = []  # old log-probabilities of its tokens
        self._hash = blake2b(digest_size=8)  # of the document being written
        self._length = 0
        self._highest = -1
        self._seen: list[np.ndarray | None] = []
        self._sizes: list[int] = []

    def add(self, ids: np.ndarray, seen: np.ndarray | None) -> None:
        """Tokens of the current document, and which of them are supervised (None = all)."""
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary:
            at = int(np.argmax((ids < 0) | (ids >= self.vocabulary)))
            raise ValueError(
                f"token {self._length + at:,} is {int(ids[at]):,}, outside the vocabulary of {self.vocabulary:,} tokens (0 to "
                f"{self.vocabulary - 1:,}); check that ids and vocabulary belong together"
            )
        raw = ids.astype(self._dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self._length += len(ids)
        self._highest = max(self._highest, high)
        self._seen.append(seen)
        self._sizes.append(len(ids))

    def part(
        self, ids: np.ndarray, seen: np.ndarray, value: float = math.nan, old: np.ndarray | None = None, shared: int = 0
    ) -> None:
        """One of the documents of a unit. value: its reward or advantage. old: log-probabilities of its supervised tokens. shared:
        tokens that need not be computed again where the part before it was (branches.py)."""
        self._parts.append((len(ids), int(seen[1:].sum()), value, shared))
        self.add(ids, seen)
        if old is not None:
            sampled = np.zeros(len(ids), OLD)
            sampled[seen] = old
            self._sampled.append(sampled)

    def discard(self, reason: str) -> None:
        """Forget the current document, and count it."""
        if self._length:
            self._file.seek(self.tokens * self._dtype.itemsize)
            self._file.truncate()
        self.dropped[reason] += 1
        self._begin()

    def end(self) -> None:
        """Close the document. One that can teach nothing is dropped and counted."""
        learn, whole = self._length - 1, None
        if any(seen is not None for seen in self._seen):
            both = zip(self._seen, self._sizes, strict=True)
            whole = np.concatenate([np.ones(size, bool) if seen is None else seen for seen, size in both])
            learn = int(whole[1:].sum())
        if self._parts:
            learn = sum(supervised for _, supervised, _, _ in self._parts)
        if self._length < 2:
            return self.discard("too_short")
        if learn == 0:
            return self.discard("unsupervised")
        self._write_mask(whole)
        self._write_parts()
        numbers = [self._length, learn, int.from_bytes(self._hash.digest(), "little", signed=True)]
        self._lengths.write(np.array(numbers, INDEX).tobytes())
        self.tokens += self._length
        self.documents += 1
        self.supervised += learn
        self.largest = max(self.largest, self._highest)
        self._begin()

    def _begin(self) -> None:
        """A new document."""
        self._length, self._highest, self._seen, self._sizes = 0, -1, [], []
        self._hash = blake2b(digest_size=8)
        self._parts, self._sampled = [], []

    def _write_parts(self) -> None:
        if self._units is None:
            return
        self._units.write(np.array([len(self._parts)], INDEX).tobytes() + np.array(self._parts, WRITTEN).tobytes())
        if self._sampled and self.documents == 0:
            self._old = open(self.folder / f"old-{self.number:05d}.bin", "wb", buffering=1 << 20)  # noqa: SIM115
        if bool(self._sampled) != (self._old is not None):
            raise ValueError(
                "some records before this one have log-probabilities of who sampled, and some have none; give them in all records "
                "of a source, or in none"
            )
        if self._old is not None:
            self._old.write(np.concatenate(self._sampled).tobytes())

    def _write_mask(self, seen: np.ndarray | None) -> None:
        if self._mask is None:
            if seen is None or seen.all():
                return
            self._mask = _MaskWriter(self.folder, self.number)
            self._mask.ones(self.tokens)
        if seen is None:
            self._mask.ones(self._length)
        else:
            self._mask.write(seen)

    def close(self) -> dict[str, Any]:
        """What was written, for the manifest."""
        self._close()
        names: dict[str, str | None] = {"file": Path(self._file.name).name, "mask": None, "sums": None, "old": None}
        if self._old is not None:
            names["old"] = Path(self._old.name).name
        if self._mask is not None:
            names["mask"], names["sums"] = self._mask.close()
        return {
            **names,
            "tokens": self.tokens,
            "documents": self.documents,
            "supervised": self.supervised,
            "largest": self.largest,
            "dropped": dict(self.dropped),
            "sha256": {name: sha256_of(self.folder / name) for name in names.values() if name is not None},
        }

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._mask is not None:
            self._mask.close()

    def _close(self) -> None:
        for file in (self._file, self._lengths, self._units, self._old):
            if file is not None:
                file.close()


class _MaskWriter:
    """A bit per token, and the count of ones before every block."""

    def __init__(self, folder: Path, number: int):
        self._bits = open(folder / f"mask-{number:05d}.bin", "wb", buffering=1 << 16)  # noqa: SIM115
        self._sums = open(folder / f"sums-{number:05d}.bin", "wb", buffering=1 << 16)  # noqa: SIM115
        self._held: list[np.ndarray] = []  # less than a block
        self._size = self._count = 0

    def ones(self, count: int) -> None:
        for start in range(0, count, 1 << 20):
            self.write(np.ones(min(1 << 20, count - start), bool))

    def write(self, seen: np.ndarray) -> None:
        self._held.append(seen)
        self._size += len(seen)
        if self._size >= BLOCK:
            every = np.concatenate(self._held)
            cut = self._size // BLOCK * BLOCK
            self._put(every[:cut])
            self._held, self._size = [every[cut:]], self._size - cut

    def _put(self, seen: np.ndarray) -> None:
        per_block = np.add.reduceat(seen.astype(np.int64), np.arange(0, len(seen), BLOCK))
        before = self._count + np.cumsum(per_block) - per_block
        self._sums.write(before.astype(INDEX).tobytes())
        self._count += int(per_block.sum())
        self._bits.write(np.packbits(seen, bitorder="little").tobytes())

    def close(self) -> tuple[str, str]:
        if not self._bits.closed:
            rest = np.concatenate(self._held) if self._held else np.zeros(0, bool)
            if len(rest):
                self._put(rest)
            else:  # the count before the end may be asked for, which here is the start of a block
                self._sums.write(np.array([self._count], INDEX).tobytes())
            self._bits.close()
            self._sums.close()
        return Path(self._bits.name).name, Path(self._sums.name).name
