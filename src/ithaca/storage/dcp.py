"""torch.distributed.checkpoint (DCP), over a place: its files go there hashed, its failures are one line.

Hashing what goes to disk, not what comes back from it, saves a second read and also notices a disk that wrote something else.
torch's own checksum of each tensor (CRC32) is left out: it costs a third of a second a gigabyte, and nobody ever checks it. Reading
is in safe_metadata.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import get_crc32_options, set_crc32_options

from ..base.faults import reach
from .files import CheckpointError, NotWritten
from .place import Place, place_of
from .stream import BlockStream

ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # torch warns of one process without a group


@contextmanager
def plainly(doing: str) -> Iterator[None]:
    """torch reports failures of all ranks with their traces, as a BaseException; one line is what a person needs."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=ALONE)
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):  # a signal has asked this process to stop
            raise cause from None
        kind = NotWritten if isinstance(cause, OSError) else CheckpointError
        raise kind(f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}") from None
    except CheckpointError:
        raise
    except Exception as error:
        kind = NotWritten if isinstance(error, OSError) else CheckpointError
        raise kind(f"{doing} failed: {type(error).__name__}: {error}") from error


class _HashingFiles(FileSystem):
    """torch's file operations on a draft; `entries` has what the manifest says about each file written.

    torch writes `.metadata.tmp` and renames it. A draft as a whole is not published yet, so the file gets its name at once."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.entries: dict[str, dict[str, Any]] = {}
        self.problem: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.problem = self.problem or error

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        file = Path(path)
        file = file.with_name(file.name.removesuffix(".tmp"))
        try:
            stream = BlockStream(self.place.create(file), self.fail)
        except OSError as error:
            self.fail(error)
            raise
        try:
            yield stream
            stream.close()
        finally:
            stream.abandon()
        self.entries[file.name] = {"size": stream.size, "sha256": stream.sha256, "modified": stream.modified}

    def mkdir(self, path: str | os.PathLike) -> None:
        """`begin` has."""

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # the name of a draft is never used twice

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """It has its name."""


class HashingWriter(FileSystemWriter):
    def __init__(self, draft: Path, step: int) -> None:
        # one thread: an error in a second one is lost inside torch, and the save would look complete
        # no sync_files: the stream makes a file durable when torch closes it
        super().__init__(draft, sync_files=False, overwrite=False, thread_count=1)
        self.fs, self.step = _HashingFiles(place_of(draft)), step

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
