"""Stores: the same bits back, nothing leaked, nothing left behind, errors that say what to do."""

import errno
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from ithaca.engine.offload import disk, host, pipe, scratch, transfer
from ithaca.engine.offload import host_cache as near
from ithaca.engine.offload.choice import open_store
from ithaca.engine.offload.disk import DiskStore
from ithaca.engine.offload.host import HostBuffer, HostStore
from ithaca.engine.offload.packing import pack
from ithaca.engine.offload.scratch import Extents, ScratchFile
from ithaca.engine.offload.store import Handle, Store, human_bytes

CPU = torch.device("cpu")
KINDS = ["gpu", "host", "disk"]
BLOCK = scratch.BLOCK

Opener = Callable[[str], Store]
GATES: list[threading.Event] = []


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    stores: list[Store] = []

    def make(kind: str) -> Store:
        stores.append(open_store(kind, device=CPU, scratch=tmp_path))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for gate in GATES:  # of a test that failed before it came to that
        gate.set()
    GATES.clear()
    for store in stores:
        store.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 2 * BLOCK)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host memory for puts: all goes through the disk."""
    monkeypatch.setattr(near, "HOST_CACHE", 0)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        assert not a.requires_grad
        bits = [pack(t.detach().contiguous())[1] for t in (a, b)]  # NaN payloads count too
        assert torch.equal(*bits)


def odd_tensors() -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    base = torch.randn(3, 5, 7, generator=noise)
    return [
        base,
        base.bfloat16(),
        base.to(torch.float8_e4m3fn),
        torch.randint(-(2**62), 2**62, (11, 13), generator=noise),
        base > 0,
        base.to(torch.complex64).conj(),
        base.transpose(0, 2),  # dense, other order
        base[:, 1:4],  # gaps
        base[:, :1].expand(3, 6, 7),  # repeats
        base[::2, :, ::3],
        torch.full((2, 2), float("nan")),
        torch.tensor(-0.0),  # 0-dim
        torch.empty(0, 4),
        torch.empty(2, 0, 3).transpose(0, 2),
        torch.randn(1, 17, 1, generator=noise).transpose(0, 1),
        torch.randn(40_000, generator=noise),  # several small chunks
        torch.randn(5, requires_grad=True),
        torch.randn(BLOCK // 4, generator=noise),  # exactly one block
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_between_steps_spends_nothing_of_a_store(kind: str, opened: Opener) -> None:
    """What a store does at its end, and what it does at every report, are two things for each kind: copies end before tensors are
    freed in the second step as in the first, and dropped tensors give their memory back by the next report."""
    store = opened(kind)
    methods = {name for name in dir(Store) if callable(getattr(Store, name)) and not name.startswith("__")}
    assert not methods & set(vars(store)), "an attribute hides a method of all stores"
    finalizers = [value for value in vars(store).values() if isinstance(value, weakref.finalize)]
    for _ in range(3):
        handle = store.put([torch.randn(1000)])
        del handle
        gc.collect()
        store.report()
        store.reset()
        assert not store._live and not store._lingering and not store._dropped
        assert all(each.alive for each in finalizers)
    assert finalizers or kind == "gpu", "a kind that copies waits for its copies when it is collected"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_identical(kind: str, opened: Opener) -> None:
    store, tensors = opened(kind), odd_tensors()
    want = [tensor.detach().clone() for tensor in tensors]
    together = store.put(tensors)
    alone = [store.put([tensor]) for tensor in tensors]
    nothing = store.put([])
    assert together.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert store.take(nothing) == []
    for tensor, handle in reversed(list(zip(want, alone, strict=True))):
        assert_same(store.take(handle), [tensor])
    assert_same(store.take(together), want)
    assert len(store) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dense_strides_survive(kind: str, opened: Opener) -> None:
    out = torch.randn(1, 6, 4, 8).transpose(1, 2)  # what attention returns
    store = opened(kind)
    assert store.take(store.put([out]))[0].stride() == out.stride()


def test_only_gaps_are_copied() -> None:
    x = torch.randn(4, 6, 8)
    for dense in (x, x.transpose(0, 2), x[1:3], x.permute(2, 0, 1)):
        assert pack(dense)[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert pack(x[:, 1:])[1].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def run_step(store: Store, layers: int, seed: int, shape: tuple[int, ...] = (1, 300, 16)) -> None:
    noise = torch.Generator().manual_seed(seed)
    kept = []
    for _ in range(layers):
        x = torch.randn(shape, generator=noise).bfloat16()
        lse = torch.randn(shape[:2], generator=noise)
        kept.append((store.put([x, lse]), [x.clone(), lse.clone()]))
    for handle, want in reversed(kept):
        assert_same(store.take(handle), want)


def test_host_pool_is_exact_and_reused(opened: Opener) -> None:
    store = opened("host")
    assert isinstance(store, HostStore)
    layers, per_layer = 5, 300 * 16 * 2 + 300 * 4
    run_step(store, layers, seed=0)
    addresses = {buffer.bytes.data_ptr() for buffer in store._pool._all}
    for seed in range(1, 4):
        run_step(store, layers, seed)
        assert store.held_bytes == store.idle_bytes == layers * per_layer
    assert {buffer.bytes.data_ptr() for buffer in store._pool._all} == addresses
    assert all(address % BLOCK == 0 for address in addresses)


def test_host_pool_does_not_grow_when_sizes_change(opened: Opener) -> None:
    store = opened("host")
    run_step(store, 4, seed=0, shape=(1, 500, 16))
    peak = store.held_bytes
    for length in (100, 400, 450, 470, 90, 499, 13):
        run_step(store, 4, seed=length, shape=(1, length, 16))
        assert store.held_bytes <= peak


@pytest.mark.usefixtures("small_chunks")
def test_disk_extents_are_reused(opened: Opener) -> None:
    store = opened("disk")
    assert isinstance(store, DiskStore)
    run_step(store, 5, seed=0)
    size = store.held_bytes
    assert size == 5 * (3 * BLOCK + BLOCK)  # 9600 and 1200 bytes, in blocks
    assert os.fstat(store._file._fd).st_size == size
    for seed in range(1, 4):
        run_step(store, 5, seed)
        assert store.held_bytes == store.idle_bytes == size


def test_extents_never_overlap() -> None:
    choose, extents = random.Random(0), Extents()
    used: dict[int, int] = {}
    most = 0
    for _ in range(3000):
        if used and choose.random() < 0.5:
            start = choose.choice(list(used))
            extents.release(start, used.pop(start))
        else:
            length = choose.randrange(1, 50)
            start, size = extents.place(length)
            extents.claim(start, length)
            assert extents.size == size and start + length <= size
            assert all(start + length <= s or s + n <= start for s, n in used.items())
            used[start] = length
        most = max(most, sum(used.values()))
        assert extents.idle_bytes == extents.size - sum(used.values())
    for start, length in used.items():
        extents.release(start, length)
    assert extents._free == [(0, extents.size)]
    assert extents.size < 2 * most


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_handle_put_before_is_prefetched(kind: str, opened: Opener) -> None:
    store = opened(kind)
    handles = [store.put([torch.full((100,), float(i))]) for i in range(6)]
    taken = {i: store.take(handles[i])[0] for i in (5, 4)}
    del handles[3]  # dropped: its place in the order is skipped
    gc.collect()
    taken |= {i: store.take(handles[i])[0] for i in (2, 1, 0)}
    assert all(bool((tensor == i).all()) for i, tensor in taken.items())
    # The first take has nobody before it, and handle 3 was on its way when it was dropped, so 2 was not.
    assert store.report().prefetched == 3
    assert store.report().takes == 5


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_works(kind: str, opened: Opener) -> None:
    store = opened(kind)
    for seed in range(5):
        handles = [store.put([torch.full((50 + i,), float(i))]) for i in range(8)]
        order = list(range(8))
        random.Random(seed).shuffle(order)
        for i in order:
            assert_same(store.take(handles[i]), [torch.full((50 + i,), float(i))])


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_an_error(kind: str, opened: Opener) -> None:
    store, other = opened(kind), opened(kind)
    handle = store.put([torch.ones(3)])
    with pytest.raises(RuntimeError, match="another store"):
        other.take(handle)
    store.take(handle)
    with pytest.raises(RuntimeError, match="already taken"):
        store.take(handle)
    with pytest.raises(RuntimeError, match="already taken"):
        store.wait_copied(handle)
    with pytest.raises(ValueError, match="strided"):
        store.put([torch.ones(3).to_sparse()])
    with pytest.raises(ValueError, match="meta"):
        store.put([torch.ones(3, device="meta")])
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.put([torch.ones(3)])


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'gpu', 'host' or 'disk'"):
        open_store("tape", device=CPU)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_dropped_handles_release(kind: str, opened: Opener) -> None:
    store = opened(kind)
    assert isinstance(store, (HostStore, DiskStore))
    held = []
    for _ in range(6):
        handles = [store.put([torch.randn(5000)]) for _ in range(4)]
        assert len(store) == 4
        store.take(handles.pop())  # the one before is prefetched, then dropped
        del handles
        gc.collect()
        assert len(store) == 0
        if isinstance(store, DiskStore):
            assert store.idle_bytes == store.held_bytes  # what it waits for is over soon
            assert store._cache.idle_bytes == store._cache.held_bytes > 0
        assert store.idle_bytes == store.held_bytes
        held.append(store.held_bytes)
    assert len(set(held)) == 1


def test_dropped_handle_of_gpu_store_frees_at_once(opened: Opener) -> None:
    store = opened("gpu")
    handle = store.put([torch.ones(100)])
    assert store.held_bytes == 400
    del handle
    assert store.held_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_settle_allows_writes_in_place(kind: str, opened: Opener) -> None:
    store = opened(kind)
    x = torch.arange(200_000)
    handle = store.put([x])
    store.wait_copied(handle)
    x.zero_()
    assert_same(store.take(handle), [torch.arange(200_000)])


@pytest.mark.parametrize("kind", KINDS)
def test_let_go_holds_nothing_that_is_under_way(kind: str, opened: Opener) -> None:
    store = opened(kind)
    kept = [torch.arange(200_000) + number for number in range(3)]
    handles = [store.put([x]) for x in kept]
    store.flush()
    if kind != "gpu":  # which refers to what it was given
        for x in kept:
            x.zero_()
    for number in reversed(range(3)):
        assert_same(store.take(handles[number]), [torch.arange(200_000) + number])


def test_gpu_store_notices_writes_in_place(opened: Opener) -> None:
    store, x = opened("gpu"), torch.ones(3)
    handle = store.put([x])
    x.add_(1)
    with pytest.raises(RuntimeError, match="written in place"):
        store.take(handle)


def held_up(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """A method that waits for the event before it works."""
    go, plain = threading.Event(), getattr(owner, name)
    GATES.append(go)
    monkeypatch.setattr(owner, name, lambda *args: (go.wait(), plain(*args))[1])
    return go


def go_when_waited_for(monkeypatch: pytest.MonkeyPatch, store: Store, go: threading.Event) -> None:
    """Set the event when the caller of the store begins to wait."""
    span = store._waits.span
    monkeypatch.setattr(store._waits, "span", lambda stream: (go.set(), span(stream))[1])


@pytest.mark.parametrize("budget", [0, near.HOST_CACHE])
def test_disk_store_notices_early_writes(budget: int, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "HOST_CACHE", budget)
    store, x = opened("disk"), torch.ones(3)
    go = held_up(monkeypatch, pipe.Staging, "copy")
    handle = store.put([x])
    x.add_(1)
    go.set()
    with pytest.raises(RuntimeError, match="written in place"):
        store.take(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_report(kind: str, opened: Opener) -> None:
    store = opened(kind)
    assert store.report().puts == 0
    handles = [store.put([torch.randn(100_000)]) for _ in range(3)]
    for handle in reversed(handles):
        store.take(handle)
    report = store.report()
    copied = 0 if kind == "gpu" else 3 * 400_000
    assert (report.puts, report.takes, report.bytes_out, report.bytes_in) == (3, 3, copied, copied)
    assert report.prefetched == (0 if kind == "gpu" else 2)
    assert report.hidden_seconds == max(0.0, report.copy_seconds - report.exposed_seconds)
    if kind == "gpu":
        assert report.copy_seconds == report.exposed_seconds == 0
    if kind == "host":  # a plain copy is always waited for
        assert 0 < report.copy_seconds == report.exposed_seconds and report.hidden_seconds == 0
    if kind == "disk":
        assert report.copy_seconds > 0 and report.exposed_seconds >= 0
        assert report.medium.endswith(("direct I/O", "buffered I/O"))
    assert f"{kind} store" in str(report) and "3 puts" in str(report)
    store.reset()
    after = store.report()
    assert (after.puts, after.takes, after.bytes_out, after.copy_seconds, after.exposed_seconds) == (0, 0, 0, 0, 0)
    assert after.held_bytes == report.held_bytes


@pytest.mark.parametrize("budget", [0, 1 << 30], ids=["file", "near"])
def test_a_late_write_is_not_counted_after_a_reset(
    budget: int, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that was dropped while a thread wrote it: that write belongs to the counts before the reset."""
    monkeypatch.setattr(near, "HOST_CACHE", budget)
    store, go = opened("disk"), held_up(monkeypatch, ScratchFile, "write")
    writing, write = threading.Event(), ScratchFile.write
    monkeypatch.setattr(ScratchFile, "write", lambda *args: (writing.set(), write(*args))[1])
    handle = store.put([torch.randn(1000)])
    writing.wait()
    for work in store._live[handle.order].works():  # it is written when somebody waits for that
        monkeypatch.setattr(work.done, "wait", lambda wait=work.done.wait: (go.set(), wait())[1])
    del handle
    store.reset()
    assert store.report().copy_seconds == 0


