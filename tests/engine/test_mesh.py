"""A shard and its whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ithaca.base.processes.pool import Workers
from ithaca.engine.mesh import whole_tensor


def gathered(shape: tuple[int, ...], mesh: tuple[int, ...], places: tuple[Placement, ...]) -> tuple[Tensor, Tensor]:
    value = distribute_tensor(numbers(shape), init_device_mesh("cpu", mesh), places)
    return whole_tensor(value), value.full_tensor()


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])  # of four ranks one has fewer, or some have none
def test_shards_are_put_together_as_torch_does(rows: int, workers: Workers):
    for mesh, places in [
        ((4,), (Shard(0),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((4,), (Shard(1),)),
        ((1, 4), (Shard(0),) * 2),
    ]:
        shape = (rows, 4, 5)
        for ours, theirs in workers.run(gathered, shape, mesh, places, world=4):
            assert torch.equal(ours, numbers(shape)) and torch.equal(theirs, ours)
    assert whole_tensor(numbers((rows, 2))).shape == (rows, 2)
