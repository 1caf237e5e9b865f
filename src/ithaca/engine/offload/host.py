"""The host store: kept tensors wait in pinned memory of the host.

Copies run on two side streams, one for each direction, so both directions of the link and the computation go on
together. Nothing here makes the CPU wait during a step; all order is events between streams:

    put    the out stream waits for the compute stream, then copies. The source is referenced until the copy is over;
           with many under way the compute stream first waits for the oldest.
    take   the compute stream allocates the destination, the in stream waits for it and copies, the compute stream
           waits for the copy. The destination of the handle put before is started in the same call.

Pinning costs about 0.57 s/GB, so buffers are pinned once and reused for every tensor of the same byte size. torch's
own pinned allocator rounds sizes up to powers of two (5.1 GB would take 8.6), so memory is mapped and registered here.
When sizes change from step to step, idle buffers of other sizes are freed before new ones are made: the pool never
grows beyond the largest amount that was in use at once.

On a CPU device the same store works with plain memory and copies at once; all copy time then counts as exposed.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ...base.holding import module_holds
from ..limits import IN_FLIGHT
from .packing import Layout, Source, pack
from .store import Meter, Store, human_bytes

REMEDY = "use a smaller context, more ranks, or store='disk'"
module_holds(__name__, "kept")


class HostStore(Store):
    kind = "host"

    def __init__(self, device: torch.device):
        super().__init__(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the host store works for cuda and cpu devices, got {self.device}")
        if self.device.type == "cpu":
            self._waits = self._copies  # a plain copy is waited for, always
        self._pool = HostPool(self.device)
        self._out = Lane(self.device, self._copies)
        self._in = Lane(self.device, self._copies)
        self._leaving: deque[_Leaving] = deque()
        # A store that is collected with copies under way: wait for them before its tensors are freed.
        self._finalizer = weakref.finalize(self, _synchronize, self._out, self._in)
        self._finalizer.atexit = False

    @property
    def medium(self) -> str:
        return "pinned memory" if self.device.type == "cuda" else "memory"

    @property
    def held_bytes(self) -> int:
        return self._pool.held_bytes

    @property
    def host_bytes(self) -> int:
        return self.held_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the pool that no live handle uses."""
        with self._lock:
            self._sweep()
            return self._pool.idle_bytes

    def reserve(self, total_bytes: int) -> None:
        available = available_memory() + self.held_bytes
        if total_bytes > available:
            raise ValueError(
                f"the host has {human_bytes(available)} of memory available, this step needs "
                f"{human_bytes(total_bytes)}: {REMEDY}"
            )

    def _keep(self, tensors: list[Tensor]) -> _Entry:
        while len(self._leaving) >= 2 and (
            self._leaving[0].over.query() or sum(leaving.source.nbytes for leaving in self._leaving) > IN_FLIGHT
        ):
            self._retire_oldest()
        packed = [pack(tensor) for tensor in tensors]
        layouts = [layout for layout, _ in packed]
        flats = [flat for _, flat in packed if flat.numel()]
        begin = time.perf_counter()
        buffers = self._pool.get_all([flat.numel() for flat in flats])
        self._setup_seconds += time.perf_counter() - begin
        pairs = [(buffer.bytes, flat) for buffer, flat in zip(buffers, flats, strict=True)]
        left = self._out.copy(pairs, after=[buffer.busy for buffer in buffers])
        for buffer in buffers:
            buffer.busy = left
        entry = _Entry(layouts, buffers, left)
        if left is not None:
            self._leaving.append(_Leaving(entry, Source(flats), left, torch.cuda.current_stream(self.device)))
        self._bytes_out += sum(layout.nbytes for layout in layouts)
        return entry

    def _bring(self, entry: _Entry, following: _Entry | None, *, spend: bool) -> list[Tensor]:
        self._wait_copied(
            entry
        )  # before memory for it is allocated, so that its source, if still held, can be that memory
        while self._leaving and self._leaving[0].over.query():
            self._retire_oldest()
        if entry.arrival is None:
            entry.arrival = self._fetch(entry)
        else:
            self._prefetched += 1
        if following is not None and following.arrival is None:
            following.arrival = self._fetch(following)
        arrival = entry.arrival
        if arrival.over is not None:
            stream = torch.cuda.current_stream(self.device)
            if not arrival.over.query():
                with self._waits.span(stream):
                    stream.wait_event(arrival.over)
            if stream != arrival.stream:  # made on one stream, used on another: the allocator has to know
                for tensor in arrival.tensors:
                    tensor.record_stream(stream)
        if spend:
            self._give_back(entry)
        entry.arrival = None
        self._bytes_in += sum(layout.nbytes for layout in entry.layouts)
        return arrival.tensors

    def _fetch(self, entry: _Entry) -> _Arrival:
        # The destination belongs to the compute stream: the allocator may hand out a block that kernels queued there
        # still use, and the in stream waits for those in copy(). From there on the block is only touched after `over`.
        tensors = [layout.empty(self.device) for layout in entry.layouts]
        flats = [layout.flat(tensor) for layout, tensor in zip(entry.layouts, tensors, strict=True) if layout.nbytes]
        pairs = [(flat, buffer.bytes) for flat, buffer in zip(flats, entry.buffers, strict=True)]
        over = self._in.copy(pairs, after=[entry.left])
        for buffer in entry.buffers:
            buffer.busy = over
        return _Arrival(tensors, over, None if over is None else torch.cuda.current_stream(self.device))

    def _give_back(self, entry: _Entry) -> None:
        for buffer in entry.buffers:
            self._pool.give(buffer)
        entry.buffers = []

    def _wait_copied(self, entry: _Entry) -> None:
        while any(leaving.entry is entry for leaving in self._leaving):
            self._retire_oldest()

    def _retire_oldest(self) -> None:
        """Drop the references to the oldest source. Its memory may be reused on the stream it came from, so that
        stream waits for the copy first; a copy that is over needs no wait."""
        leaving = self._leaving.popleft()
        if not leaving.over.query():
            with self._waits.span(leaving.stream):
                leaving.stream.wait_event(leaving.over)
        leaving.source.check_unchanged()

    def _discard(self, entry: _Entry) -> bool:
        arrival = entry.arrival
        if arrival is not None and arrival.stream is not None and arrival.over is not None:
            arrival.stream.wait_event(arrival.over)  # prefetched, never used: no reuse of its memory before the copy
        self._give_back(entry)
        return True

    def _close(self) -> None:
        self._finalizer()
        self._leaving.clear()
        self._pool.close()