def test_autograd_keeps_through_a_store(opened: Opener) -> None:
    """The use the store is made for: put in forward (main thread), take in backward, a graph that is dropped."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, store: Store) -> Tensor:  # type: ignore[override]
            ctx.store, ctx.handle = store, store.put([x])
            return x * x

        @staticmethod
        def backward(ctx, grad: Tensor):  # type: ignore[override]
            (x,) = ctx.store.take(ctx.handle)
            return 2 * x * grad, None

    for kind in KINDS:
        store = opened(kind)
        x = torch.randn(64, dtype=torch.float64).mul_(0.1).requires_grad_()
        for _ in range(2):
            x.grad = None
            y = x
            for _ in range(3):
                y = Square.apply(y, store)
            y.sum().backward()  # type: ignore[union-attr]
            torch.testing.assert_close(x.grad, 8 * x.detach() ** 7)
        Square.apply(x, store)
        gc.collect()
        assert len(store) == 0


def test_host_reserve(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("host")
    assert isinstance(store, HostStore)
    store.reserve(1)
    monkeypatch.setattr(host, "available_memory", lambda: 3_100_000_000)
    with pytest.raises(ValueError, match=r"3\.1 GB of memory available, this step needs 12\.4 GB: .*store='disk'"):
        store.reserve(12_400_000_000)
    handle = store.put([torch.ones(10)])
    store.reserve(3_100_000_040)  # what is held counts as available
    monkeypatch.setattr(host, "available_memory", lambda: 50)
    with pytest.raises(MemoryError, match=r"50 B of memory available, the next kept tensor needs 80 B"):
        store.put([torch.ones(10), torch.ones(20)])
    assert_same(store.take(handle), [torch.ones(10)])
    assert store.idle_bytes == store.held_bytes == 80  # the half that fitted is not lost


def test_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 100\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: files[self.name])
    assert host.available_memory() == 400
    files["memory.max"] = "max"
    assert host.available_memory() > 400


def test_pin_failure_names_bytes_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    monkeypatch.setattr(host, "_cudart", Refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    with pytest.raises(MemoryError, match=r"pin 5\.1 GB .*ulimit -l.*smaller context.*store='disk'"):
        host._pin(0, 5_100_000_000, CPU)


def test_disk_reserve(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("disk")
    store.reserve(1)
    monkeypatch.setattr(scratch.ScratchFile, "free_bytes", lambda self: 3_100_000_000)
    with pytest.raises(ValueError, match=r"has 3\.1 GB free, this step needs 12\.4 GB: .*scratch=\.\.\..*store='host'"):
        store.reserve(12_400_000_000)


def test_disk_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist: .*scratch=\.\.\."):
        open_store("disk", device=CPU, scratch=tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is not a folder"):
        open_store("disk", device=CPU, scratch=tmp_path / "file")


def test_read_only_folder(mount: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"no file can be made in scratch folder .* on tmpfs \(.*\): make it writable"):
        open_store("disk", device=CPU, scratch=mount("ro,size=1m"))


def test_no_space(mount: Callable[[str], Path]) -> None:
    place = mount("size=4m")
    with open_store("disk", device=CPU, scratch=place) as store:
        with pytest.raises(ValueError, match=r"has 4\.2 MB free, this step needs 5\.0 MB: free space"):
            store.reserve(5_000_000)
        handles = [store.put([torch.full((250_000,), i, dtype=torch.float32)]) for i in range(3)]
        with pytest.raises(OSError, match=r"on tmpfs has .* free, this step needs 2\.0 MB more: free space") as caught:
            store.put([torch.zeros(500_000)])
        assert caught.value.errno == errno.ENOSPC
        for i in reversed(range(3)):  # what was kept before is still there, and space that came free is used again
            assert_same(store.take(handles[i]), [torch.full((250_000,), i, dtype=torch.float32)])
        store.take(store.put([torch.zeros(500_000)]))


def test_buffered_where_direct_is_refused(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, view: object, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "pwrite", refuse)
        store = opened("disk")
    assert store.report().medium.endswith("buffered I/O")
    run_step(store, 3, seed=0)


def test_file_systems_without_o_tmpfile(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "open", lambda path, flags, mode=0o777: _os_open(path, flags, mode, refuse))
        store = opened("disk")
    run_step(store, 3, seed=0)
    assert list(tmp_path.iterdir()) == []


_real_open = os.open


def _os_open(path: object, flags: int, mode: int, refuse: Callable[..., int]) -> int:
    return refuse() if flags & os.O_TMPFILE == os.O_TMPFILE else _real_open(path, flags, mode)  # type: ignore[arg-type]


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_error_in_a_thread_surfaces(call: str, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("disk")

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(scratch.os, call, broken)
    doing = "writing" if call == "pwrite" else "reading"
    message = f"{doing} 4.0 MB (to|from) scratch folder .* on .*Input/output error.*check the disk.*store='host'"
    with pytest.raises(OSError, match=message) as caught:
        handles = [store.put([torch.ones(1_000_000)]) for _ in range(4)]
        store.take(handles[-1])
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="Input/output error"):  # and the store stays unusable
        store.put([torch.ones(1)])


def test_put_waits_when_the_disk_is_slow(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond two puts no more than IN_FLIGHT bytes are held; the wait is counted."""
    monkeypatch.setattr(disk, "IN_FLIGHT", 100)
    store, go = opened("disk"), held_up(monkeypatch, pipe.Staging, "copy")
    go_when_waited_for(monkeypatch, store, go)
    handles = [store.put([torch.full((10,), float(i))]) for i in range(3)]  # 120 bytes, one put over the limit
    assert not go.is_set()
    handles.append(store.put([torch.full((10,), 3.0)]))
    assert go.is_set()
    assert store.report().exposed_seconds > 0
    for i in (3, 2, 1, 0):
        assert_same(store.take(handles[i]), [torch.full((10,), float(i))])


