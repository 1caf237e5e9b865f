"""Writes safetensors files one tensor at a time.

`safetensors.save_file` wants all tensors of a file in memory, and copies them to bytes first: 10 GB for a file of 5. But the format
is plain: the length of a header, the header as JSON with dtype, shape and place of each tensor, then their bytes in order. Names
and shapes are known beforehand, so the header can go first and the tensors follow, one by one. One that is not finite is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..base.files import naming
from .files import NotFiniteValues
from .finite import not_finite, words

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_HINTS = (
    "in the dtype of the export, which holds less than float32; export in float32 (--dtype fp32)",
    "though its parts are: adapters too large to be added in; export them apart (--no-merge)",
)


@dataclass(frozen=True)
class Entry:
    """A tensor to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Shards:
    """`add` every entry's tensor in order, then `close`. With several files there is an index, as transformers writes it."""

    def __init__(self, folder: Path, stem: str, entries: Sequence[Entry], max_bytes: int) -> None:
        """max_bytes: of a file; a larger tensor has a file of its own."""
        self.folder, self.stem = folder, stem
        files: list[list[Entry]] = [[]]
        for entry in entries:
            if files[-1] and sum(other.bytes for other in files[-1]) + entry.bytes > max_bytes:
                files.append([])
            files[-1].append(entry)
        count = len(files)
        names = (
            [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            if count > 1
            else [f"{stem}.safetensors"]
        )
        self.where = {entry.name: name for name, file in zip(names, files, strict=True) for entry in file}
        self.total = sum(entry.bytes for entry in entries)
        self._elements = sum(torch.Size(entry.shape).numel() for entry in entries)
        self._files = list(zip(names, files, strict=True))
        self._waiting: list[Entry] = []
        self._file: BinaryIO | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor, on the host."""
        if not self._waiting:
            self._open()
        entry = self._waiting.pop(0)
        assert (name, tuple(tensor.shape), tensor.dtype) == (entry.name, entry.shape, entry.dtype), (
            f"{name} is not {entry}"
        )
        if not_finite({name: tensor}):
            self._finish()
            raise NotFiniteValues(f"{words(name, tensor)} {_HINTS[entry.dtype == torch.float32]}; nothing was exported")
        assert self._file is not None
        with naming(self.folder):
            self._file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore

    def close(self) -> None:
        """All entries must have come."""
        self._finish()
        assert not self._files and not self._waiting, "tensors are missing"
        if len(set(self.where.values())) > 1:
            about = {"total_parameters": self._elements, "total_size": self.total}
            index = {"metadata": about, "weight_map": dict(sorted(self.where.items()))}
            path = self.folder / f"{self.stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _open(self) -> None:
        self._finish()
        name, self._waiting = self._files.pop(0)
        self._file = open(self.folder / name, "wb")  # noqa: SIM115 (closed by _finish)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in self._waiting:
            place = [at, at + entry.bytes]
            header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
            at += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _finish(self) -> None:
        if self._file is not None:
            with naming(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())
            self.leave()

    def leave(self) -> None:
        """Close what is open; if not all has come, it is of no use."""
        if self._file is not None:
            with suppress(OSError):  # what is left in its buffer does not fit either
                self._file.close()
            self._file = None
