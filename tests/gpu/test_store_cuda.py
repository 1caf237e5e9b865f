"""Stores on CUDA: no race between streams, no wait on the CPU, exact pinned memory, tensors above 2^31 elements.

The races are provoked: delays are put on the compute stream and on the copy streams, and freed memory is overwritten at
once. A control shows that the same test fails when one wait is left out.
"""

import gc
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ithaca.engine.offload import disk, host, scratch, transfer
from ithaca.engine.offload import host_cache as near
from ithaca.engine.offload.choice import open_store
from ithaca.engine.offload.disk import DiskStore
from ithaca.engine.offload.host import HostStore
from ithaca.engine.offload.packing import pack
from ithaca.engine.offload.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: side streams and pinned memory"),
]

CUDA = torch.device("cuda", 0)
KINDS = ["gpu", "host", "disk"]
MILLISECOND = 1_900_000  # cycles of torch.cuda._sleep, about


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pattern(number: int, elements: int) -> list[Tensor]:
    """Two tensors that differ for every number, made on the current stream."""
    base = torch.arange(elements, device=CUDA, dtype=torch.int32).mul_(7919).add_(number * 104_729)
    return [base.view(torch.bfloat16).view(1, -1, 64), base[: elements // 32].float()]


def differences(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """How many bytes differ, left on the device so that nobody waits."""
    pairs = [(pack(a)[1], pack(b)[1]) for a, b in zip(got, want, strict=True)]
    return torch.stack([(a != b).sum() for a, b in pairs]).sum()


def overwrite_free_memory(elements: int) -> None:
    """Take the blocks that were just freed, fill them, free them again."""
    junk = [torch.full((elements,), -1, dtype=torch.int32, device=CUDA) for _ in range(3)]
    del junk


def delay_lanes(store: Store, choose: random.Random) -> None:
    """Hold the copy streams up, so that a missing wait shows."""
    if isinstance(store, HostStore):
        for lane in (store._out, store._in):
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(choose.randrange(3 * MILLISECOND))


def stressed_step(store: Store, choose: random.Random, *, layers: int, elements: int, drop: bool = False) -> Tensor:
    """Forward and backward with delays everywhere; how many bytes came back wrong."""
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    handles = []
    for layer in range(layers):
        torch.cuda._sleep(choose.randrange(2 * MILLISECOND))  # the copy must not start before this is over
        kept = pattern(layer, elements)
        delay_lanes(store, choose)
        handles.append(store.put(kept))
        del kept
        overwrite_free_memory(elements)
    for layer in reversed(range(layers)):
        handle = handles.pop()
        if drop and layer % 3 == 1:  # prefetched by now, never used
            del handle
            overwrite_free_memory(elements)
            continue
        delay_lanes(store, choose)
        got = store.take(handle)
        wrong += differences(got, pattern(layer, elements))
        del got
        torch.cuda._sleep(choose.randrange(2 * MILLISECOND))
        overwrite_free_memory(elements)
    return wrong


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_race_under_load(kind: str, drop: bool, tmp_path: Path) -> None:
    choose, elements = random.Random(0), 1 << 20
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # type: ignore[arg-type]
        for _ in range(4 if kind == "disk" else 12):
            wrong += stressed_step(store, choose, layers=10, elements=elements, drop=drop)
        assert wrong.item() == 0
        report = store.report()
        if kind != "gpu":
            assert report.prefetched > 0
            assert report.bytes_out > report.bytes_in if drop else report.bytes_out == report.bytes_in


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_no_race_while_copies_give_way(chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for a few puts of two chunks each: the buffers change hands all the time."""
    monkeypatch.setattr(transfer, "CHUNK", 4 << 20)
    monkeypatch.setattr(near, "HOST_CACHE", chunks * (4 << 20))
    choose, elements = random.Random(0), 1 << 20
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with open_store("disk", device=CUDA, scratch=tmp_path) as store:
        assert isinstance(store, DiskStore)
        for drop in (False, True, False, True):
            wrong += stressed_step(store, choose, layers=10, elements=elements, drop=drop)
        assert wrong.item() == 0
        assert store.idle_bytes == store.held_bytes
        assert store._cache.idle_bytes == store._cache.held_bytes == (chunks // 2 * 2) * (4 << 20)
        assert all(buffer.bytes.is_pinned() for buffer in store._cache._all)


@pytest.fixture
def two_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third put waits for the first, however small they are."""
    monkeypatch.setattr(host, "IN_FLIGHT", 0)
    monkeypatch.setattr(disk, "IN_FLIGHT", 0)


def test_the_stress_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch, two_under_way: None) -> None:
    monkeypatch.setattr(HostStore, "_retire_oldest", lambda self: self._leaving.popleft())
    choose, wrong = random.Random(0), 0
    with open_store("host", device=CUDA) as store:
        for _ in range(5):
            wrong += int(stressed_step(store, choose, layers=10, elements=1 << 20))
    assert wrong > 0


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_identical(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 8192)
    base = torch.randn(3, 5, 7, device=CUDA)
    tensors = [
        base,
        base.bfloat16(),
        torch.randint(-(2**62), 2**62, (11, 13), device=CUDA),
        base > 0,
        base.to(torch.complex64).conj(),
        base.transpose(0, 2),
        base[:, 1:4],
        base[:, :1].expand(3, 6, 7),
        torch.tensor(-0.0, device=CUDA),
        torch.empty(0, 4, device=CUDA),
        torch.randn(40_001, device=CUDA),
        torch.randn(5, device=CUDA, requires_grad=True),
    ]
    want = [tensor.detach().clone() for tensor in tensors]
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # type: ignore[arg-type]
        handles = [store.put(tensors), store.put([]), *(store.put([tensor]) for tensor in tensors)]
        got = [store.take(handle) for handle in reversed(handles)]
    for found, wanted in zip(got, [*([tensor] for tensor in reversed(want)), [], want], strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, CUDA, False)
            assert torch.equal(pack(a.resolve_conj().contiguous())[1], pack(b.resolve_conj().contiguous())[1])
    assert got[0][0].device == CUDA


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_never_makes_the_cpu_wait() -> None:
    with open_store("host", device=CUDA) as store:
        for step in range(3):  # the first pins, and takes device memory for the first time
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(400 * MILLISECOND)
                handles = [store.put([torch.ones(1 << 22, device=CUDA)]) for _ in range(6)]
                for handle in reversed(handles):
                    store.take(handle)
                ahead = not torch.cuda.current_stream().query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert step == 0 or ahead


def compute_and_keep(store: Store, milliseconds: int, layers: int = 16) -> None:
    handles = []
    for layer in range(layers):
        x = torch.full((1, 1 << 25), float(layer), device=CUDA, dtype=torch.bfloat16)  # 67 MB
        torch.cuda._sleep(milliseconds * MILLISECOND)
        handles.append(store.put([x]))
        del x
    torch.cuda._sleep(milliseconds * MILLISECOND)
    for handle in reversed(handles):
        x = store.take(handle)[0]
        torch.cuda._sleep(milliseconds * MILLISECOND)
        del x


def test_copies_hide_behind_work() -> None:
    with open_store("host", device=CUDA) as store:
        compute_and_keep(store, 0)
        store.reset()
        compute_and_keep(store, 10)
        busy = store.report()
        store.reset()
        compute_and_keep(store, 0)
        idle = store.report()
    print(f"\nwith work:    {busy}\nwithout work: {idle}")
    assert busy.bytes_out == busy.bytes_in == 16 * (1 << 26)
    assert busy.bytes_out / busy.copy_seconds > 2e9  # pinned, not paged
    assert busy.hidden_seconds > 0.8 * busy.copy_seconds
    assert idle.exposed_seconds > 0.3 * idle.copy_seconds
    assert idle.exposed_seconds < 2 * idle.copy_seconds
    assert busy.held_bytes == idle.held_bytes == 16 * (1 << 26)  # pinned in the first step only


def test_device_memory_stays_bounded(two_under_way: None) -> None:
    """Two puts on their way out and the one being made; later one on its way in and the one in use."""
    unit, slack = 1 << 26, 1 << 22
    with open_store("host", device=CUDA) as store:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute_and_keep(store, 0)
        assert torch.cuda.max_memory_allocated() - before <= 3 * unit + slack
        torch.cuda.synchronize()
        store.take(store.put([torch.ones(1, device=CUDA)]))
        assert torch.cuda.memory_allocated() - before < unit


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_let_go_gives_memory_back_without_another_put(kind: str, tmp_path: Path) -> None:
    """Two puts of any size are held otherwise, however long the computation goes on without the store."""
    size = 1 << 28
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # pyright: ignore[reportArgumentType]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        handles = [store.put([torch.full((size,), number, dtype=torch.uint8, device=CUDA)]) for number in (1, 2)]
        store.flush()
        assert torch.cuda.memory_allocated() - before < size // 8
        reused = torch.zeros(2 * size, dtype=torch.uint8, device=CUDA)  # the memory they came from
        for number in (2, 1):
            assert bool((store.take(handles[number - 1])[0] == number).all())
        assert not bool(reused.any())


def test_pinned_memory_is_exact_and_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    pin = host._pin
    monkeypatch.setattr(host, "_pin", lambda at, nbytes, device: (pinned.append(nbytes), pin(at, nbytes, device)))
    sizes = [3_000_001, 5 * 2**20 + 3, 17]
    store = open_store("host", device=CUDA)
    assert isinstance(store, HostStore)
    for _ in range(3):
        handles = [store.put([torch.ones(n, dtype=torch.uint8, device=CUDA) for n in sizes]) for _ in range(4)]
        assert all(buffer.bytes.is_pinned() for buffer in store._pool._all)
        for handle in reversed(handles):
            store.take(handle)
        assert store.held_bytes == store.idle_bytes == 4 * sum(sizes)
    assert sorted(pinned) == sorted(4 * sizes)
    views = [buffer.bytes for buffer in store._pool._all]
    store.close()
    assert not any(view.is_pinned() for view in views)


def test_failed_pin_is_clear_and_leaves_cuda_working() -> None:
    buffer = host.HostBuffer(1 << 20, CUDA)
    with pytest.raises(MemoryError, match=r"pin 1\.0 MB .*ulimit -l"):
        host._pin(buffer.bytes.data_ptr(), 1 << 20, CUDA)  # twice is refused
    assert torch.ones(10, device=CUDA).sum().item() == 10
    buffer.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_take_on_another_stream(kind: str, tmp_path: Path) -> None:
    other, elements = torch.cuda.Stream(), 1 << 20
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # type: ignore[arg-type]
        for _ in range(3):
            handles = [store.put(pattern(layer, elements)) for layer in range(4)]
            store.take(handles.pop())  # prefetches for the stream of this call
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                got = store.take(handles.pop())
                torch.cuda._sleep(5 * MILLISECOND)
                found = differences(got, pattern(2, elements))
            del got
            overwrite_free_memory(elements)  # must not touch what the other stream still reads
            torch.cuda.current_stream().wait_stream(other)
            wrong += found
            del handles
    assert wrong.item() == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_settle_allows_writes_in_place(kind: str, tmp_path: Path) -> None:
    elements, choose = 1 << 22, random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # type: ignore[arg-type]
        x = torch.zeros(elements, dtype=torch.int32, device=CUDA)
        handles = []
        for layer in range(8):
            x.fill_(layer)
            delay_lanes(store, choose)
            handles.append(store.put([x]))
            store.wait_copied(handles[-1])
        for layer in reversed(range(8)):
            wrong += (store.take(handles.pop())[0] != layer).sum()
        assert wrong.item() == 0


@pytest.mark.parametrize("puts", [0, 3])
def test_early_write_is_noticed(puts: int, two_under_way: None) -> None:
    """By a later put that lets go of the first, or else when it is taken."""
    with open_store("host", device=CUDA) as store:
        x = torch.ones(1 << 20, device=CUDA)
        torch.cuda._sleep(50 * MILLISECOND)
        handle = store.put([x])
        x.add_(1)
        with pytest.raises(RuntimeError, match="written in place"):
            kept = [store.put([torch.ones(1 << 20, device=CUDA)]) for _ in range(puts)]
            assert not kept  # the write was to be noticed above
            store.take(handle)


@pytest.mark.parametrize("reports", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_store_collected_under_way_does_no_harm(kind: str, reports: int, tmp_path: Path) -> None:
    elements = 1 << 22
    for _ in range(3):
        store = open_store(kind, device=CUDA, scratch=tmp_path)  # type: ignore[arg-type]
        for _ in range(reports):
            store.take(store.put(pattern(9, elements)))
            store.report()
            store.reset()
        handles = [store.put(pattern(layer, elements)) for layer in range(4)]
        delay_lanes(store, random.Random(0))
        store.take(handles.pop())
        del store, handles
        gc.collect()
        mine = torch.full((4 * elements,), 3, dtype=torch.int32, device=CUDA)
        torch.cuda.synchronize()
        assert bool((mine == 3).all())


def test_disk_reports_and_bounds(tmp_path: Path, two_under_way: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With host memory for none of it: what the disk itself costs."""
    monkeypatch.setattr(near, "HOST_CACHE", 0)
    unit, slack = 1 << 26, 1 << 22
    with open_store("disk", device=CUDA, scratch=tmp_path) as store:
        assert isinstance(store, DiskStore)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute_and_keep(store, 0, layers=8)
        assert torch.cuda.max_memory_allocated() - before <= 3 * unit + slack
        idle = store.report()
        store.reset()
        compute_and_keep(store, 300, layers=8)
        busy = store.report()
        assert list(tmp_path.iterdir()) == []
    print(f"\nwith work:    {busy}\nwithout work: {idle}")
    assert idle.held_bytes == busy.held_bytes == 8 * unit
    assert idle.exposed_seconds > 0.3 * idle.copy_seconds
    assert 0 <= busy.exposed_seconds < 0.5 * busy.copy_seconds


def test_what_is_near_does_not_wait_for_the_disk(
    tmp_path: Path, two_under_way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, slack, reports, reads = 1 << 26, 1 << 22, {}, []
    read = scratch.ScratchFile.read
    monkeypatch.setattr(scratch.ScratchFile, "read", lambda *args: (reads.append(args[2]), read(*args))[1])
    for budget in (near.HOST_CACHE, 0):
        monkeypatch.setattr(near, "HOST_CACHE", budget)
        with open_store("disk", device=CUDA, scratch=tmp_path) as store:
            assert isinstance(store, DiskStore)
            compute_and_keep(store, 0, layers=8)  # pins
            torch.cuda.synchronize()
            store.reset()
            reads.clear()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            compute_and_keep(store, 0, layers=8)
            assert torch.cuda.max_memory_allocated() - before <= 3 * unit + slack
            reports[budget] = store.report()
            assert store._cache.held_bytes == (8 * unit if budget else 0)  # pinned in the first step only
            assert bool(reads) == (budget == 0)
    close, far = reports.values()
    print(f"\nnear: {close}\nfar:  {far}")
    assert close.exposed_seconds < 0.5 * far.exposed_seconds


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_more_than_two_to_the_31_elements(kind: str, tmp_path: Path) -> None:
    elements = 5_000_000_007
    if torch.cuda.mem_get_info(CUDA)[0] < 5 * elements:
        pytest.skip("needs 25 GB of free GPU memory")
    if kind == "host" and host.available_memory() < 2 * elements:
        pytest.skip("needs 10 GB of free host memory")
    if kind == "disk" and shutil.disk_usage(tmp_path).free < 2 * elements:
        pytest.skip("needs 10 GB of free disk")
    x = torch.randint(0, 256, (elements,), dtype=torch.uint8, device=CUDA)
    want = x.clone()
    with open_store(kind, device=CUDA, scratch=tmp_path) as store:  # type: ignore[arg-type]
        handle = store.put([x])
        store.wait_copied(handle)
        x.zero_()
        (got,) = store.take(handle)
        report = store.report()
        for start in range(0, elements, 1 << 30):  # in parts: no temporary of this size
            stop = min(start + (1 << 30), elements)
            assert torch.equal(got[start:stop], want[start:stop])
        assert report.bytes_out == report.bytes_in == elements
        rounded = elements if kind == "host" else -(-elements // 4096) * 4096
        assert store.held_bytes == rounded
    print(f"\n{report}, setup {report.setup_seconds:.2f} s")
