"""Where the tensors a layer keeps for backward wait until backward asks for them.

A checkpointed layer keeps its input, and optionally the attention output and log-sum-exp. At millions of tokens these
are gigabytes per layer and do not fit the GPU. A store takes them in forward and gives them back in backward:

    handle  = store.put([x, out, lse])   # forward; returns at once, the copy runs beside the computation
    tensors = store.take(handle)         # backward; the same bits on the device, the handle is spent

Three kinds, one interface:

    gpu    holds references, copies nothing
    host   pinned memory of exactly the kept size, owned by the store and reused every step    (host.py)
    disk   one unnamed scratch file, written and read by threads; the newest in pinned memory too  (disk.py)

Backward asks for handles in the reverse of put order, so taking one starts the copy of the handle put just before it:
one put is on its way while another is used. Device memory beyond the caller's own: at most two puts on their way out, or as
many as make IN_FLIGHT bytes, and one on its way in.

Rules for the caller. Tensors are put on the stream they were made on. A kept tensor must not be written in place while
its copy runs; `wait_copied(handle)` orders later writes after the copy. A write that came too early raises, where torch's
version counter shows it. Taken tensors of the gpu store are the caller's own: read them, do not write them.

A handle that is dropped without being taken (a graph that never saw backward) gives its memory back.

Not supported: sparse or quantised tensors, tensors of another device than the store's, taking a handle twice.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...base.holding import module_holds
from ...base.units import format_bytes as human_bytes
from .packing import Source

StoreKind = Literal["gpu", "host", "disk"]
module_holds(__name__, "kept")


@dataclass(frozen=True)
class StoreReport:
    """What a store did since the last `reset()`."""

    kind: str
    medium: str  # what the bytes lie in: "pinned memory", "ext4, direct I/O", ...
    puts: int
    takes: int
    prefetched: int  # takes whose copy had been started before they were asked for
    bytes_out: int  # copied away from the device
    bytes_in: int  # copied back
    copy_seconds: float  # time the copies ran
    exposed_seconds: float  # part of it the computation waited for
    setup_seconds: float  # making and pinning buffers, growing the file: first step only
    held_bytes: int  # memory or disk the store owns now, used or idle

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.copy_seconds - self.exposed_seconds)

    def __str__(self) -> str:
        return (
            f"{self.kind} store ({self.medium}): {self.puts} puts, {self.takes} takes ({self.prefetched} prefetched), "
            f"{human_bytes(self.bytes_out)} out, {human_bytes(self.bytes_in)} in, "
            f"copies {self.copy_seconds:.3f} s of which {self.exposed_seconds:.3f} s waited for, "
            f"holds {human_bytes(self.held_bytes)}"
        )


class Handle:
    """A ticket for the tensors of one put. It can be taken once; dropping it gives the memory back."""

    __slots__ = ("__weakref__", "_finalizer", "_key", "_store", "nbytes")

    def __init__(self, store: Store, key: int, nbytes: int, forget: Callable[[int], object]):
        self._store = weakref.ref(store)
        self._key = key
        self.nbytes = nbytes
        # `forget` must not lock or reach the store: the collector may run it anywhere, even inside put().
        self._finalizer = weakref.finalize(self, forget, key)
        self._finalizer.atexit = False

    @property
    def order(self) -> int:
        """Grows from put to put."""
        return self._key

    @property
    def store(self) -> Store:
        store = self._store()
        if store is None:
            raise RuntimeError("the store of this handle is gone")
        return store


class Store(ABC):
    """Handles, order and counts; a kind of store adds how bytes leave and come back.

    Forward runs in the main thread and backward in autograd's, so every public method takes the lock.
    """

    kind: str

    def __init__(self, device: torch.device):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._lock = threading.RLock()
        self._closed = False
        self._keys = itertools.count()
        self._live: dict[int, Any] = {}  # key -> entry, in put order
        self._dropped: deque[int] = deque()  # keys of collected handles, swept by the next call
        self._lingering: list[Any] = []  # entries of dropped handles that are not free yet
        self._forget: Callable[[int], object] = self._dropped.append
        self._copies = Meter()
        self._waits = Meter()
        self._setup_seconds = 0.0
        self._zero()

    def put(self, tensors: Sequence[Tensor]) -> Handle:
        """Keep `tensors` until they are taken. Returns before they are copied."""
        kept = [self._checked(tensor) for tensor in tensors]
        with self._lock:
            self._enter()
            entry = self._keep(kept)
            handle = Handle(self, next(self._keys), sum(tensor.nbytes for tensor in kept), self._forget)
            self._live[handle._key] = entry
            self._puts += 1
            return handle

    def take(self, handle: Handle) -> list[Tensor]:
        """The tensors of `handle`, ready for use on the current stream. Starts to fetch the handle put before it."""
        with self._lock:
            self._enter()
            entry = self._entry(handle)
            del self._live[handle._key]
            handle._finalizer.detach()
            before = next((key for key in reversed(list(self._live)) if key < handle._key), None)
            tensors = self._bring(entry, None if before is None else self._live.get(before), spend=True)
            self._takes += 1
            return tensors

    def peek(self, handle: Handle, then: Handle | None = None) -> list[Tensor]:
        """Like take, but the handle stays: for tensors that are needed several times, a piece at a time. Starts to fetch
        `then`, the handle that will be read next."""
        with self._lock:
            self._enter()
            entry = self._entry(handle)
            following = None if then is None or then is handle else self._entry(then)
            return self._bring(entry, following, spend=False)

    @property
    def scratch_store(self) -> Store:
        """Where tensors go that are needed again before their layer ends: a slow medium has a faster one for them."""
        return self

    def prefetch(self, order: int, nbytes: int) -> None:
        """Backward will soon ask for what was put before the handle of this `order`, newest first: a slow medium starts to
        bring up to `nbytes` of it near."""
        return None

    def wait_copied(self, handle: Handle) -> None:
        """Make the current stream wait until `handle` has left the device: its tensors may be overwritten then."""
        with self._lock:
            self._enter()
            self._wait_copied(self._entry(handle))

    def flush(self) -> None:
        """Settle all that was put, so that nothing on its way out is held on the device: for a caller who puts no more for long.
        Otherwise the next puts push it out."""
        with self._lock:
            self._enter()
            for entry in list(self._live.values()):
                self._wait_copied(entry)

    def reserve(self, total_bytes: int) -> None:
        """Check that a step which keeps `total_bytes` at once can work here; raise ValueError if not.
        Ranks that share a host or a disk share what is free: pass the bytes of all of them."""
        return None

    def report(self) -> StoreReport:
        """Counts and times since the last reset. Waits for copies under way: call it between steps."""
        with self._lock:
            self._drain()
            return StoreReport(
                kind=self.kind,
                medium=self.medium,
                puts=self._puts,
                takes=self._takes,
                prefetched=self._prefetched,
                bytes_out=self._bytes_out,
                bytes_in=self._bytes_in,
                copy_seconds=self._copies.total(),
                exposed_seconds=self._waits.total(),
                setup_seconds=self._setup_seconds,
                held_bytes=self.held_bytes,
            )

    def reset(self) -> None:
        """Start the counts and times of `report` again, once copies under way have ended. Kept tensors and buffers stay."""
        with self._lock:
            self._drain()
            self._zero()

    def close(self) -> None:
        """Give all memory and files back. Handles not taken are lost."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()
                self._live.clear()
                self._dropped.clear()
                self._lingering.clear()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Handles that are neither taken nor dropped."""
        with self._lock:
            self._sweep()
            return len(self._live)

    @property
    @abstractmethod
    def medium(self) -> str: ...

    @property
    @abstractmethod
    def held_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int:
        """Of host memory that it owns now, used or idle."""
        return 0

    @abstractmethod
    def _keep(self, tensors: list[Tensor]) -> Any:
        """Start the way out; returns the entry."""

    @abstractmethod
    def _bring(self, entry: Any, following: Any | None, *, spend: bool) -> list[Tensor]:
        """Return the tensors of `entry`, and start to fetch those of `following`. spend: `entry` is not needed again."""

    @abstractmethod
    def _wait_copied(self, entry: Any) -> None: ...

    def _discard(self, entry: Any) -> bool:
        """Free an entry whose handle was dropped; False if that must wait."""
        return True

    def _raise_failure(self) -> None:
        """Raise what went wrong in a thread of the store."""
        return None

    @abstractmethod
    def _close(self) -> None: ...

    def _zero(self) -> None:
        self._puts = self._takes = self._prefetched = self._bytes_out = self._bytes_in = 0
        self._setup_seconds = 0.0
        self._copies.reset()
        self._waits.reset()

    def _enter(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.kind} store is closed: open another with open_store()")
        self._raise_failure()
        self._sweep()

    def _sweep(self) -> None:
        while self._dropped:
            entry = self._live.pop(self._dropped.popleft(), None)
            if entry is not None:
                self._lingering.append(entry)
        self._lingering = [entry for entry in self._lingering if not self._discard(entry)]

    def _drain(self) -> None:
        """Sweep, and wait for what is still at work on entries nobody wants: its time belongs to what was counted."""
        self._sweep()

    def _entry(self, handle: Handle) -> Any:
        if handle._store() is not self:
            raise RuntimeError("this handle belongs to another store")
        if handle._key not in self._live:
            raise RuntimeError(
                "this handle was already taken: kept tensors come back once, so a graph can be run backward only once"
            )
        return self._live[handle._key]

    def _checked(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"a store keeps plain strided tensors, got layout {tensor.layout}, dtype {tensor.dtype}")
        if tensor.device != self.device:
            raise ValueError(f"the store is for {self.device}, got a tensor on {tensor.device}")
        return tensor.detach().resolve_conj().resolve_neg()


class GpuStore(Store):
    """References only: what autograd itself would do. `settle` is the one call that copies."""

    kind = "gpu"

    def __init__(self, device: torch.device):
        super().__init__(device)
        live = self._live
        self._forget = lambda key: live.pop(key, None)  # no copy to wait for: free at once

    @property
    def medium(self) -> str:
        return "device memory"

    @property
    def held_bytes(self) -> int:
        return sum(source.nbytes for source in list(self._live.values()))

    def _keep(self, tensors: list[Tensor]) -> Source:
        return Source(tensors)

    def _bring(self, entry: Source, following: Source | None, *, spend: bool) -> list[Tensor]:
        entry.check_unchanged()
        return entry.tensors

    def _wait_copied(self, entry: Source) -> None:
        entry.own()

    def flush(self) -> None:
        """Nothing is ever on its way out."""

    def _close(self) -> None:
        return None


class Meter:
    """Adds up seconds without making anyone wait: on CUDA from pairs of events that are read later."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def span(self, stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Event | None]:
        """Count the time between both ends of the block, as `stream` sees it (None: by the wall clock).
        Yields the event that will mark the end."""
        if stream is None:
            begin = time.perf_counter()
            try:
                yield None
            finally:
                self._seconds += time.perf_counter() - begin
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield end
        end.record(stream)
        self._pairs.append((start, end))
        while self._pairs and self._pairs[0][1].query():  # read what is over, so that the list stays short
            self._read_oldest()

    def total(self) -> float:
        while self._pairs:
            self._pairs[0][1].synchronize()
            self._read_oldest()
        return self._seconds

    def _read_oldest(self) -> None:
        start, end = self._pairs.popleft()
        self._seconds += start.elapsed_time(end) / 1e3
