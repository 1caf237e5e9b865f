"""What a rank computes alone, timed by the GPU itself."""

from __future__ import annotations

import time

import pytest
import torch

from ithaca import faults
from ithaca.own_time import OwnTime

pytestmark = pytest.mark.gpu


def test_events_measure_what_the_gpu_does_and_not_what_the_host_waits_for():
    device, own = torch.device("cuda"), OwnTime()
    x = torch.randn(4096, 4096, device=device)
    x @ x
    torch.cuda.synchronize()
    for _ in range(3):
        with own.measure(device):
            for _ in range(10):
                x @ x
        time.sleep(0.1)
    torch.cuda.synchronize()
    assert 0 < own.take() < 0.3 and own.take() == 0.0


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
