"""A file that is hashed while it is written.

What comes in is copied into buffers of one block (digest.py). A full one is hashed and given to the place's sink (place.py) by
threads while the next is filled, so a save takes as long as the slowest of copying, hashing and the disk. Two things make it fit
beside the rest:

- Blocks are hashed independently, by as many threads as there are cores.
- Copying, hashing and writing all let go of Python's lock, so that training can launch its kernels meanwhile. That is why numpy
  copies: the assignment of a slice of bytes would hold the lock for milliseconds (measured: docs/developer/log.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import sha256
from typing import Any

import numpy as np

from .digest import BLOCK, cores, joined
from .place import Sink

_BUFFERS = 6  # blocks under way; 96 MiB a rank while it writes


class BlockStream:
    """A new file, given to `sink`. Errors go to `failed` as well: torch reports others in their place."""

    def __init__(self, sink: Sink, failed: Callable[[Exception], None]) -> None:
        self.sink, self.failed = sink, failed
        self.size = 0
        self.modified = 0  # nanoseconds; known when closed
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
            memory = mmap.mmap(-1, BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # aligned: direct writes need it
            self._buffers.append((np.frombuffer(memory, np.uint8), []))
            return
        buffer, busy = self._buffers.pop(0)
        self._wait(busy)
        self._buffers.append((buffer, []))

    def _send(self, count: int) -> None:
        buffer, busy = self._buffers[-1]
        number = len(self._hashes)
        view = buffer[:count].data
        self._hashes.append(self._hashers.submit(lambda: sha256(view).digest()))
        busy += [self._hashes[-1], self._writers.submit(self.sink.write, view, number)]

    def _wait(self, futures: list[Future[Any]]) -> None:
        try:
            for future in futures:
                future.result()
        except Exception as error:
            self.failed(error)
            raise

    def _drain(self) -> None:
        """Everything that came in is with the sink."""
        for _, busy in self._buffers:
            self._wait(busy)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing: `close` does, once."""

    def close(self) -> None:
        """No more will come: write the odd rest, and make all of it durable."""
        if not self._open:
            return
        try:
            self._drain()
            if len(self._hashes) * BLOCK < self.size:
                self._send(self.size % BLOCK)
                self._drain()
            self.modified = self._finish()
        finally:
            self.abandon()

    def _finish(self) -> int:
        try:
            return self.sink.finish()
        except OSError as error:
            self.failed(error)
            raise

    def abandon(self) -> None:
        """Let go of a file that will not be finished, or is."""
        if self._open:
            self._open = False
            wait([future for _, busy in self._buffers for future in busy])  # they use the sink and the buffers
            self._hashers.shutdown()
            self._writers.shutdown()
            self.sink.close()

    @property
    def sha256(self) -> str:
        return joined([future.result() for future in self._hashes])
