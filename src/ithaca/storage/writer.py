"""torch's checkpoint writer, with the SHA-256 of each file taken while it is written.

Hashing what goes to disk, not what comes back from it, saves a second read and also notices a disk that wrote something else. A
large piece is hashed by a helper thread while it is written, so a save takes as long as the slower of the two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

_LARGE = 1 << 20


class _HashingStream:
    """A file for writing that remembers what went by."""

    def __init__(self, raw: Any, helper: ThreadPoolExecutor, failed: Callable[[OSError], None]) -> None:
        self.raw, self.helper, self.failed = raw, helper, failed
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        hashed = None
        if view.nbytes < _LARGE:
            self.digest.update(view)
        else:
            hashed = self.helper.submit(self.digest.update, view)
        try:
            return self._noted(lambda: self.raw.write(view))
        finally:
            if hashed is not None:
                hashed.result()  # `view` may be a tensor's own memory, gone after this call

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._noted(self.raw.flush)

    def fileno(self) -> int:
        self.flush()  # for fsync
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
        with super().create_stream(path, mode) as raw, ThreadPoolExecutor(1) as helper:
            stream = _HashingStream(raw, helper, self.fail)
            yield stream
        self.entries[Path(path).name] = {"size": stream.size, "sha256": stream.digest.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.entries:
            self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True, overwrite=False)
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
