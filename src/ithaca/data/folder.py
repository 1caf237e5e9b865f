"""The packed folder: token ids on disk, written once, read by exact ranges.

    manifest.json         what is inside, where it came from, size and SHA-256 of every file
    tokens-00000.bin …    token ids, documents back to back; little-endian uint16 (vocabulary ≤ 65,536) or uint32
    mask-00000.bin …      one bit per token, 1 = supervised; only for shards in which some token is not
    sums-00000.bin        beside a mask: int64, supervised tokens before every 4,096th token of the shard
    documents.bin         int64, documents + 1: where each document starts, counted over all shards
    supervised.bin        int64, documents: supervised tokens of each; only where there is a mask
    hashes.bin            64 bits, documents: a hash of the token ids of each
    units.bin             int64, documents + 1: where the parts of each document start; only where there are units
    parts.bin             of each part its length, its supervised tokens (int64) and its reward or advantage (float64, NaN: none)
    shared.bin            int64, parts: of each part, tokens that need not be computed again behind the part before it (branches.py)
    old-00000.bin …       float32, tokens: log-probabilities of whoever sampled them; only for shards that have them
    tokenizer/            the tokenizer that was used
    rows/                 which documents share a row, made on demand (plan.py)

A unit is a record of several documents that stay together (source.py). Here it is one document, which is never cut, and its parts
say where it comes apart. A document lies in one shard. The documents of a source lie side by side, so one folder can hold several
sources and be read with any weights. The index is memory-mapped. Tokens are read with `pread`, not mapped: a rank wants a few long
exact ranges, and gets exactly those bytes (a page fault brings its neighbours too), nothing stays in the process's
memory, and a disk that fails is an exception with a file name instead of SIGBUS.

"Supervised" means: somebody predicts this token. The first token of a document, or of a part, never counts.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..base.files import inside, sha256_of
from .manifest import BLOCK, INDEX, OLD, PART, read_manifest
from .stamps import stamp

_OPEN = 64  # token files kept open
_INDICES = 1 << 20  # numbers of the index that are checked at a time

Seen = dict[str, list[int]]  # file name -> inode, size and times of a file whose SHA-256 was right


class Packed:
    """A packed folder, open for reading."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.vocabulary: int = self.manifest["vocabulary"]
        self.largest_token: int = self.manifest["largest_token"]
        self.dtype = np.dtype(self.manifest["dtype"])
        self.bytes_read = 0  # of tokens and masks, since the folder was opened
        self.written = False  # by this process, just now: its files are those that were hashed
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()
        self._check_sizes()
        self.offsets: np.ndarray = np.memmap(self.folder / "documents.bin", INDEX, "r")
        self._shards = self.manifest["shards"]
        self._first = [0]  # first token of each shard
        for shard in self._shards:
            self._first.append(self._first[-1] + shard["tokens"])
        masked = "supervised.bin" in self.manifest["files"]
        self._supervised = np.memmap(self.folder / "supervised.bin", INDEX, "r") if masked else None
        hashed = "hashes.bin" in self.manifest["files"]
        self._hashes = np.memmap(self.folder / "hashes.bin", np.dtype("<u8"), "r") if hashed else None
        self._sums: dict[int, np.ndarray] = {}
        units = self.manifest["parts"] is not None
        self._units = np.memmap(self.folder / "units.bin", INDEX, "r") if units else None
        self.every_part: np.ndarray | None = np.memmap(self.folder / "parts.bin", PART, "r") if units else None
        shared = "shared.bin" in self.manifest["files"]
        self._shared = np.memmap(self.folder / "shared.bin", INDEX, "r") if shared else None
        self._check_index()
        self._check_parts()

    @property
    def identity(self) -> str:
        """Changes with the content, and with nothing else."""
        return self.manifest["content"]

    @property
    def masked(self) -> bool:
        """Is there a token that is not supervised?"""
        return self._supervised is not None

    def has_units(self, source: int | None = None) -> bool:
        """Does a source, or any of them, hold units?"""
        sources = self.manifest["sources"]
        return any(each["units"] for each in (sources if source is None else [sources[source]]))

    def has_answers(self, source: int | None = None) -> bool:
        """Does a source, or any of them, hold units whose parts are compared: pairs, or what was judged?"""
        sources = self.manifest["sources"] if source is None else [self.manifest["sources"][source]]
        return any(each["units"] and (each["kind"] == "preference" or each["values"]) for each in sources)

    def parts(self, document: int) -> tuple[int, np.ndarray]:
        """The parts of a document, and the number of the first of them among all."""
        assert self._units is not None and self.every_part is not None
        first, stop = (int(at) for at in self._units[document : document + 2])
        return first, self.every_part[first:stop]

    @property
    def knows_shared(self) -> bool:
        """Is it written down what parts of a unit begin with alike? Older folders have it not."""
        return self._shared is not None

    def shared(self, document: int) -> list[int]:
        """Of each part of a document, the tokens that need not be computed again behind the part before it."""
        assert self._units is not None and self._shared is not None
        first, stop = (int(at) for at in self._units[document : document + 2])
        return self._shared[first:stop].tolist()

    def lengths(self, source: int | None = None, *, share: bool = False) -> np.ndarray:
        """Tokens of every document, or of those of one source. share: that are computed where units share what they can."""
        lengths = np.diff(self.offsets[slice(*self._range(source))])
        if share and self._units is not None and self._shared is not None:
            first, stop = self._range(source)
            before = np.concatenate([[0], np.cumsum(self._shared)])
            lengths = lengths - np.diff(before[self._units[first:stop]])
        return lengths

    def pairs_of_tokens(self) -> list[tuple[int, int]] | None:
        """Tokens, and pairs of them that see each other, of all parts: computed where they share what they can, and without; None
        where nothing is shared."""
        if self._shared is None or self.every_part is None or not self._shared.any():
            return None
        sums = []
        for power in (
            1,
            2,
        ):  # a part of L tokens has about L² / 2 pairs, of which it shares those of the tokens it shares
            whole, shared = (
                float((column.astype(float) ** power).sum()) for column in (self.every_part["length"], self._shared)
            )
            sums.append((int(whole - shared), int(whole)))
        return sums

    def supervised(self, source: int | None = None) -> np.ndarray:
        """Supervised tokens of every document, or of those of one source."""
        first, stop = self._range(source)
        if self._supervised is None:
            return self.lengths(source) - 1
        return np.asarray(self._supervised[first : stop - 1])

    def hashes(self, source: int | None = None) -> np.ndarray:
        """A hash of the tokens of every document, or of those of one source."""
        if self._hashes is None:
            raise ValueError(
                f"{self.folder} has no hashes of its documents, by which some are held out; pack the data again"
            )
        first, stop = self._range(source)
        return np.asarray(self._hashes[first : stop - 1])

    def _range(self, source: int | None) -> tuple[int, int]:
        """Of `offsets`: one more than there are documents."""
        if source is None:
            return 0, len(self.offsets)
        first, stop = self.manifest["sources"][source]["range"]
        return first, stop + 1

    # Tokens are numbered over all shards. A range must lie in one document.

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids start … stop."""
        shard, start, stop = self._within(start, stop)
        size = self.dtype.itemsize
        return np.frombuffer(self._bytes(self._shards[shard]["file"], start * size, stop * size), self.dtype)

    def mask(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens start … stop are supervised; None = all."""
        shard, start, stop = self._within(start, stop)
        return None if self._shards[shard]["mask"] is None else self._bits(shard, start, stop)

    def old(self, start: int, stop: int) -> np.ndarray | None:
        """Log-probabilities of the tokens start … stop by whoever sampled them, 0 where they are not supervised; None = unknown."""
        shard, start, stop = self._within(start, stop)
        name, size = self._shards[shard]["old"], OLD.itemsize
        return None if name is None else np.frombuffer(self._bytes(name, start * size, stop * size), OLD)

    def count(self, start: int, stop: int) -> int:
        """How many of the tokens start … stop are supervised, without reading more than two blocks of their mask."""
        shard, start, stop = self._within(start, stop)
        if self._shards[shard]["mask"] is None:
            return stop - start
        supervised = self._before(shard, stop) - self._before(shard, start)
        if not 0 <= supervised <= stop - start:
            raise ValueError(f"{self.folder / self._shards[shard]['sums']} does not fit its mask; pack the data again")
        return supervised

    def _before(self, shard: int, token: int) -> int:
        if shard not in self._sums:
            self._sums[shard] = np.memmap(self.folder / self._shards[shard]["sums"], INDEX, "r")
        block = token // BLOCK
        return int(self._sums[shard][block]) + int(self._bits(shard, block * BLOCK, token).sum())

    def _within(self, start: int, stop: int) -> tuple[int, int, int]:
        shard = min(bisect_right(self._first, start), len(self._shards)) - 1
        first, end = self._first[shard], self._first[shard + 1]
        assert first <= start <= stop <= end, f"tokens {start} to {stop} are not in one shard"
        return shard, start - first, stop - first

    def _bits(self, shard: int, start: int, stop: int) -> np.ndarray:
        raw = self._bytes(self._shards[shard]["mask"], start // 8, -(-stop // 8))
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].astype(bool)

    def _bytes(self, name: str, start: int, stop: int) -> bytearray:
        into = bytearray(stop - start)
        view, at = memoryview(into), 0
        while at < len(into):
            with self._lock:  # a file may be closed to make room for another one
                got = os.preadv(self._open(name), [view[at:]], start + at)
                self.bytes_read += got
            if got == 0:
                raise ValueError(
                    f"{self.folder / name} ends at byte {start + at:,}: it was cut short; pack the data again"
                )
            at += got
        return into

    def _open(self, name: str) -> int:
        if name in self._files:
            self._files.move_to_end(name)
        else:
            while len(self._files) >= _OPEN:
                os.close(self._files.popitem(last=False)[1])
            self._files[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):  # no read-ahead beyond what was asked for
                os.posix_fadvise(self._files[name], 0, 0, os.POSIX_FADV_RANDOM)
        return self._files[name]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    # Is it whole, and does it fit the model?

    def _check_sizes(self) -> None:
        for name, about in self.manifest["files"].items():
            path = inside(self.folder, name)
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing, though manifest.json lists it; copy it again or pack the data again"
                )
            if path.stat().st_size != about["bytes"]:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, manifest.json says {about['bytes']:,}; copy it again or "
                    "pack the data again"
                )

    def _check_index(self) -> None:
        """Do the documents fill the shards, each in one of them? The numbers are used as places in files."""
        wrong = ValueError(f"{self.folder}: documents.bin and manifest.json do not agree; pack the data again")
        documents = self.manifest["documents"]
        if len(self.offsets) != documents + 1 or self.offsets[0] != 0 or int(self.offsets[-1]) != self._first[-1]:
            raise wrong
        for start in range(0, documents, _INDICES):
            some = self.offsets[start : start + _INDICES + 1]
            if (some[1:] <= some[:-1]).any():
                raise wrong
            if self._supervised is not None:
                learn = self._supervised[start : start + _INDICES]
                if (learn < 1).any() or (learn >= some[1:] - some[:-1]).any():
                    raise ValueError(
                        f"{self.folder}: supervised.bin and documents.bin do not agree; pack the data again"
                    )
        before = np.cumsum([0, *(shard["documents"] for shard in self._shards)])
        if (self.offsets[before] != self._first).any():
            raise wrong

    def _check_parts(self) -> None:
        """Are the parts of a document as long as it is?"""
        if self._units is None or self.every_part is None:
            return
        starts, parts = self._units, self.every_part
        wrong = ValueError(f"{self.folder}: units.bin, parts.bin and documents.bin do not agree; pack the data again")
        if starts[0] != 0 or int(starts[-1]) != len(parts) or (np.diff(starts) < 1).any():
            raise wrong
        lengths, learn = parts["length"], parts["supervised"]
        if (lengths < 2).any() or (learn < 1).any() or (learn >= lengths).any():
            raise wrong
        if (np.add.reduceat(lengths, starts[:-1]) != self.lengths()).any():
            raise wrong
        if (np.add.reduceat(learn, starts[:-1]) != self.supervised()).any():
            raise wrong
        if (
            self._shared is not None
        ):  # each part keeps two tokens of its own, and the first of a document shares nothing
            most = np.minimum(lengths, np.concatenate([[2], lengths[:-1]])) - 2
            most[starts[:-1]] = 0
            if ((self._shared < 0) | (self._shared > most)).any():
                raise ValueError(f"{self.folder}: shared.bin and parts.bin do not agree; pack the data again")

    def verify(
        self, seen: Mapping[str, Any] | None = None, progress: Callable[[int], None] = lambda size: None
    ) -> Seen:
        """Read every file and compare its SHA-256 with the manifest. seen: what was right before, and is not read again if it has
        not been touched since. progress: is called with the bytes of each file. -> what is right now"""
        now = {name: _touched(self.folder / name) for name in self.manifest["files"]}
        unread = [name for name in now if not self.written and (seen is None or seen.get(name) != now[name])]
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:  # hashing leaves Python's lock
            for name, digest in zip(unread, pool.map(lambda name: sha256_of(self.folder / name), unread), strict=True):
                about = self.manifest["files"][name]
                if digest != about["sha256"]:
                    pool.shutdown(cancel_futures=True)
                    raise ValueError(
                        f"{self.folder / name} has changed since it was written (SHA-256 differs); copy it again or pack the "
                        "data again"
                    )
                progress(about["bytes"])
        return now

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuse a model whose vocabulary is too small for the tokens here."""
        if self.largest_token >= vocabulary:
            raise ValueError(
                f"{self.folder} holds token {self.largest_token:,}, outside the model's vocabulary of {vocabulary:,} tokens "
                f"(0 to {vocabulary - 1:,}); pack the data with the tokenizer of this model"
            )


def _touched(path: Path) -> list[int]:
    now = stamp(path)
    return [now.inode, now.bytes, now.mtime_ns, now.ctime_ns]
