"""torch's checkpoint writer, with the SHA-256 of each file taken while it is written.

Hashing what goes to disk, not what comes back from it, saves a second read and also notices a disk that wrote something else. One
helper thread hashes a large piece while it is written; another tells the disk to begin with what it has, instead of leaving all of
it to the flush at the end. So a save takes as long as the slowest of copying, hashing and the disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

_LARGE = 1 << 20  # bytes worth a thread
_BATCH = 1 << 27  # bytes the disk is told to write at once


class _HashingStream:
    """A file for writing that remembers what went by."""

    def __init__(self, raw: Any, helper: ThreadPoolExecutor, failed: Callable[[OSError], None]) -> None:
        self.raw, self.helper, self.failed = raw, helper, failed
        self.digest, self.size = hashlib.sha256(), 0
        self.waiting = 0  # bytes the disk was not told about
        self.syncing: Future[None] | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        hashed = None
        if view.nbytes < _LARGE:
            self.digest.update(view)
        else:
            hashed = self.helper.submit(self.digest.update, view)
        try:
            count = self._noted(lambda: self.raw.write(view))
            self._begin_sync(view.nbytes)
            return count
        finally:
            if hashed is not None:
                hashed.result()  # `view` may be a tensor's own memory, gone after this call

    def _begin_sync(self, count: int) -> None:
        self.waiting += count
        if self.waiting >= _BATCH and (self.syncing is None or self.syncing.done()):
            self._end_sync()
            self.waiting, self.syncing = 0, self.helper.submit(os.fdatasync, self.raw.fileno())

    def _end_sync(self) -> None:
        if self.syncing is not None:
            self._noted(self.syncing.result)  # the kernel reports an error once: it must not be lost here
            self.syncing = None

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._noted(self.raw.flush)

    def fileno(self) -> int:
        self.flush()  # whoever asks is about to fsync
        self._end_sync()
        return self.raw.fileno()

    def _noted(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except OSError as error:
            self.failed(error)
            raise

    def close(self) -> None:
        self.raw.close()


class _HashingFiles(FileSystem):
    """torch's file operations; `entries` has what the manifest says about each file written."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.problem: OSError | None = None

    def fail(self, error: OSError) -> None:
        self.problem = self.problem or error

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw, ThreadPoolExecutor(2) as helper:
            stream = _HashingStream(raw, helper, self.fail)
            yield stream
        self.entries[Path(path).name] = {"size": stream.size, "sha256": stream.digest.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.entries:
            self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        # one thread: an error in a second one is lost inside torch, and the save would look complete
        super().__init__(path, sync_files=True, overwrite=False, thread_count=1)
        self.fs = _HashingFiles()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """File name -> size and SHA-256, of the files this rank has written."""
        return self.fs.entries  # pyright: ignore[reportAttributeAccessIssue]

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = self.fs.problem  # pyright: ignore[reportAttributeAccessIssue]
            if cause is not None:  # of a full disk torch says "unexpected pos 704 vs 598"
                raise cause from error
            raise

    def stage(self, state_dict: Any) -> Any:
        return state_dict  # an asynchronous save is given copies

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the default would write this machine's paths into the file
