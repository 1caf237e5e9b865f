"""NaN and infinity are found on a GPU as on a CPU, in one kernel for many tensors, also beyond 2^31 numbers."""

from __future__ import annotations

import math

import pytest
import torch

from ithaca.storage.finite import not_finite

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_one_number_among_many_is_found_by_name(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    tensors = {
        f"{size}": torch.full((size,), sign * largest, dtype=dtype, device="cuda")
        for size, sign in ((1, 1), (1000, -1), (65_537, 1), (1_000_003, -1))
    }
    tensors |= {"codes": torch.full((9,), 255, dtype=torch.uint8, device="cuda"), "none": torch.empty(0, device="cuda")}
    tensors |= {"scalar": torch.ones((), dtype=dtype, device="cuda"), "host": torch.ones(3, dtype=dtype)}
    assert not_finite(tensors) == []
    for name, tensor in tensors.items():
        for value in (math.nan, math.inf, -math.inf) if tensor.is_floating_point() and tensor.numel() else ():
            for place in (0, tensor.numel() // 2, -1):
                bad = tensor.clone()
                bad.view(-1)[place] = value
                assert not_finite({**tensors, name: bad}) == [name]


def test_beyond_int32():
    large = torch.zeros(2**31 + 3, dtype=torch.bfloat16, device="cuda")
    assert not_finite({"large": large}) == []
    for place in (-1, 2**31 - 1, 0):
        large[place] = math.nan
        assert not_finite({"large": large}) == ["large"]
        large[place] = 0


def test_the_host_waits_once():
    tensors = {f"{i}": torch.ones(1000 + i, device="cuda") for i in range(50)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        assert not_finite(tensors) == []
    copies = [event for event in profile.events() or () if "DtoH" in event.name]
    assert len(copies) == 1
