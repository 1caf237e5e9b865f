"""NF4 on a GPU: packed and unpacked as on a CPU, bit for bit, also beyond 2^31 weights; and a step on a packed base."""

from __future__ import annotations

import pytest
import torch

from ithaca.engine.model.nf4 import BLOCK, Nf4, pack, unpack

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("shape", [(1, 64), (5, 192), (130, 448), (1024, 4096), (3, 7, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    weight[0, ..., :BLOCK] = 0  # a block without a scale
    weight[0, ..., -1] = 3e4
    packed = pack(weight)
    on_gpu = pack(weight.to(CUDA))
    assert torch.equal(on_gpu.cpu(), packed)
    theirs = unpack(packed, torch.empty(shape, dtype=dtype))
    mine = unpack(on_gpu, torch.full(shape, float("nan"), dtype=dtype, device=CUDA))
    assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_beyond_int32():
    rows, columns = 2**19 + 3, 4096
    shard = Nf4(torch.zeros(rows, columns * 9 // 16, dtype=torch.uint8, device=CUDA), (rows, columns), torch.bfloat16)
    last = torch.randn(1, columns)
    shard.packed[-1:] = pack(last).to(CUDA)
    whole = shard.whole()
    assert torch.equal(whole[-1:].cpu(), unpack(pack(last), torch.empty(1, columns, dtype=torch.bfloat16)))
    assert not whole[:-1].any()  # scales are zero


def test_step():
    """The losses and gradients of the unpacked base, in bf16, from the same adapters."""
    from ..parity.test_nf4 import on_one_gpu

    mine, theirs = on_one_gpu("nf4"), on_one_gpu(None)
    assert mine[0] == theirs[0] and mine[1].keys() == theirs[1].keys()
    for name, gradient in mine[1].items():
        assert torch.equal(gradient, theirs[1][name]), name
