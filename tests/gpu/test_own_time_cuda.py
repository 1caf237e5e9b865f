"""What a rank computes alone, timed by the GPU itself."""

from __future__ import annotations

import pytest
import torch

from ithaca.base import faults
from ithaca.engine.own_time import OwnTime

pytestmark = pytest.mark.gpu


def test_events_measure_what_the_gpu_does_and_not_what_lies_between():
    device, own = torch.device("cuda"), OwnTime()
    x = torch.randn(4096, 4096, device=device)
    x @ x
    events = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
    events[0].record()
    for i in range(3):
        with own.measure(device):
            for _ in range(10):
                x @ x
        events[2 * i + 1].record()
        torch.cuda._sleep(100_000_000)  # clock cycles
        events[2 * i + 2].record()
    torch.cuda.synchronize()
    between = sum(events[i].elapsed_time(events[i + 1]) for i in (1, 3, 5)) / 1e3
    whole = events[0].elapsed_time(events[6]) / 1e3
    assert 0 < own.take() <= (whole - between) * 1.001 and own.take() == 0.0


def test_a_rank_that_is_to_be_slow_is(monkeypatch: pytest.MonkeyPatch):
    device, own = torch.device("cuda"), OwnTime()
    x = torch.randn(8192, 8192, device=device)
    x @ x
    torch.cuda.synchronize()

    def once() -> float:
        with own.measure(device):
            for _ in range(10):
                x @ x
        return own.take()

    usual = min(once() for _ in range(3))
    faults.arm([faults.parse("slow=4@0:1")], 0, None)
    try:
        faults.at(1)
        assert once() > 3 * usual
    finally:
        faults.arm([], 0, None)
