"""A file that is hashed while it is written, and written past the page cache.

What comes in is copied into buffers of one block (digest.py). A full one is hashed and written by threads while the next is
filled, so a save takes as long as the slowest of copying, hashing and the disk. Three things make it fit beside the rest:

- Blocks are hashed independently, by as many threads as there are cores.
- Writing is direct (O_DIRECT) where the file system can: the kernel then copies nothing, which costs a third of a core's time
  otherwise (measured: docs/log.md), and a checkpoint pushes nothing else out of the page cache. Direct writes need aligned
  memory, places and sizes; blocks are, and the last, odd piece goes the usual way. Where a file system has no direct writes, all
  of it goes the usual way, told to begin early instead of leaving everything to the flush at the end.
- Copying, hashing and writing all let go of Python's lock, so that training can launch its kernels meanwhile. That is why numpy
  copies: the assignment of a slice of bytes would hold the lock for milliseconds (measured: docs/log.md).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import sha256
from typing import Any

import numpy as np

from .digest import BLOCK, cores, joined

_BUFFERS = 6  # blocks under way; 96 MiB a rank while it writes
_EARLY = 8  # blocks between two flushes where writing is not direct
_DIRECT = getattr(os, "O_DIRECT", 0)


class BlockStream:
    """A new file at `path`. Errors go to `failed` as well: torch reports others in their place."""

    def __init__(self, path: str | os.PathLike[str], failed: Callable[[Exception], None]) -> None:
        self.failed = failed
        self.size = 0
        self.modified = 0  # nanoseconds; known when closed
        self._file, self._direct = _create(path)
        self._hashers = ThreadPoolExecutor(min(4, cores()))
        self._writers = ThreadPoolExecutor(2)
        self._buffers: list[tuple[np.ndarray, list[Future[Any]]]] = []
        self._hashes: list[Future[bytes]] = []
        self._open = True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        count = view.nbytes
        view = view.cast("B") if count else view  # which refuses to cast nothing
        while view:
            at = self.size % BLOCK
            piece = view[: BLOCK - at]
            if at == 0:
                self._next_buffer()
            self._buffers[-1][0][at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
            self.size += piece.nbytes
            if self.size % BLOCK == 0:
                self._send(BLOCK)
            view = view[piece.nbytes :]
        return count

    def _next_buffer(self) -> None:
        """Put a free buffer last: a new one, or the one that was sent first."""
        if len(self._buffers) < _BUFFERS:
            memory = mmap.mmap(-1, BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # aligned, as direct writes need it
            self._buffers.append((np.frombuffer(memory, np.uint8), []))
            return
        buffer, busy = self._buffers.pop(0)
        self._settled(busy)
        self._buffers.append((buffer, []))

    def _send(self, count: int) -> None:
        buffer, busy = self._buffers[-1]
        number = len(self._hashes)
        view = buffer[:count].data
        self._hashes.append(self._hashers.submit(lambda: sha256(view).digest()))
        busy += [self._hashes[-1], self._writers.submit(self._put, view, number)]

    def _put(self, view: memoryview, number: int) -> None:
        place = number * BLOCK
        while view:
            direct = self._direct  # before the call: another thread may change it meanwhile
            try:
                count = os.pwrite(self._file, view, place)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._leave_direct()  # open allowed it, the write does not; or a short write has left an odd rest
                continue
            view, place = view[count:], place + count
        if not self._direct and number % _EARLY == _EARLY - 1:
            os.fdatasync(self._file)

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)
        self._direct = False  # second: whoever reads it must be able to rely on it

    def _settled(self, futures: list[Future[Any]]) -> None:
        try:
            for each in futures:
                each.result()
        except Exception as error:
            self.failed(error)
            raise

    def _drain(self) -> None:
        """Everything that came in is with the kernel."""
        for _, busy in self._buffers:
            self._settled(busy)

    def finish(self) -> None:
        """No more will come: write the odd rest, and flush to disk."""
        if len(self._hashes) * BLOCK < self.size:
            self._drain()
            if self._direct:
                self._leave_direct()
            self._send(self.size % BLOCK)
        self._drain()
        try:
            os.fsync(self._file)
        except OSError as error:
            self.failed(error)
            raise
        self.modified = os.fstat(self._file).st_mtime_ns

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing: `finish` does, once."""

    def fileno(self) -> int:
        """Whoever asks is about to flush the file to disk. It is the last thing torch does with it."""
        self.finish()
        return self._file

    def close(self) -> None:
        if self._open:
            self._open = False
            wait([each for _, busy in self._buffers for each in busy])  # they use the file and the buffers
            self._hashers.shutdown()
            self._writers.shutdown()
            os.close(self._file)

    @property
    def sha256(self) -> str:
        return joined([each.result() for each in self._hashes])


def _create(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """-> file, and whether it is written directly"""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666), bool(_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems without direct writes say
            raise
        return os.open(path, flags, 0o666), False
