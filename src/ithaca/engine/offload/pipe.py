"""How the bytes of a disk store travel: threads that carry chunks between device, host memory and file.

Each way has threads of its own, so that what the computation waits for does not queue behind what only the disk waits for. The
threads know nothing of the store, so that it can be collected while they work; what they carry is in transfer.py.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from . import transfer
from .host import HostBuffer
from .scratch import REMEDY, ScratchFile, round_up
from .store import Meter, human_bytes
from .transfer import Chunk, Copy, Transfer, Work

WORKERS = 4  # threads for each way


@dataclass
class Failure:
    error: BaseException
    doing: str


class Pipe:
    """Threads, staging buffers and the first error."""

    def __init__(self, file: ScratchFile, device: torch.device):
        self.busy = Busy()
        self._file = file
        self._failure: Failure | None = None
        self._stopped = False
        self._ring: SimpleQueue[Staging] = SimpleQueue()
        for _ in range(2 * WORKERS):  # one for each thread that uses them: none waits for another
            self._ring.put(Staging(device))
        self._cache = _threads("ithaca-disk")  # what the computation waits for: device <-> host memory, file -> device
        self._through = _threads("ithaca-disk-through")  # device -> file
        self._saving = _threads("ithaca-disk-save")  # host memory -> file
        self._ahead = _threads("ithaca-disk-ahead")  # file -> host memory

    def send(self, write: Transfer, cached: Copy | None) -> None:
        """Device to file: by way of `cached`, which stays, or else of staging buffers."""
        for chunk in write.chunks:
            doing = f"writing {human_bytes(chunk.length)} to"
            if cached is None:
                self._through.submit(self._run, doing, write, self._write, chunk)
            else:
                self._cache.submit(self._run, doing, write, self._copy_out, chunk, cached)
        if cached is not None:
            for at in cached.offsets:
                doing = f"writing {human_bytes(cached.size(at))} to"
                self._saving.submit(self._run, doing, cached, self._save, at)

    def receive(self, read: Transfer, cached: Copy | None) -> None:
        """To the device: from `cached`, or else from the file."""
        for chunk in read.chunks:
            doing = f"reading {human_bytes(chunk.length)} from"
            if cached is None:
                self._cache.submit(self._run, doing, read, self._read, chunk)
            else:
                self._cache.submit(self._run, doing, read, self._copy_in, chunk, cached)

    def bring_near(self, copy: Copy) -> None:
        for at in copy.offsets:
            self._ahead.submit(self._run, "reading from", copy, self._load, at)

    def raise_failure(self) -> None:
        if self._failure is None:
            return
        error, doing = self._failure.error, self._failure.doing
        if isinstance(error, OSError):
            first = "free space" if error.errno == errno.ENOSPC else "check the disk"
            message = f"{doing} {self._file} failed ({error.strerror or error}): {first}, {REMEDY}"
            raise OSError(error.errno, message) from error
        raise RuntimeError(f"{doing} {self._file} failed: {error}") from error

    def stop(self) -> None:
        """Nobody will ask for these bytes: what has not begun is left alone. Locks nothing, so a finalizer may call it."""
        self._stopped = True

    def close(self) -> None:
        self.stop()
        # Nothing is cancelled: every chunk is counted, so no thread waits for one that never comes.
        for threads in (self._cache, self._through, self._saving, self._ahead):
            threads.shutdown(wait=True)
        while not self._ring.empty():
            self._ring.get().close()

    def _run(self, doing: str, work: Work, task: Callable[..., None], *args: Any) -> None:
        """One chunk, in a thread. Keeps the first error; after it, nothing is carried any more."""
        begun = False
        try:
            work.wait()
            begun = work.begin()
            if begun and self._failure is None and not self._stopped:
                with self.busy.span():
                    task(work, *args)
        except BaseException as error:
            if self._failure is None:
                self._failure = Failure(error, doing)
        finally:
            work.end(begun)

    def _write(self, write: Transfer, chunk: Chunk) -> None:
        with self._staging() as staging:
            staging.load(write.flat(chunk))
            write.copied(out=True)
            self._file.write(staging.view(round_up(chunk.length)), chunk.offset)

    def _read(self, read: Transfer, chunk: Chunk) -> None:
        with self._staging() as staging:
            self._file.read(staging.view(round_up(chunk.length)), chunk.offset)
            staging.unload(read.flat(chunk))
        read.copied(out=False)

    def _copy_out(self, write: Transfer, chunk: Chunk, cached: Copy) -> None:
        with self._staging() as staging:
            staging.copy(cached.bytes_of(chunk), write.flat(chunk))
        write.copied(out=True)

    def _copy_in(self, read: Transfer, chunk: Chunk, cached: Copy) -> None:
        with self._staging() as staging:
            staging.copy(read.flat(chunk), cached.bytes_of(chunk))
        read.copied(out=False)

    def _save(self, copy: Copy, at: int) -> None:
        self._file.write(copy.view(at), copy.start + at)

    def _load(self, copy: Copy, at: int) -> None:
        self._file.read(copy.view(at), copy.start + at)

    @contextmanager
    def _staging(self) -> Iterator[Staging]:
        staging = self._ring.get()
        try:
            yield staging
        finally:
            self._ring.put(staging)


def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix=name)


class Staging:
    """One chunk of host memory between device and file. On CUDA each has a stream of its own."""

    def __init__(self, device: torch.device):
        self._buffer = HostBuffer(transfer.CHUNK, device)
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
