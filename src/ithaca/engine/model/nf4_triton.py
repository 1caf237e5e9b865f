"""NF4 to bf16 or fp32 on a GPU, in one Triton kernel: what nf4.py's `unpack` does on a CPU, bit for bit.

It is bound by memory: 0.5625 bytes of a weight are read and two or four written. With torch's operators the codes would become
int64, then float32, and be written and read at each turn. Imported only where there is a GPU.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ...base.holding import module_holds
from ..limits import NF4_BLOCK as BLOCK

BLOCKS = 64  # of a program
module_holds(__name__, "fsdp")


def unpack_on_gpu(packed: Tensor, levels: Tensor, out: Tensor) -> Tensor:
    """packed: bytes [..., columns * 9 / 16], levels [16] -> out [..., columns], all dense."""
    assert packed.is_contiguous() and out.is_contiguous() and packed.data_ptr() % 4 == 0
    blocks = out.numel() // BLOCK
    with torch.cuda.device(out.device):
        _blocks[(triton.cdiv(blocks, BLOCKS),)](  # pyright: ignore[reportIndexIssue]
            packed, packed.view(torch.float32), levels, out, blocks, out.shape[-1] // BLOCK,
            BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _blocks(codes, scales, levels, out, blocks, blocks_of_row, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    HALF: tl.constexpr = BLOCK // 2  # bytes of a block's codes
    first = tl.program_id(0).to(tl.int64) * BLOCKS  # weights of a layer's experts may pass 2³¹
    byte = tl.arange(0, BLOCKS * HALF)
    block = first + byte // HALF
    row, place = block // blocks_of_row, block % blocks_of_row
    inside = block < blocks
    # a row: the codes of its blocks, HALF bytes each, and then a scale of four bytes for each
    pair = tl.load(codes + row * blocks_of_row * (HALF + 4) + place * HALF + byte % HALF, mask=inside, other=0)
    scale = tl.load(scales + row * blocks_of_row * (HALF // 4 + 1) + blocks_of_row * (HALF // 4) + place, mask=inside)
    pair = pair.to(tl.int32)
    high, low = tl.load(levels + (pair >> 4)) * scale, tl.load(levels + (pair & 15)) * scale
    weight = tl.arange(0, BLOCKS * BLOCK)
    whole = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + first * BLOCK + weight, whole, mask=first + weight // BLOCK < blocks)
