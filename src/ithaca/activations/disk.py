"""The disk store: kept tensors wait in a scratch file.

At these lengths a layer computes for minutes per 5 GB of input, so even one ordinary disk keeps up and host memory is
no longer the limit. Each put is cut into chunks of 8 MiB; a few threads carry chunks between device and file, each
through one staging buffer of a small ring (pinned on CUDA):

    put    device -> staging -> file       take    file -> staging -> device

A put returns at once. Its tensors are referenced until the last chunk has left the device; with many puts under way the
caller waits until the oldest has left. That wait, and a wait in take, count as exposed: on CUDA the time
the compute stream was idle, not the time the CPU stood still.

Reading a layer's tensors back at the rate of a disk, when its backward begins, would make the GPU wait, and a streamed layer reads
them many times. So while a layer's backward attends, the tensors of the layer below are read into host memory (`ahead`),
from where they go to the device as often as asked for. What lives only within a layer never sees the disk (`brief`).

The file itself is in scratch.py. An error in a thread is kept and raised by the next put or take; the store is of no
use after that.
"""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from ithaca.activations.host import HostBuffer, HostPool, HostStore, available_memory
from ithaca.activations.packing import Layout, Source, pack
from ithaca.activations.scratch import REMEDY, Extents, ScratchFile, round_up
from ithaca.activations.store import IN_FLIGHT, Meter, Store, StoreReport, human_bytes

CHUNK = 8 << 20  # bytes of one write or read
WORKERS = 4
ADDED = ("puts", "takes", "prefetched", "bytes_out", "bytes_in", "copy_seconds", "exposed_seconds", "setup_seconds")


