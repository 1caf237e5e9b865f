"""How the bytes of a disk store travel: threads that carry chunks between device and file, through pinned staging buffers.

A `Transfer` is one put or one fetch; a `Copy` an extent of the file that is read ahead into host memory. The threads know nothing
of the store, so that it can be collected while they work.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from ithaca.activations.host import HostBuffer
from ithaca.activations.packing import Source
from ithaca.activations.scratch import REMEDY, ScratchFile, round_up
from ithaca.activations.store import Meter, human_bytes

CHUNK = 8 << 20  # bytes of one write or read
WORKERS = 4


class Transfer:
    """The bytes of one put, on their way out or in, chunk by chunk."""

    def __init__(
        self,
        flats: list[Tensor],
        start: int,
        mark: torch.cuda.Event | None,
        after: Transfer | None = None,
        copy: Copy | None = None,
    ):
        self.source: Source | None = Source(flats)  # references, until all chunks have been copied
        self.nbytes = self.source.nbytes
        self.mark = mark
        self.after = after
        self.copy = copy
        self.cancelled = False
        self.left = threading.Event()  # no chunk needs the tensors any more
        self.done = threading.Event()  # no chunk needs the file any more
        self.chunks: list[Chunk] = []
        for index, flat in enumerate(flats):
            for at in range(0, flat.numel(), CHUNK):
                length = min(CHUNK, flat.numel() - at)
                self.chunks.append(Chunk(index, at, length, start + at))
            start += round_up(flat.numel())
        self._lock = threading.Lock()
        self._copied = self._finished = 0
        if not self.chunks:
            self._leave()
            self.done.set()

    def flat(self, chunk: Chunk) -> Tensor:
        assert self.source is not None
        return self.source.tensors[chunk.tensor].narrow(0, chunk.at, chunk.length)

    def copied(self, *, out: bool) -> None:
        with self._lock:
            self._copied += 1
            last = self._copied == len(self.chunks)
        if last:
            try:
                if out and self.source is not None:
                    self.source.check_unchanged()
            finally:
                self._leave()

    def finished(self) -> None:
        with self._lock:
            self._finished += 1
            last = self._finished == len(self.chunks)
        if last:
            self._leave()
            self.done.set()

    def _leave(self) -> None:
        self.source = None  # free the tensors before anyone who waits for that goes on
        self.left.set()


class Copy:
    """An extent of the file on its way into host memory, chunk by chunk."""

    def __init__(self, buffer: HostBuffer, start: int, after: Transfer):
        self.buffer, self.start, self.after = buffer, start, after
        self.cancelled = False
        self.done = threading.Event()
        self.offsets = range(0, buffer.nbytes, CHUNK)
        self._lock = threading.Lock()
        self._finished = 0

    def view(self, at: int) -> memoryview:
        return memoryview(self.buffer.memory)[at : at + CHUNK]

    def bytes_of(self, chunk: Chunk) -> Tensor:
        return self.buffer.bytes.narrow(0, chunk.offset - self.start, chunk.length)

    def finished(self) -> None:
        with self._lock:
            self._finished += 1
            last = self._finished == len(self.offsets)
        if last:
            self.done.set()


@dataclass(frozen=True)
class Chunk:
    tensor: int  # index of the tensor in the put
    at: int  # first byte in the tensor
    length: int
    offset: int  # first byte in the file


@dataclass
class Failure:
    error: BaseException
    doing: str


class Pipe:
    """Threads, staging buffers and the first error. Threads never reach the store, so that it can be collected."""

    def __init__(self, file: ScratchFile, device: torch.device):
        self.busy = Busy()
        self._file = file
        self._failure: Failure | None = None
        self._ring: SimpleQueue[Staging] = SimpleQueue()
        for _ in range(WORKERS):
            self._ring.put(Staging(device))
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="ithaca-disk")
        # threads of their own: a chunk that the computation waits for must not queue behind a layer that is read ahead
        self._ahead = ThreadPoolExecutor(WORKERS, thread_name_prefix="ithaca-disk-ahead")

    def send(self, transfer: Transfer) -> None:
        for chunk in transfer.chunks:
            self._threads.submit(self._write, transfer, chunk)

    def receive(self, transfer: Transfer) -> None:
        for chunk in transfer.chunks:
            self._threads.submit(self._read, transfer, chunk)

    def bring_near(self, copy: Copy) -> None:
        for at in copy.offsets:
            self._ahead.submit(self._copy, copy, at)

    def raise_failure(self) -> None:
        if self._failure is None:
            return
        error, doing = self._failure.error, self._failure.doing
        if isinstance(error, OSError):
            first = "free space" if error.errno == errno.ENOSPC else "check the disk"
            message = f"{doing} {self._file} failed ({error.strerror or error}): {first}, {REMEDY}"
            raise OSError(error.errno, message) from error
        raise RuntimeError(f"{doing} {self._file} failed: {error}") from error

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._ring.empty():
            self._ring.get().close()

    def _write(self, transfer: Transfer, chunk: Chunk) -> None:
        with self._guard(transfer, f"writing {human_bytes(chunk.length)} to") as staging:
            if staging is None:
                return
            if transfer.mark is not None:
                transfer.mark.synchronize()
            with self.busy.span():
                staging.load(transfer.flat(chunk))
                transfer.copied(out=True)
                self._file.write(staging.view(round_up(chunk.length)), chunk.offset)

    def _read(self, transfer: Transfer, chunk: Chunk) -> None:
        with self._guard(transfer, f"reading {human_bytes(chunk.length)} from") as staging:
            if staging is None:
                return
            if transfer.after is not None:
                transfer.after.done.wait()  # its chunks came first, so other threads have them: this ends
            if transfer.mark is not None:
                transfer.mark.synchronize()
            if transfer.copy is not None:
                transfer.copy.done.wait()
                if self._failure is not None:
                    return
            with self.busy.span():
                if transfer.copy is not None:
                    staging.copy(transfer.flat(chunk), transfer.copy.bytes_of(chunk))
                else:
                    self._file.read(staging.view(round_up(chunk.length)), chunk.offset)
                    staging.unload(transfer.flat(chunk))
                transfer.copied(out=False)

    def _copy(self, copy: Copy, at: int) -> None:
        try:
            if self._failure is None and not copy.cancelled:
                copy.after.done.wait()
                with self.busy.span():
                    self._file.read(copy.view(at), copy.start + at)
        except BaseException as error:
            if self._failure is None:
                self._failure = Failure(error, "reading from")
        finally:
            copy.finished()

    @contextmanager
    def _guard(self, transfer: Transfer, doing: str) -> Iterator[Staging | None]:
        """A staging buffer, or None if the work is pointless by now; keeps the first error; counts the chunk."""
        staging = self._ring.get()
        try:
            yield None if self._failure is not None or transfer.cancelled else staging
        except BaseException as error:
            if self._failure is None:
                self._failure = Failure(error, doing)
        finally:
            self._ring.put(staging)
            transfer.finished()


class Staging:
    """One chunk of host memory between device and file. On CUDA each has a stream of its own."""

    def __init__(self, device: torch.device):
        self._buffer = HostBuffer(CHUNK, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self, flat: Tensor) -> None:
        self.copy(self._buffer.bytes[: flat.numel()], flat)

    def unload(self, flat: Tensor) -> None:
        self.copy(flat, self._buffer.bytes[: flat.numel()])

    def view(self, length: int) -> memoryview:
        return memoryview(self._buffer.memory)[:length]

    def close(self) -> None:
        self._buffer.close()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Over when it returns: what follows may free the device memory or hand the chunk to the file."""
        if self._stream is None:
            to.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Busy(Meter):
    """Seconds in which at least one thread was at work."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._active = 0
        self.reset()

    def reset(self) -> None:
        with self._guard:
            super().reset()
            self._since = time.perf_counter()

    @contextmanager
    def span(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        with self._guard:
            if self._active == 0:
                self._since = time.perf_counter()
            self._active += 1
        try:
            yield
        finally:
            with self._guard:
                self._active -= 1
                if self._active == 0:
                    self._seconds += time.perf_counter() - self._since

    def total(self) -> float:
        with self._guard:
            return self._seconds + (time.perf_counter() - self._since if self._active else 0.0)


def mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """The point `stream` has been asked to reach; a thread that waits for it sleeps instead of spinning."""
    if stream is None:
        return None
    mark = torch.cuda.Event(blocking=True)
    mark.record(stream)
    return mark