@dataclass
class _Arrival:
    tensors: list[Tensor]
    over: torch.cuda.Event | None  # None: the copy is over
    stream: torch.cuda.Stream | None  # the stream the tensors were made on


@dataclass
class _Entry:
    layouts: list[Layout]
    buffers: list[HostBuffer]  # one for each layout that is not empty
    left: torch.cuda.Event | None
    arrival: _Arrival | None = None


@dataclass
class _Leaving:
    entry: _Entry
    source: Source
    over: torch.cuda.Event
    stream: torch.cuda.Stream


class Lane:
    """A side stream that copies one way. On a CPU device: a plain copy, over when the call returns."""

    def __init__(self, device: torch.device, copies: Meter):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = copies

    def copy(
        self, pairs: list[tuple[Tensor, Tensor]], *, after: Iterable[torch.cuda.Event | None]
    ) -> torch.cuda.Event | None:
        """Queue `to.copy_(from)` for each (to, from), after all work queued on the current stream and after `after`.
        Returns the event that marks the end; None means it is over."""
        if not pairs:
            return None
        if self.stream is None:
            with self._copies.span(None):
                for to, source in pairs:
                    to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream), self._copies.span(self.stream) as over:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return over


def _synchronize(*lanes: Lane) -> None:
    for lane in lanes:
        if lane.stream is not None:
            lane.stream.synchronize()


class HostPool:
    """Host buffers by exact byte size."""

    def __init__(self, device: torch.device):
        self._device = device
        self._all: set[HostBuffer] = set()
        self._idle: deque[HostBuffer] = deque()  # the longest idle first
        self._peak = 0  # most bytes ever in use at once

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._all)

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._idle)

    def get_all(self, sizes: list[int]) -> list[HostBuffer]:
        buffers: list[HostBuffer] = []
        try:
            for nbytes in sizes:
                buffers.append(self._get(nbytes))
        except BaseException:
            self._idle.extend(buffers)
            raise
        return buffers

    def give(self, buffer: HostBuffer) -> None:
        self._idle.append(buffer)

    def close(self) -> None:
        for buffer in self._all:
            buffer.close()
        self._all.clear()
        self._idle.clear()

    def _get(self, nbytes: int) -> HostBuffer:
        in_use = self.held_bytes - self.idle_bytes + nbytes
        self._peak = max(self._peak, in_use)
        for buffer in self._idle:
            if buffer.nbytes == nbytes:
                self._idle.remove(buffer)
                return buffer
        while self._idle and self.held_bytes + nbytes > self._peak:
            oldest = self._idle.popleft()
            self._all.remove(oldest)
            oldest.close()
        buffer = HostBuffer(nbytes, self._device)
        self._all.add(buffer)
        return buffer


class HostBuffer:
    """`nbytes` of page-aligned memory, pinned if the device is a GPU."""

    def __init__(self, nbytes: int, device: torch.device):
        available = available_memory()
        if nbytes > available:
            raise MemoryError(
                f"the host has {human_bytes(available)} of memory available, the next kept tensor needs "
                f"{human_bytes(nbytes)}: {REMEDY}"
            )
        self.nbytes = nbytes
        self.busy: torch.cuda.Event | None = None  # until when a copy uses it
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages: only slower to pin
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._unpin: weakref.finalize | None = None
        if device.type == "cuda":
            # A fork (data loader workers) would copy every pinned page; children have no use for them.
            self.memory.madvise(mmap.MADV_DONTFORK)
            _pin(self.bytes.data_ptr(), nbytes, device)
            # Also without close(): memory must not be unmapped while the driver has it registered.
            self._unpin = weakref.finalize(self, _unpin, self.bytes.data_ptr(), device)
            self._unpin.atexit = False

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
        del self.bytes, self.memory  # the last reference unmaps


def _pin(address: int, nbytes: int, device: torch.device) -> None:
    portable = 1
    with torch.cuda.device(device):
        code = int(_cudart().cudaHostRegister(address, nbytes, portable))
        if code == 0:
            return
        # The failed call stays CUDA's "last error", and the next kernel launch would be blamed: let one take it.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    raise MemoryError(
        f"could not pin {human_bytes(nbytes)} of host memory (cudaHostRegister returned {code}): raise the limit of "
        f"locked memory (ulimit -l unlimited), {REMEDY}"
    )


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()


def available_memory() -> int:
    """Bytes this process can still use: of the host, or of its container where that allows less."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cache = int(dict(line.split() for line in lines)["inactive_file"])  # given up under pressure
        available = min(available, max(0, limit - used + cache))
    return available
