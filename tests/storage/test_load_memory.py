"""Filling a model from a folder takes a rank its shard and at most one tensor of host memory. benchmarks/load_memory.py measures
it at size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.load_memory import fill, write
from ithaca.base.processes.pool import Workers

NOISE = 6e6  # allocator, threads


@pytest.mark.parametrize(
    ("experts", "dtype"), [(0, torch.float32), (8, torch.bfloat16)], ids=["as stored", "experts, bf16 to fp32"]
)
def test_the_peak_is_the_shard_and_one_tensor(tmp_path: Path, experts: int, dtype: torch.dtype):
    shape = dict(layers=3, hidden=512, vocabulary=16000, experts=experts)
    write(tmp_path, shape, dtype)
    with Workers(2) as fresh:  # in processes that have run other tests before, some of it was there already
        ranks = fresh.run(fill, str(tmp_path), shape, "meta")
    for found in ranks:
        assert found["model"] > 9e7 and found["shard"] < 0.55 * found["model"]
        assert found["shard"] * 0.9 < found["peak"] < found["shard"] + found["tensor"] + NOISE