class DiskStore(Store):
    kind = "disk"

    def __init__(self, device: torch.device, scratch: Path | None = None):
        super().__init__(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the disk store works for cuda and cpu devices, got {self.device}")
        self._file = ScratchFile(Path(tempfile.gettempdir() if scratch is None else scratch))
        self._extents = Extents()
        self._pipe = _Pipe(self._file, self.device)
        self._copies = self._pipe.busy
        self._leaving: deque[_Transfer] = deque()
        self._near = HostPool(self.device)
        self._brief: HostStore | None = None

    @property
    def brief(self) -> Store:
        with self._lock:
            if self._brief is None:
                self._brief = HostStore(self.device)
            return self._brief

    def ahead(self, order: int, nbytes: int) -> None:
        with self._lock:
            self._enter()
            if 2 * nbytes > available_memory() + self._near.idle_bytes:
                return  # host memory is short: backward then reads from the disk itself
            for key in reversed([key for key in self._live if key < order]):
                entry: _Entry = self._live[key]
                nbytes -= entry.length
                if nbytes < 0:
                    break
                if entry.copy is None and entry.arrival is None and entry.length:
                    begin = time.perf_counter()
                    (buffer,) = self._near.get_all([entry.length])
                    self._setup_seconds += time.perf_counter() - begin
                    entry.copy = _Copy(buffer, entry.start, entry.write)
                    self._pipe.bring_near(entry.copy)

    def report(self) -> StoreReport:
        """Counts of both media; what is held is the file."""
        own = super().report()
        if self._brief is None:
            return own
        near = self._brief.report()
        return replace(own, **{name: getattr(own, name) + getattr(near, name) for name in ADDED})

    def reset(self) -> None:
        super().reset()
        if self._brief is not None:
            self._brief.reset()

    def __len__(self) -> int:
        return super().__len__() + (0 if self._brief is None else len(self._brief))

    @property
    def medium(self) -> str:
        return f"{self._file.filesystem}, {'direct' if self._file.direct else 'buffered'} I/O"

    @property
    def held_bytes(self) -> int:
        return self._file.size

    @property
    def idle_bytes(self) -> int:
        """Bytes of the file that no live handle uses."""
        with self._lock:
            self._sweep()
            return self._extents.idle_bytes

    def reserve(self, total_bytes: int) -> None:
        more, free = total_bytes - self.held_bytes, self._file.free_bytes()
        if more > free:
            raise ValueError(self._file.too_small(free, more))

    def _keep(self, tensors: list[Tensor]) -> _Entry:
        stream = self._stream()
        while self._leaving:
            oldest = self._leaving[0]
            if not oldest.left.is_set():
                if len(self._leaving) < 2 or sum(each.nbytes for each in self._leaving) <= IN_FLIGHT:
                    break
                with self._waits.span(stream):
                    oldest.left.wait()
                self._raise_failure()
            self._leaving.popleft()
        packed = [pack(tensor) for tensor in tensors]
        layouts = [layout for layout, _ in packed]
        length = sum(round_up(layout.nbytes) for layout in layouts)
        begin = time.perf_counter()
        start, size = self._extents.place(length)
        self._file.grow(size)
        self._extents.claim(start, length)
        self._setup_seconds += time.perf_counter() - begin
        write = _Transfer([flat for _, flat in packed], start, _mark(stream))
        self._pipe.send(write)
        self._leaving.append(write)
        self._bytes_out += sum(layout.nbytes for layout in layouts)
        return _Entry(layouts, start, length, write)

    def _bring(self, entry: _Entry, following: _Entry | None, *, spend: bool) -> list[Tensor]:
        self._settle(entry)  # its source is free before memory for its return is allocated
        if entry.arrival is None:
            entry.arrival = self._fetch(entry)
        else:
            self._prefetched += 1
        if following is not None and following.arrival is None:
            following.arrival = self._fetch(following)
        stream = self._stream()
        arrival = entry.arrival
        read = arrival.read
        if not read.done.is_set():
            with self._waits.span(stream):
                read.done.wait()
        self._raise_failure()
        if stream is not None and stream != arrival.stream:
            for tensor in arrival.tensors:  # made on one stream, used on another: the allocator has to know
                tensor.record_stream(stream)
        if spend:
            self._release(entry)
        entry.arrival = None
        self._bytes_in += sum(layout.nbytes for layout in entry.layouts)
        return arrival.tensors

    def _fetch(self, entry: _Entry) -> _Arrival:
        # Allocated on the compute stream: kernels queued there may still use the block. The threads wait for the mark,
        # set after them, before they write into it, and the transfer references the block until the last write.
        tensors = [layout.empty(self.device) for layout in entry.layouts]
        flats = [layout.flat(tensor) for layout, tensor in zip(entry.layouts, tensors, strict=True)]
        stream = self._stream()
        read = _Transfer(flats, entry.start, _mark(stream), after=entry.write, copy=entry.copy)
        self._pipe.receive(read)
        return _Arrival(tensors, read, stream)

    def _settle(self, entry: _Entry) -> None:
        if not entry.write.left.is_set():
            with self._waits.span(self._stream()):
                entry.write.left.wait()
        self._raise_failure()

    def _discard(self, entry: _Entry) -> bool:
        transfers = [entry.write, entry.copy, None if entry.arrival is None else entry.arrival.read]
        users = [transfer for transfer in transfers if transfer is not None]
        for transfer in users:
            transfer.cancelled = True
        if not all(transfer.done.is_set() for transfer in users):
            return False  # threads still use the extent; a later call tries again
        self._release(entry)
        return True

    def _release(self, entry: _Entry) -> None:
        """Nobody needs these bytes of the file, nor their copy in host memory."""
        self._extents.release(entry.start, entry.length)
        if entry.copy is not None:
            self._near.give(entry.copy.buffer)
            entry.copy = None

    def _raise_failure(self) -> None:
        self._pipe.raise_failure()

    def _close(self) -> None:
        self._pipe.close()
        self._leaving.clear()
        self._near.close()
        if self._brief is not None:
            self._brief.close()
        self._file.close()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


@dataclass
class _Entry:
    layouts: list[Layout]
    start: int
    length: int
    write: _Transfer
    arrival: _Arrival | None = None
    copy: _Copy | None = None  # the same bytes in host memory


@dataclass
class _Arrival:
    tensors: list[Tensor]
    read: _Transfer
    stream: torch.cuda.Stream | None  # the stream the tensors were made on


class _Transfer:
    """The bytes of one put, on their way out or in, chunk by chunk."""

    def __init__(
        self,
        flats: list[Tensor],
        start: int,
        mark: torch.cuda.Event | None,
        after: _Transfer | None = None,
        copy: _Copy | None = None,
    ):
        self.source: Source | None = Source(flats)  # references, until all chunks have been copied
        self.nbytes = self.source.nbytes
        self.mark = mark
        self.after = after
        self.copy = copy
        self.cancelled = False
        self.left = threading.Event()  # no chunk needs the tensors any more
        self.done = threading.Event()  # no chunk needs the file any more
        self.chunks: list[_Chunk] = []
        for index, flat in enumerate(flats):
            for at in range(0, flat.numel(), CHUNK):
                length = min(CHUNK, flat.numel() - at)
                self.chunks.append(_Chunk(index, at, length, start + at))
            start += round_up(flat.numel())
        self._lock = threading.Lock()
        self._copied = self._finished = 0
        if not self.chunks:
            self._leave()
            self.done.set()

    def flat(self, chunk: _Chunk) -> Tensor:
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


class _Copy:
    """An extent of the file on its way into host memory, chunk by chunk."""

    def __init__(self, buffer: HostBuffer, start: int, after: _Transfer):
        self.buffer, self.start, self.after = buffer, start, after
        self.cancelled = False
        self.done = threading.Event()
        self.offsets = range(0, buffer.nbytes, CHUNK)
        self._lock = threading.Lock()
        self._finished = 0

    def view(self, at: int) -> memoryview:
        return memoryview(self.buffer.memory)[at : at + CHUNK]

    def bytes_of(self, chunk: _Chunk) -> Tensor:
        return self.buffer.bytes.narrow(0, chunk.offset - self.start, chunk.length)

    def finished(self) -> None:
        with self._lock:
            self._finished += 1
            last = self._finished == len(self.offsets)
        if last:
            self.done.set()


@dataclass(frozen=True)
class _Chunk:
    tensor: int  # index of the tensor in the put
    at: int  # first byte in the tensor
    length: int
    offset: int  # first byte in the file


@dataclass
class _Failure:
    error: BaseException
    doing: str


class _Pipe:
    """Threads, staging buffers and the first error. Threads never reach the store, so that it can be collected."""

    def __init__(self, file: ScratchFile, device: torch.device):
        self.busy = _Busy()
        self._file = file
        self._failure: _Failure | None = None
        self._ring: SimpleQueue[_Staging] = SimpleQueue()
        for _ in range(WORKERS):
            self._ring.put(_Staging(device))
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="ithaca-disk")
        # threads of their own: a chunk that the computation waits for must not queue behind a layer that is read ahead
        self._ahead = ThreadPoolExecutor(WORKERS, thread_name_prefix="ithaca-disk-ahead")

    def send(self, transfer: _Transfer) -> None:
        for chunk in transfer.chunks:
            self._threads.submit(self._write, transfer, chunk)

    def receive(self, transfer: _Transfer) -> None:
        for chunk in transfer.chunks:
            self._threads.submit(self._read, transfer, chunk)

    def bring_near(self, copy: _Copy) -> None:
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

    def _write(self, transfer: _Transfer, chunk: _Chunk) -> None:
        with self._guard(transfer, f"writing {human_bytes(chunk.length)} to") as staging:
            if staging is None:
                return
            if transfer.mark is not None:
                transfer.mark.synchronize()
            with self.busy.span():
                staging.load(transfer.flat(chunk))
                transfer.copied(out=True)
                self._file.write(staging.view(round_up(chunk.length)), chunk.offset)

    def _read(self, transfer: _Transfer, chunk: _Chunk) -> None:
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

    def _copy(self, copy: _Copy, at: int) -> None:
        try:
            if self._failure is None and not copy.cancelled:
                copy.after.done.wait()
                with self.busy.span():
                    self._file.read(copy.view(at), copy.start + at)
        except BaseException as error:
            if self._failure is None:
                self._failure = _Failure(error, "reading from")
        finally:
            copy.finished()

    @contextmanager
    def _guard(self, transfer: _Transfer, doing: str) -> Iterator[_Staging | None]:
        """A staging buffer, or None if the work is pointless by now; keeps the first error; counts the chunk."""
        staging = self._ring.get()
        try:
            yield None if self._failure is not None or transfer.cancelled else staging
        except BaseException as error:
            if self._failure is None:
                self._failure = _Failure(error, doing)
        finally:
            self._ring.put(staging)
            transfer.finished()


class _Staging:
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


class _Busy(Meter):
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


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """The point `stream` has been asked to reach; a thread that waits for it sleeps instead of spinning."""
    if stream is None:
        return None
    mark = torch.cuda.Event(blocking=True)
    mark.record(stream)
    return mark
