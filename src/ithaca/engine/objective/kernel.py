"""Cross-entropy of a tile of logits and its gradient, in place, in one Triton kernel.

With torch's operators a tile of bf16 logits becomes float32 logits, log-probabilities, probabilities and their gradient: five
tensors, each written and read, and the tile must be short for all of them to fit. Here a program walks over one row twice: once
for the log-sum-exp, once to write the gradient over the logits. Sums are in float32, and each gradient is rounded once, as
the operators do. Imported only where Triton is (loss.py).
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ...base.holding import module_holds

BLOCK = 4096
module_holds(__name__, "loss")


def cross_entropy_in_place(
    logits: Tensor, labels: Tensor, *, scale: float, label_smoothing: float, z_loss: float, ignore: int, learn: bool
) -> Tensor:
    """logits [n, V], each row dense, labels [n] -> scaled sum of the losses, float32. With `learn`, `logits` then holds the
    gradient of that sum."""
    assert logits.stride(1) == 1 and labels.is_contiguous()
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        _rows[(len(logits),)](  # pyright: ignore[reportIndexIssue]
            logits, labels, losses, logits.stride(0), logits.shape[1], scale, label_smoothing, z_loss,
            IGNORE=ignore, LEARN=learn, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return losses.sum()


@triton.jit
def _rows(
    logits, labels, losses, stride, vocabulary, scale, smoothing, z_loss,
    IGNORE: tl.constexpr, LEARN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows × stride may pass 2³¹
    logits += row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if LEARN:
            for start in range(0, vocabulary, BLOCK):
                at = start + columns
                tl.store(logits + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < vocabulary)
    else:
        # each lane has a running maximum and sum of its own; they meet once, at the end
        top = tl.full([BLOCK], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        plain = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            at = start + columns
            inside = at < vocabulary
            x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, x)
            total = total * tl.exp(top - higher) + tl.exp(x - higher)
            top = higher
            plain += tl.where(inside, x, 0.0)
        peak = tl.max(top, 0)
        lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
        chosen = tl.load(logits + label).to(tl.float32)
        uniform = smoothing / vocabulary
        loss = lse - (1.0 - smoothing) * chosen - uniform * tl.sum(plain, 0) + z_loss * lse * lse
        tl.store(losses + row, loss * scale)
        if LEARN:
            slope = 1.0 + 2.0 * z_loss * lse
            for start in range(0, vocabulary, BLOCK):
                at = start + columns
                inside = at < vocabulary
                x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
                grad = tl.exp(x - lse) * slope - uniform
                grad = tl.where(at == label, grad - (1.0 - smoothing), grad)
                tl.store(logits + at, (grad * scale).to(logits.dtype.element_ty), mask=inside)
