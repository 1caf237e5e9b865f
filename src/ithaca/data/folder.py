"""The packed folder: token ids on disk, written once, read by exact ranges.

    manifest.json         what is inside, where it came from, size and SHA-256 of every file
    tokens-00000.bin …    token ids, documents back to back; little-endian uint16 (vocabulary ≤ 65,536) or uint32
    mask-00000.bin …      one bit per token, 1 = supervised; only for shards in which some token is not
    sums-00000.bin        beside a mask: int64, supervised tokens before every 4,096th token of the shard
    documents.bin         int64, documents + 1: where each document starts, counted over all shards
    supervised.bin        int64, documents: supervised tokens of each; only where there is a mask
    tokenizer/            the tokenizer that was used
    rows/                 which documents share a row, made on demand (plan.py)

A document lies in one shard. The documents of a source lie side by side, so one folder can hold several sources and be
read with any weights. The index is memory-mapped. Tokens are read with `pread`, not mapped: a rank wants a few long
exact ranges, and gets exactly those bytes (a page fault brings its neighbours too), nothing stays in the process's
memory, and a disk that fails is an exception with a file name instead of SIGBUS.

"Supervised" means: somebody predicts this token. The first token of a document never counts.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..files import sha256_of

FORMAT, VERSION = "ithaca packed", 1
BLOCK = 4096  # tokens between two entries of sums-*.bin
INDEX = np.dtype("<i8")
_OPEN = 64  # token files kept open


def token_dtype(vocabulary: int) -> np.dtype:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


class Packed:
    """A packed folder, open for reading."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.vocabulary: int = self.manifest["vocabulary"]
        self.largest_token: int = self.manifest["largest_token"]
        self.dtype = np.dtype(self.manifest["dtype"])
        self.bytes_read = 0  # of tokens and masks, since the folder was opened
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
        self._sums: dict[int, np.ndarray] = {}
        if len(self.offsets) != self.manifest["documents"] + 1 or int(self.offsets[-1]) != self._first[-1]:
            raise ValueError(f"{self.folder}: documents.bin and manifest.json do not agree; pack the data again")

    @property
    def identity(self) -> str:
        """Changes with the content, and with nothing else."""
        return self.manifest["content"]

    @property
    def masked(self) -> bool:
        """Is there a token that is not supervised?"""
        return self._supervised is not None

    def lengths(self, source: int | None = None) -> np.ndarray:
        """Tokens of every document, or of those of one source."""
        return np.diff(self.offsets[slice(*self._range(source))])

    def supervised(self, source: int | None = None) -> np.ndarray:
        """Supervised tokens of every document, or of those of one source."""
        first, stop = self._range(source)
        if self._supervised is None:
            return self.lengths(source) - 1
        return np.asarray(self._supervised[first : stop - 1])

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

    def count(self, start: int, stop: int) -> int:
        """How many of the tokens start … stop are supervised, without reading more than two blocks of their mask."""
        shard, start, stop = self._within(start, stop)
        if self._shards[shard]["mask"] is None:
            return stop - start
        return self._before(shard, stop) - self._before(shard, start)

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
            path = self.folder / name
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing, though manifest.json lists it; copy it again or pack the data again"
                )
            if path.stat().st_size != about["bytes"]:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, manifest.json says {about['bytes']:,}; copy it again or "
                    "pack the data again"
                )

    def verify(self) -> None:
        """Read every file and compare its SHA-256 with the manifest."""
        for name, about in self.manifest["files"].items():
            if sha256_of(self.folder / name) != about["sha256"]:
                raise ValueError(
                    f"{self.folder / name} has changed since it was written (SHA-256 differs); copy it again or pack the "
                    "data again"
                )

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuse a model whose vocabulary is too small for the tokens here."""
        if self.largest_token >= vocabulary:
            raise ValueError(
                f"{self.folder} holds token {self.largest_token:,}, outside the model's vocabulary of {vocabulary:,} tokens "
                f"(0 to {vocabulary - 1:,}); pack the data with the tokenizer of this model"
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a packed folder; 'ithaca data pack' makes one")
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not there; make it with 'ithaca data pack FILES --tokenizer FOLDER --out {folder}'"
        )
    if not path.is_file():
        raise ValueError(f"{folder} is not a packed folder: it has no manifest.json; 'ithaca data pack' makes one")
    try:
        manifest = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; pack the data again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a packed folder (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {manifest.get('version')}, this ithaca reads {VERSION}; pack the data again"
        )
    for name in manifest["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} names the file {name!r} outside of the folder; do not use it")
    return manifest
