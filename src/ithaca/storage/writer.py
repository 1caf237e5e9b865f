"""torch's checkpoint writer, over files that hash what is written into them (stream.py).

Hashing what goes to disk, not what comes back from it, saves a second read and also notices a disk that wrote something else.
torch's own checksum of each tensor (CRC32) is left out: it costs a third of a second a gigabyte, and nobody ever checks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import get_crc32_options, set_crc32_options

from ..base.faults import reach
from .stream import BlockStream


class _HashingFiles(FileSystem):
    """torch's file operations; `entries` has what the manifest says about each file written."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.problem: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.problem = self.problem or error

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        try:
            stream = BlockStream(path, self.fail)
        except OSError as error:
            self.fail(error)
            raise
        try:
            yield stream
        finally:
            stream.close()
        self.entries[Path(path).name] = {"size": stream.size, "sha256": stream.sha256, "modified": stream.modified}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.entries:
            self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    def __init__(self, path: Path, step: int) -> None:
        # one thread: an error in a second one is lost inside torch, and the save would look complete
        super().__init__(path, sync_files=True, overwrite=False, thread_count=1)
        self.fs, self.step = _HashingFiles(), step

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """File name -> size, SHA-256 and time of the files this rank has written."""
        return self.fs.entries  # pyright: ignore[reportAttributeAccessIssue]

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            with _without_crc32():
                done = super().write_data(plan, planner)
        except Exception as error:
            raise self._cause(error) from error
        reach("save.after_shard", self.step)
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        try:
            super().finish(metadata, results)
        except Exception as error:
            raise self._cause(error) from error

    def _cause(self, error: Exception) -> Exception:
        """Of a full disk torch says "unexpected pos 704 vs 598"."""
        return self.fs.problem or error  # pyright: ignore[reportAttributeAccessIssue]

    def stage(self, state_dict: Any) -> Any:
        return state_dict  # an asynchronous save is given copies

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the default would write this machine's paths into the file


@contextmanager
def _without_crc32() -> Iterator[None]:
    """For the whole process, as torch has it: what somebody else saves meanwhile lacks the checksum too, and loads all the same."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