CRASHING = """
import sys
sys.path[:] = {path!r}
import torch
from pathlib import Path
from typing import Any
from ithaca.engine.offload.choice import open_store
store = open_store("disk", device=torch.device("cpu"), scratch=Path({folder!r}))
handle = store.put([torch.ones(1_000_000)])
store.wait_copied(handle)
print("kept", flush=True)
sys.stdin.read()  # for ever, unless the test is gone
"""


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    code = CRASHING.format(path=sys.path, folder=str(tmp_path))
    command, piped = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=piped, stdout=piped, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "kept\n"
            assert list(tmp_path.iterdir()) == []  # nor while it is open
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_closed_goes_away(tmp_path: Path) -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    store = open_store("disk", device=CPU, scratch=tmp_path)
    store.take(store.put([torch.ones(10)]))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ithaca-disk")]
    assert threads
    del store
    gc.collect()
    for thread in threads:
        thread.join()
    assert threading.active_count() <= before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_filesystem_is_named(tmp_path: Path) -> None:
    Part = namedtuple("Part", "mountpoint fstype")
    parts = [Part("/", "ext4"), Part(str(tmp_path), "xfs")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "disk_partitions", lambda all: parts)
        assert scratch._filesystem(tmp_path / "below") == "xfs"
        assert scratch._filesystem(Path("/")) == "ext4"


