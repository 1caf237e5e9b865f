"""The disk store: kept tensors wait in a scratch file, and those put last in host memory as well.

At these lengths a layer computes for minutes per 5 GB of input, so even one ordinary disk keeps up and host memory is
no longer the limit. Each put is cut into chunks of 8 MiB, and threads carry the chunks:

    put    device -> host memory -> file       take    host memory -> device
           device -> staging -> file                   file -> staging -> device

Backward asks for the newest puts first, and would have to wait until the disk had written them and read them again. So a put
goes to host memory (pinned on CUDA) and from there to the file, and stays in memory until newer puts need the room: what
backward asks for first comes back without the disk. A put that finds no room goes through a small ring of staging
buffers. host_cache.py says how much memory that is and what gives way.

A put returns at once. Its tensors are referenced until the last chunk has left the device; with many puts under way the
caller waits until the oldest has left. That wait, and a wait in take, count as exposed: on CUDA the time
the compute stream was idle, not the time the CPU stood still. A put that is taken before the file has it is not written on.

Reading a layer's tensors back at the rate of a disk, when its backward begins, would make the GPU wait, and a streamed layer reads
them many times. So while a layer's backward attends, the tensors of the layer below are read into host memory (`prefetch`),
from where they go to the device as often as asked for. What lives only within a layer never sees the disk (`scratch_store`).

The threads are in pipe.py, what they carry in transfer.py, the file itself in scratch.py. An error in a thread is kept and
raised by the next put or take; the store is of no use after that.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...base.holding import module_holds
from ..limits import IN_FLIGHT
from .host import HostStore
from .host_cache import HostCache
from .packing import Layout, pack
from .pipe import Pipe, mark
from .scratch import Extents, ScratchFile, round_up
from .store import Store, StoreReport
from .transfer import Copy, Transfer, Work

ADDED = ("puts", "takes", "prefetched", "bytes_out", "bytes_in", "copy_seconds", "exposed_seconds", "setup_seconds")
module_holds(__name__, "kept")


class DiskStore(Store):
    kind = "disk"

    def __init__(self, device: torch.device, scratch: Path | None = None):
        super().__init__(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the disk store works for cuda and cpu devices, got {self.device}")
        self._file = ScratchFile(Path(tempfile.gettempdir() if scratch is None else scratch))
        self._extents = Extents()
        self._pipe = Pipe(self._file, self.device)
        self._copies = self._pipe.busy
        self._leaving: deque[Transfer] = deque()
        self._cache = HostCache(self.device)
        self._order = itertools.count()
        self._stop = weakref.finalize(self, self._pipe.stop)  # collected: nobody needs the file any more
        self._stop.atexit = False
        self._scratch_store: HostStore | None = None

    @property
    def scratch_store(self) -> Store:
        with self._lock:
            if self._scratch_store is None:
                self._scratch_store = HostStore(self.device)
            return self._scratch_store

    def prefetch(self, order: int, nbytes: int) -> None:
        with self._lock:
            self._enter()
            wanted: list[_Entry] = []
            for key in reversed([key for key in self._live if key < order]):
                entry: _Entry = self._live[key]
                nbytes -= entry.length
                if nbytes < 0:
                    break
                if entry.cached is None and entry.arrival is None and entry.length:
                    wanted.append(entry)
            if not wanted or not self._cache.affords([entry.length for entry in wanted], wanted[-1].order):
                return  # host memory is short: backward then reads from the disk itself
            for entry in wanted:
                begin = time.perf_counter()
                copy = self._cache.fetch(entry.order, entry.start, entry.length, entry.write)
                self._setup_seconds += time.perf_counter() - begin
                if copy is None:
                    return
                entry.copy = copy
                self._pipe.bring_near(copy)

    def report(self) -> StoreReport:
        """Counts of both media; what is held is the file."""
        own = super().report()
        if self._scratch_store is None:
            return own
        scratch = self._scratch_store.report()
        return replace(own, **{name: getattr(own, name) + getattr(scratch, name) for name in ADDED})

    def reset(self) -> None:
        super().reset()
        if self._scratch_store is not None:
            self._scratch_store.reset()

    def __len__(self) -> int:
        return super().__len__() + (0 if self._scratch_store is None else len(self._scratch_store))

    @property
    def medium(self) -> str:
        return f"{self._file.filesystem}, {'direct' if self._file.direct else 'buffered'} I/O"

    @property
    def held_bytes(self) -> int:
        return self._file.size

    @property
    def host_bytes(self) -> int:
        scratch = 0 if self._scratch_store is None else self._scratch_store.held_bytes
        return self._cache.held_bytes + scratch

    @property
    def idle_bytes(self) -> int:
        """Bytes of the file that no live handle uses."""
        with self._lock:
            self._drain()
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
                if len(self._leaving) < 2 or sum(transfer.nbytes for transfer in self._leaving) <= IN_FLIGHT:
                    break
                with self._waits.span(stream):
                    oldest.left.wait()
                self._raise_failure()
            self._leaving.popleft()
        packed = [pack(tensor) for tensor in tensors]
        layouts = [layout for layout, _ in packed]
        length = sum(round_up(layout.nbytes) for layout in layouts)
        order, start = next(self._order), self._place(length)
        write = Transfer([flat for _, flat in packed], start, mark(stream))
        begin = time.perf_counter()
        copy = self._cache.keep(order, start, length, write) if length else None
        self._setup_seconds += time.perf_counter() - begin
        self._pipe.send(write, copy)
        self._leaving.append(write)
        self._bytes_out += sum(layout.nbytes for layout in layouts)
        return _Entry(order, layouts, start, length, write, copy)

    def _place(self, length: int) -> int:
        """Where in the file `length` bytes go."""
        start, size = self._extents.place(length)
        if size > self._file.size and self._lingering:  # rather wait for a last chunk than make the file larger
            with self._waits.span(self._stream()):
                self._drain()
            start, size = self._extents.place(length)
        begin = time.perf_counter()
        self._file.grow(size)
        self._setup_seconds += time.perf_counter() - begin
        self._extents.claim(start, length)
        return start

    def _bring(self, entry: _Entry, following: _Entry | None, *, spend: bool) -> list[Tensor]:
        self._wait_copied(entry)  # its source is free before memory for its return is allocated
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
        entry.arrival = None
        if spend and not self._discard(entry):
            self._lingering.append(entry)
        self._bytes_in += sum(layout.nbytes for layout in entry.layouts)
        return arrival.tensors

    def _fetch(self, entry: _Entry) -> _Arrival:
        # Allocated on the compute stream: kernels queued there may still use the block. The threads wait for the mark,
        # set after them, before they write into it, and the transfer references the block until the last write.
        tensors = [layout.empty(self.device) for layout in entry.layouts]
        flats = [layout.flat(tensor) for layout, tensor in zip(entry.layouts, tensors, strict=True)]
        stream = self._stream()
        cached = entry.cached
        read = Transfer(flats, entry.start, mark(stream), after=entry.write.done if cached is None else cached.ready)
        if cached is not None:
            cached.reader = read
        self._pipe.receive(read, cached)
        return _Arrival(tensors, read, stream)

    def _wait_copied(self, entry: _Entry) -> None:
        if not entry.write.left.is_set():
            with self._waits.span(self._stream()):
                entry.write.left.wait()
        self._raise_failure()

    def _discard(self, entry: _Entry) -> bool:
        for work in entry.works():
            work.cancel()
        if not all(work.done.is_set() for work in entry.works()):
            return False  # a thread is at a chunk of the extent; a later call tries again
        self._extents.release(entry.start, entry.length)
        if entry.copy is not None:
            self._cache.give(entry.copy)
        return True

    def _drain(self) -> None:
        """Free all that was taken or dropped: its work is cancelled, so only chunks that threads are at have to end."""
        self._sweep()
        for entry in self._lingering:
            for work in entry.works():
                work.done.wait()
        self._sweep()

    def _raise_failure(self) -> None:
        self._pipe.raise_failure()

    def _close(self) -> None:
        self._stop.detach()
        self._pipe.close()
        self._leaving.clear()
        self._cache.close()
        if self._scratch_store is not None:
            self._scratch_store.close()
        self._file.close()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


@dataclass
class _Entry:
    order: int  # grows from put to put
    layouts: list[Layout]
    start: int
    length: int
    write: Transfer  # to host memory where `copy` has room for it, else to the file
    copy: Copy | None  # the same bytes in host memory, on their way to the file or from it
    arrival: _Arrival | None = None

    @property
    def cached(self) -> Copy | None:
        """The copy, unless its memory went to a newer put."""
        return self.copy if self.copy is not None and self.copy.buffers else None

    def works(self) -> list[Work]:
        works = [self.write, self.copy, None if self.arrival is None else self.arrival.read]
        return [work for work in works if work is not None]


@dataclass
class _Arrival:
    tensors: list[Tensor]
    read: Transfer
    stream: torch.cuda.Stream | None  # the stream the tensors were made on
