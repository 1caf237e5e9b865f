"""What the threads of a disk store carry, in chunks of 8 MiB.

A `Transfer` is one put or one fetch: between the tensors on the device and the file, or host memory. A `Copy` is the bytes
of one put in host memory, on their way to the file or from it. Both can be cancelled: chunks that no thread has begun are then
left alone, and the memory and the extent are free as soon as no thread is at work on them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from .host import HostBuffer
from .packing import Source
from .scratch import round_up

CHUNK = 8 << 20  # bytes of one write or read


class Work:
    """Counts the chunks of one job, from any thread."""

    def __init__(self, chunks: int, after: threading.Event | None, mark: torch.cuda.Event | None = None):
        self.done = threading.Event()  # no thread needs the bytes any more
        self._after, self._mark = after, mark
        self._lock = threading.Lock()
        self._open, self._active, self._cancelled = chunks, 0, False
        if not chunks:
            self._finish()

    def wait(self) -> None:
        """Until the bytes are there. Comes before `begin`: who only waits does not hold up a cancelled job."""
        if self._after is not None:
            self._after.wait()
        if self._mark is not None:
            self._mark.synchronize()

    def begin(self) -> bool:
        """A thread turns to a chunk; False if nobody wants it any more."""
        with self._lock:
            if self._cancelled:
                return False
            self._active += 1
            return True

    def end(self, begun: bool) -> None:
        with self._lock:
            self._active -= begun
            self._open -= 1
            over = self._active == 0 and (self._cancelled or self._open == 0)
        if over:
            self._finish()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            over = self._active == 0
        if over:
            self._finish()

    def _finish(self) -> None:
        self.done.set()


class Transfer(Work):
    """The tensors of one put, on their way out or in."""

    def __init__(
        self, flats: list[Tensor], start: int, mark: torch.cuda.Event | None, after: threading.Event | None = None
    ):
        self.source: Source | None = Source(flats)  # references, until all chunks have been copied
        self.nbytes = self.source.nbytes
        self.left = threading.Event()  # no chunk needs the tensors any more
        self.chunks = _cut(flats, start)
        self._copied = 0
        super().__init__(len(self.chunks), after, mark)

    def flat(self, chunk: Chunk) -> Tensor:
        assert self.source is not None
        return self.source.tensors[chunk.tensor].narrow(0, chunk.at, chunk.length)

    def copied(self, *, out: bool) -> None:
        with self._lock:
            self._copied += 1
            last = self._copied == len(self.chunks)
        if last:
            if out and self.source is not None:
                self.source.check_unchanged()
            self._leave()

    def _finish(self) -> None:
        self._leave()
        super()._finish()

    def _leave(self) -> None:
        self.source = None  # free the tensors before anyone who waits for that goes on
        self.left.set()


class Copy(Work):
    """The bytes of one put in host memory, one buffer for each chunk of its extent; a short one may begin within its buffer.

    saving: `write` fills it, then it goes to the file; else it is read from the file once `write` has filled that.
    """

    def __init__(
        self,
        buffers: list[HostBuffer],
        skipped: int,
        order: int,
        start: int,
        length: int,
        write: Transfer,
        *,
        saving: bool,
    ):
        self.buffers = buffers  # none: they went to a newer put
        self._skipped = skipped  # bytes of the buffer that are another's
        self.order, self.start, self.length = order, start, length
        self.offsets = range(0, length, CHUNK)
        self.writer = write
        self.reader: Transfer | None = None
        super().__init__(len(self.offsets), after=write.done)
        self.ready = write.done if saving else self.done  # the memory holds the bytes

    @property
    def spare(self) -> bool:
        """The file has the bytes too, or nobody wants them, and no thread is filling or reading this memory: a cancelled copy is
        over at once, while the thread of its put may still be at a chunk of it."""
        return all(work is None or work.done.is_set() for work in (self, self.writer, self.reader))

    def size(self, at: int) -> int:
        return min(CHUNK, self.length - at)

    def view(self, at: int) -> memoryview:
        return memoryview(self.buffers[at // CHUNK].memory)[self._skipped : self._skipped + self.size(at)]

    def bytes_of(self, chunk: Chunk) -> Tensor:
        at = chunk.offset - self.start
        return self.buffers[at // CHUNK].bytes.narrow(0, self._skipped + at % CHUNK, chunk.length)


@dataclass(frozen=True)
class Chunk:
    tensor: int  # index of the tensor in the put
    at: int  # first byte in the tensor
    length: int
    offset: int  # first byte in the file


def _cut(flats: list[Tensor], start: int) -> list[Chunk]:
    """Chunks that end where a CHUNK of the extent ends, so that each lies in one buffer of a Copy."""
    chunks, first = [], start
    for index, flat in enumerate(flats):
        at = 0
        while at < flat.numel():
            offset = start + at
            length = min(CHUNK - (offset - first) % CHUNK, flat.numel() - at)
            chunks.append(Chunk(index, at, length, offset))
            at += length
        start += round_up(flat.numel())
    return chunks