def test_human_bytes() -> None:
    sizes = [0, 999, 1000, 12_400_000_000, 3.5e15]
    assert [human_bytes(size) for size in sizes] == ["0 B", "999 B", "1.0 KB", "12.4 GB", "3500.0 TB"]


# Reading ahead from a disk.


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    offsets: list[int] = []
    plain = scratch.ScratchFile.read
    monkeypatch.setattr(
        scratch.ScratchFile, "read", lambda self, view, offset: (offsets.append(offset), plain(self, view, offset))[1]
    )
    return offsets


@pytest.mark.usefixtures("far")
def test_what_was_read_ahead_is_not_read_again(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, size = opened("disk"), 3 * transfer.CHUNK // 4 + 5  # in float32: three chunks and a bit
    kept = [[torch.full((size,), float(i)), torch.arange(7) + i] for i in range(4)]
    handles = [store.put(tensors) for tensors in kept]
    for handle in handles:
        store.wait_copied(handle)
    offsets = counted_reads(monkeypatch)
    nbytes = sum(handle.nbytes for handle in handles[1:3]) + 100_000
    store.prefetch(handles[3].order, nbytes)  # the two before the last, newest first; the first has no room
    for _ in range(3):
        for i in (2, 1):
            assert_same(store.peek(handles[i]), kept[i])
    once = len(offsets)
    assert once == 2 * 4, "of both, three chunks and one with the rest and the small tensor"
    assert_same(store.take(handles[0]), kept[0])
    assert len(offsets) > once
    for i in (2, 1, 3):
        assert_same(store.take(handles[i]), kept[i])
    assert isinstance(store, DiskStore) and store._cache.idle_bytes == store._cache.held_bytes > 0


@pytest.mark.usefixtures("far")
def test_reading_ahead_of_dropped_handles(opened: Opener) -> None:
    store = opened("disk")
    handles = [store.put([torch.full((300_000,), float(i))]) for i in range(5)]
    last = handles[-1].order
    store.prefetch(last, 10**9)
    del handles[1:3]
    gc.collect()
    for i, handle in zip((4, 3, 0), reversed(handles), strict=True):
        assert_same(store.take(handle), [torch.full((300_000,), float(i))])
    assert len(store) == 0


def test_no_reading_ahead_without_memory_for_it(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("disk")
    assert isinstance(store, DiskStore)
    monkeypatch.setattr(near, "available_memory", lambda: 1000)
    handles = [store.put([torch.ones(1000)]) for _ in range(2)]
    store.prefetch(handles[1].order, 4000)
    assert store._cache.held_bytes == 0
    assert_same(store.take(handles[0]), [torch.ones(1000)])


@pytest.mark.usefixtures("far")
def test_a_disk_that_fails_while_reading_ahead(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("disk")
    handles = [store.put([torch.ones(1_000_000)]) for _ in range(3)]
    for handle in handles:
        store.wait_copied(handle)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(scratch.os, "preadv", broken)
    store.prefetch(handles[2].order, 10**9)
    with pytest.raises(OSError, match=r"reading from scratch folder .*Input/output error.*check the disk"):
        store.take(handles[1])


def test_the_brief_store_of_a_disk_is_memory(opened: Opener) -> None:
    store = opened("disk")
    handle = store.scratch_store.put([torch.ones(10)])
    assert store.scratch_store.kind == "host" and handle.store is store.scratch_store
    assert len(store) == 1 and store.report().puts == 1
    assert_same(store.scratch_store.take(handle), [torch.ones(10)])
    store.reset()
    assert len(store) == 0 and store.report().puts == 0 and opened("host").scratch_store.kind == "host"


# What was put last stays in host memory.


def near_store(opened: Opener, monkeypatch: pytest.MonkeyPatch, chunks: int) -> DiskStore:
    """A disk store with small chunks, and host memory for so many of them."""
    monkeypatch.setattr(transfer, "CHUNK", 2 * BLOCK)
    monkeypatch.setattr(near, "HOST_CACHE", chunks * 2 * BLOCK)
    store = opened("disk")
    assert isinstance(store, DiskStore)
    return store


def filled(number: int, chunks: float = 1) -> Tensor:
    return torch.full((int(chunks * 2 * BLOCK) // 4,), float(number))


def wait_for_file(store: DiskStore) -> None:
    """Until the file has all that was put."""
    for entry in store._live.values():
        entry.write.done.wait()
        if entry.copy is not None:
            entry.copy.done.wait()


def near_handles(store: DiskStore) -> list[bool]:
    return [entry.cached is not None for entry in store._live.values()]


def test_the_newest_come_back_without_the_disk(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, offsets, handles = near_store(opened, monkeypatch, chunks=4), counted_reads(monkeypatch), []
    for step in range(3):
        offsets.clear()
        for i in range(8):
            handles.append(store.put([filled(i)]))
            wait_for_file(store)
        assert near_handles(store) == [False] * 4 + [True] * 4
        for i in (7, 6, 5):
            assert_same(store.take(handles.pop()), [filled(i)])
        assert not offsets
        for i in (4, 3, 2, 1, 0):
            assert_same(store.take(handles.pop()), [filled(i)])
        assert len(offsets) == 4
        assert store._cache.held_bytes == store._cache.idle_bytes == near.HOST_CACHE
        assert store.held_bytes == store.idle_bytes == 8 * 2 * BLOCK, f"step {step}"


def test_room_is_made_by_the_oldest_and_no_more_than_needed(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, handles = near_store(opened, monkeypatch, chunks=6), []
    for i, chunks in enumerate((1, 2, 1, 2)):
        handles.append(store.put([filled(i, chunks)]))
    wait_for_file(store)
    assert near_handles(store) == [True] * 4
    handles.append(store.put([filled(4, 1.5)]))  # two buffers: the first put has one, the second two
    assert near_handles(store) == [False, False, True, True, True]
    assert store._cache.idle_bytes == 2 * BLOCK and store._cache.held_bytes == near.HOST_CACHE
    wait_for_file(store)
    handles.append(store.put([filled(5, 6.5)]))  # more than all of it: nobody gives way
    assert near_handles(store) == [False, False, True, True, True, False]
    for i, chunks in reversed(list(enumerate((1, 2, 1, 2, 1.5, 6.5)))):
        assert_same(store.take(handles[i]), [filled(i, chunks)])


def test_a_copy_that_is_read_does_not_give_way(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = near_store(opened, monkeypatch, chunks=2)
    handles = [store.put([filled(i)]) for i in range(2)]
    wait_for_file(store)
    go = held_up(monkeypatch, pipe.Staging, "copy")
    first = store._live[handles[0].order]
    first.arrival = store._fetch(first)
    handles.append(store.put([filled(2)]))
    assert near_handles(store) == [True, False, True]
    go.set()
    for i in (0, 2, 1):
        assert_same(store.take(handles[i]), [filled(i)])


def test_a_slow_disk_holds_nobody_up(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room, for nothing is written yet: puts go the other way. What is near is settled and taken meanwhile."""
    store, offsets = near_store(opened, monkeypatch, chunks=3), counted_reads(monkeypatch)
    go = held_up(monkeypatch, scratch.ScratchFile, "write")
    handles = [store.put([filled(i)]) for i in range(6)]
    assert near_handles(store) == [True] * 3 + [False] * 3
    for handle in handles:
        store.wait_copied(handle)
    for i in (2, 1):
        assert_same(store.take(handles[i]), [filled(i)])
    assert not go.is_set() and not offsets
    assert store._cache.idle_bytes == 0, "a thread is at work on them"
    go.set()
    for i in (5, 4, 3, 0):
        assert_same(store.take(handles[i]), [filled(i)])
    assert len(offsets) == 3
    assert store.idle_bytes == store.held_bytes and store._cache.idle_bytes == store._cache.held_bytes


def test_bytes_of_the_file_wait_for_the_thread_that_writes_them(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = near_store(opened, monkeypatch, chunks=3)
    go = held_up(monkeypatch, scratch.ScratchFile, "write")
    begun = threading.Event()
    write = scratch.ScratchFile.write
    monkeypatch.setattr(scratch.ScratchFile, "write", lambda *args: (begun.set(), write(*args))[1])
    handle = store.put([filled(0)])
    begun.wait()
    store.take(handle)
    assert not go.is_set()
    go_when_waited_for(monkeypatch, store, go)
    handle = store.put([filled(1)])  # the file does not grow: a moment later the bytes are free
    assert go.is_set() and store.held_bytes == 2 * BLOCK
    wait_for_file(store)
    store._cache.give(store._live[handle.order].copy)
    assert_same(store.take(handle), [filled(1)])


def test_memory_of_a_dropped_put_waits_for_the_thread_that_fills_it(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that nobody wants any more is cancelled, and its copy to the file is over at once; the thread that fills its memory is
    not, and would write over the put that got the memory next."""
    store = near_store(opened, monkeypatch, chunks=1)
    for handle in [store.put([filled(0)]), store.put([filled(0)])]:  # the file has room for two
        store.take(handle)
    begun, go = threading.Event(), held_up(monkeypatch, pipe.Staging, "copy")
    copy = pipe.Staging.copy
    monkeypatch.setattr(pipe.Staging, "copy", lambda *args: (begun.set(), copy(*args))[1])
    dropped = store.put([filled(0)])
    begun.wait()
    del dropped
    gc.collect()
    handle = store.put([filled(1)])
    assert near_handles(store) == [False], "no room: the only memory is being filled"
    go.set()
    assert_same(store.take(handle), [filled(1)])
    assert store.idle_bytes == store.held_bytes
    handle = store.put([filled(2)])
    assert near_handles(store) == [True]
    assert_same(store.take(handle), [filled(2)])


def test_what_is_taken_early_is_not_written(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = near_store(opened, monkeypatch, chunks=100), []
    go = held_up(monkeypatch, scratch.ScratchFile, "write")
    write = scratch.ScratchFile.write
    monkeypatch.setattr(scratch.ScratchFile, "write", lambda *args: (written.append(args[2]), write(*args))[1])
    handles = [store.put([filled(i)]) for i in range(20)]
    for i in reversed(range(20)):
        assert_same(store.take(handles[i]), [filled(i)])
    go.set()
    assert store.idle_bytes == store.held_bytes
    store.close()
    assert len(written) <= pipe.WORKERS


@pytest.mark.parametrize("way", ["available", "pin"])
def test_without_host_memory_all_goes_through_the_disk(
    way: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tried = near_store(opened, monkeypatch, chunks=100), []

    def refuse(nbytes: int, device: torch.device) -> None:
        tried.append(nbytes)
        raise MemoryError("could not pin")

    if way == "available":
        monkeypatch.setattr(near, "available_memory", lambda: 8 * 2 * BLOCK - 1)
    else:
        monkeypatch.setattr(near, "HostBuffer", refuse)
    handles = [store.put([filled(i)]) for i in range(4)]
    store.prefetch(handles[3].order, 3 * 2 * BLOCK)
    assert near_handles(store) == ([False] * 4 if way == "pin" else [True] * 3 + [False])  # ahead may take half
    assert len(tried) == (way == "pin")
    for i in reversed(range(4)):
        assert_same(store.take(handles[i]), [filled(i)])


def test_reading_ahead_and_puts_share_memory(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, offsets, handles = near_store(opened, monkeypatch, chunks=2), counted_reads(monkeypatch), []
    for i in range(6):
        handles.append(store.put([filled(i)]))
        wait_for_file(store)
    store.prefetch(handles[5].order, 3 * 2 * BLOCK)  # the newest of the three is near
    assert near_handles(store) == [False, False, True, True, True, True] and len(offsets) <= 2
    wait_for_file(store)
    handles.append(store.put([filled(6)]))  # the oldest that is near gives way, read ahead or not
    assert near_handles(store) == [False, False, False, True, True, True, True]
    assert store._cache.held_bytes == 4 * 2 * BLOCK
    for i in reversed(range(7)):
        assert_same(store.take(handles[i]), [filled(i)])
    assert len(offsets) == 2 + 3


def test_reading_ahead_takes_the_memory_of_older_puts(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: the oldest puts are near, as no newer ones found room. Reading ahead pins beside them what two of its requests
    take, and once the file has them, nothing; it is the same in every step."""
    store, held = near_store(opened, monkeypatch, chunks=2), []
    for _ in range(4):
        go = held_up(monkeypatch, scratch.ScratchFile, "write")
        handles = [store.put([filled(i)]) for i in range(8)]
        store.prefetch(handles[7].order, 2 * 2 * BLOCK)
        before = store._cache.held_bytes
        go.set()
        wait_for_file(store)
        store.prefetch(handles[5].order, 2 * 2 * BLOCK)
        assert near_handles(store)[3:5] == [True, True]
        assert store._cache.held_bytes == before
        held.append(before // (2 * BLOCK))
        for i in reversed(range(8)):
            assert_same(store.take(handles[i]), [filled(i)])
    assert held == [4, 6, 6, 6]


def test_small_puts_share_memory(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = near_store(opened, monkeypatch, chunks=2)
    handles = [store.put([filled(i, 0.5)]) for i in range(4)]
    assert near_handles(store) == [True] * 4
    wait_for_file(store)
    handles.append(store.put([filled(4, 0.5)]))  # the two oldest give way: half a buffer is none
    assert near_handles(store) == [False] * 2 + [True] * 3
    wait_for_file(store)
    store.prefetch(handles[2].order, 2 * BLOCK)
    assert near_handles(store) == [True] * 5 and store._cache.held_bytes == 3 * 2 * BLOCK
    for i in reversed(range(5)):
        assert_same(store.take(handles[i]), [filled(i, 0.5)])


def test_a_write_that_fails_later_is_raised(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = near_store(opened, monkeypatch, chunks=100)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch.os, "pwrite", full)
    handle = store.put([filled(0, 3)])
    wait_for_file(store)
    message = r"writing 8\.2 KB to scratch folder .* failed \(No space left on device\): free space, .*store='host'"
    with pytest.raises(OSError, match=message) as caught:
        store.take(handle)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("chunks", [0, 2, 100])
def test_closing_under_way(chunks: int, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, prefetches and reading ahead that wait for each other: the close ends, whichever is first."""
    store = near_store(opened, monkeypatch, chunks)
    go = held_up(monkeypatch, scratch.ScratchFile, "write")
    read = held_up(monkeypatch, scratch.ScratchFile, "read")
    handles = [store.put([filled(i, 3)]) for i in range(8)]
    store.prefetch(handles[-1].order, 10**9)
    for entry in list(store._live.values())[-2:]:
        entry.arrival = store._fetch(entry)
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread: (go.set(), read.set(), join(thread))[2])
    store.close()
    assert go.is_set(), "it has waited for its threads"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ithaca-disk")]


@pytest.mark.parametrize("chunks", [0, 2, 100])
def test_collected_under_way(chunks: int, opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    near_store(opened, monkeypatch, chunks).close()  # sets the sizes
    store = open_store("disk", device=CPU, scratch=tmp_path)
    written, begun = [], threading.Event()
    go = held_up(monkeypatch, scratch.ScratchFile, "write")
    write = scratch.ScratchFile.write
    monkeypatch.setattr(
        scratch.ScratchFile, "write", lambda *args: (written.append(args[2]), begun.set(), write(*args))[2]
    )
    handles = [store.put([filled(i, 3)]) for i in range(8)]
    begun.wait()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ithaca-disk")]
    del store, handles
    gc.collect()
    go.set()
    for thread in threads:
        thread.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ithaca-disk")]
    assert len(written) <= 2 * pipe.WORKERS, "what nobody can ask for is not written"


def random_tensors(choose: random.Random, number: int) -> list[Tensor]:
    """None to three tensors, of sizes around a chunk and a block, empty ones too."""
    sizes = [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7, 5 * BLOCK - 3]
    noise = torch.Generator().manual_seed(number)
    lengths = [choose.choice(sizes) for _ in range(choose.randrange(4))]
    return [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=noise) for length in lengths]


def assert_no_overlap(cache: near.HostCache) -> None:
    """No byte belongs to two copies, and each buffer to copies or to nobody."""
    taken: dict[HostBuffer, list[tuple[int, int]]] = {}
    for copy in cache._copies.values():
        for buffer, at in zip(copy.buffers, copy.offsets, strict=True):
            taken.setdefault(buffer, []).append((copy._skipped, copy._skipped + copy.size(at)))
    for spans in taken.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= transfer.CHUNK
    assert not taken.keys() & set(cache._idle)
    assert len(taken) + len(cache._idle) == len(cache._all)


@pytest.mark.parametrize("chunks", [0, 1, 3, 10, 1000] if os.environ.get("ITHACA_FAMILIES") == "long" else [0, 3, 1000])
def test_everything_at_random(chunks: int, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, store = random.Random(chunks), near_store(opened, monkeypatch, chunks)
    for name in ("read", "write"):  # a disk of uneven speed
        plain = getattr(scratch.ScratchFile, name)
        monkeypatch.setattr(
            scratch.ScratchFile,
            name,
            lambda *args, plain=plain: (time.sleep(random.choice((0, 0, 0.001))), plain(*args))[1],
        )
    kept: list[tuple[Handle, list[Tensor]]] = []
    for number in range(600):
        handle = None  # a dropped one is not to be held here
        action = choose.choices(("put", "take", "any", "read", "drop", "ahead", "settle"), (9, 5, 1, 3, 1, 1, 1))[0]
        at = choose.randrange(len(kept)) if kept else 0
        if action == "put" or not kept:
            tensors = random_tensors(choose, number)
            kept.append((store.put(tensors), [tensor.clone() for tensor in tensors]))
        elif action in ("take", "any"):
            handle, want = kept.pop(-1 if action == "take" else at)
            assert_same(store.take(handle), want)
        elif action == "read":
            assert_same(store.peek(kept[at][0], then=choose.choice(kept)[0]), kept[at][1])
        elif action == "drop":
            del kept[at]
        elif action == "ahead":
            store.prefetch(kept[at][0].order, choose.randrange(20) * BLOCK)
        else:
            x = filled(number)
            handle = store.put([x])
            store.wait_copied(handle)
            kept.append((handle, [x.clone()]))
            x.zero_()
        assert_no_overlap(store._cache)
        assert len(store) == len(kept)
    assert chunks or store._cache.held_bytes > 0, "even then something is read ahead"
    while kept:
        handle, want = kept.pop()
        assert_same(store.take(handle), want)
    assert store.idle_bytes == store.held_bytes and store._cache.idle_bytes == store._cache.held_bytes
    assert len(store) == 0
