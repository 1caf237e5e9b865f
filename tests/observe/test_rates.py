"""Speed, time left, memory, and the largest of each over real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ithaca.base.processes.pool import Workers
from ithaca.engine.mesh import Group
from ithaca.engine.offload.choice import open_store
from ithaca.observe.rates import Gauge, StepTimer, largest, tokens_per_second


def run(timer: StepTimer, now: list[float], steps: list[float], between: float = 0.0) -> list[float]:
    measured = []
    for seconds in steps:
        now[0] += between
        timer.begin()
        now[0] += seconds
        measured.append(timer.end())
    return measured


def test_the_first_steps_are_left_out_and_one_slow_step_does_not_matter():
    now = [100.0]
    timer = StepTimer(warm_up=2, clock=lambda: now[0])
    assert timer.typical is None and timer.eta(10) is None
    assert run(timer, now, [60.0, 9.0]) == [60.0, 9.0]
    assert timer.typical == 9.0 and timer.eta(10) == 90.0  # nothing better is known
    run(timer, now, [4.0, 4.0, 400.0, 4.0, 5.0])
    assert timer.typical == 4.0 and timer.eta(10) == 40.0


def test_the_median_moves_and_pauses_count():
    now = [0.0]
    timer = StepTimer(warm_up=1, window=5, clock=lambda: now[0])
    run(timer, now, [50.0])
    run(timer, now, [4.0] * 10, between=1.0)
    assert timer.typical == 4.0 and timer.eta(10) == pytest.approx(50.0)
    run(timer, now, [2.0] * 5, between=1.0)
    assert timer.typical == 2.0 and timer.eta(10) == pytest.approx(30.0)


def test_tokens_per_second():
    assert tokens_per_second(2**20, 64.0, 8) == 2048.0


@pytest.mark.parametrize("kind", ["gpu", "host", "disk"])
def test_what_a_store_holds(kind, tmp_path: Path):
    device = torch.device("cpu")
    with open_store(kind, device=device, scratch=tmp_path) as store:
        gauge = Gauge(device, store)
        gauge.begin()
        x = torch.ones(1 << 18)
        handle = store.put([x])
        near = store.scratch_store.put([x[:1024]])
        found = gauge.read()
        assert found["gpu_peak"] is None and found["copy_wait"] >= 0.0
        held = x.nbytes + 4096  # of a disk store too: what was put last is in memory as well
        expected = {"gpu": (0, 0), "host": (held, 0), "disk": (held, x.nbytes)}[kind]
        assert found["host_peak"] >= expected[0] and found["disk_peak"] >= expected[1]
        assert (found["host_peak"] > 0, found["disk_peak"] > 0) == (kind != "gpu", kind == "disk")
        store.take(handle)
        store.scratch_store.take(near)
        gauge.begin()
        assert store.report().takes == 0


@pytest.mark.gpu
def test_the_peak_of_a_gpu():
    device = torch.device("cuda", 0)
    with open_store("gpu", device=device) as store:
        gauge = Gauge(device, store)
        gauge.read()
        before = torch.cuda.memory_allocated(device)
        torch.empty(1 << 28, dtype=torch.uint8, device=device)
        peak = gauge.read()["gpu_peak"]
        assert peak >= before + (1 << 28) > gauge.read()["gpu_peak"]


def together(values: list[dict]) -> tuple[dict, dict]:
    group = Group(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    mine = values[group.rank]
    return mine, largest(mine, group, torch.device("cpu"))


def test_the_largest_over_ranks(workers: Workers):
    names = ("gpu_peak", "host_peak", "disk_peak", "copy_wait")
    rows = [(2**52 + 1, 5, 0, 0.25), (2**52, 7, 0, 0.5)]
    values = [dict(zip(names, row, strict=True)) for row in rows]
    for mine, most in workers.run(together, values, world=2):
        assert most == {"gpu_peak": 2**52 + 1, "host_peak": 7, "disk_peak": 0, "copy_wait": 0.5} and mine in values
        assert [type(value) for value in most.values()] == [int, int, int, float]
    nothing = [{"gpu_peak": None}] * 2
    assert [most for _, most in workers.run(together, nothing, world=2)] == nothing


def test_alone_nothing_is_sent():
    assert largest({"gpu_peak": None, "copy_wait": 0.5}, Group(1, 0, None), torch.device("cpu")) == {
        "gpu_peak": None,
        "copy_wait": 0.5,
    }
