"""Reads the `.metadata` of a torch distributed checkpoint without running what it says.

`.metadata` is a pickle, and a pickle is a program: plain `dcp.load` runs a command that someone wrote into it (torch 2.15 still
does). What torch writes there needs a dozen classes: records of names, shapes, offsets and dtypes. The unpickler here knows those
and refuses every other name before it is even looked up, so nothing is imported or called.

Two more doors are shut. Entries that are not tensors would be unpickled by torch without any limit; a checkpoint of ithaca has
none, so any is refused. File names in the records must be files of this checkpoint. Tensors themselves are read by torch with
`weights_only=True`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from .files import CheckpointError
from .place import Place, place_of

METADATA = ".metadata"
_RECORDS = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_RECORDS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_RECORDS, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),  # looks a name up among torch's layouts
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint needs and which could run code")


def read_metadata(path: Path, files: Collection[str]) -> Metadata:
    """The records of a checkpoint that consists of `files`; CheckpointError if they are not just that."""
    try:
        with place_of(path).open(path / METADATA) as file:
            metadata = _Unpickler(file).load()
        _check(metadata, files)
    except CheckpointError as error:
        raise CheckpointError(f"refusing to load {path / METADATA}: {error}; use a checkpoint you trust") from None
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise CheckpointError(f"{path / METADATA} cannot be read ({type(error).__name__}: {error})") from None
    return metadata


def _check(metadata: Any, files: Collection[str]) -> None:
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"it holds a {type(metadata).__name__}, not the records of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name} is not a tensor, and torch would unpickle it without limits")
    for info in (metadata.storage_data or {}).values():
        if info.relative_path not in files or getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"it points to {info.relative_path!r}, which is no plain file of this checkpoint")


class _Files(FileSystem):
    """torch's file operations, as far as reading needs them."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "rb"
        with self.place.open(Path(path)) as file:
            yield file


class SafeReader(FileSystemReader):
    """torch's reader of checkpoint files, given records that were read safely."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._safe = metadata
        self.fs = _Files(place_of(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._safe.storage_meta = self._safe.storage_meta or StorageMeta()
        return self._safe

    def pieces(self, files: Collection[str]) -> Iterator[tuple[str, torch.Tensor, int]]:
        """What lies in these files, one by one: name of the tensor, the part of it, its bytes in the file."""
        for index, info in (self._safe.storage_data or {}).items():
            if info.relative_path in files:
                with self.fs.create_stream(Path(self.path) / info.relative_path, "rb") as file:
                    part = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
                yield index.fqn, part, info.length
