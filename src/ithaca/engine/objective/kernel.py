"""Cross-entropy and log-probabilities of a tile of logits and their gradients, in place, in Triton kernels.

With torch's operators a tile of bf16 logits becomes float32 logits, log-probabilities, probabilities and their gradient: five
tensors, each written and read, and the tile must be short for all of them to fit. Here a program walks over one row twice: once
for the log-sum-exp, once to write the gradient over the logits. Sums are in float32, and each gradient is rounded once, as
the operators do. Log-probabilities are two kernels of one walk each (log_probs.py). Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ...base.holding import module_holds

BLOCK = 4096
# Of a loss's walks. With many threads in a program few rows are under way at once, and their logits are still in the GPU's cache
# when the second walk reads them.
ROW_BLOCK, ROW_WARPS = 8192, 32
module_holds(__name__, "loss")


def cross_entropy_in_place(
    logits: Tensor, labels: Tensor, weights: Tensor | None, *,
    scale: float, label_smoothing: float, z_loss: float, ignore: int, learn: bool,
) -> Tensor:  # fmt: skip
    """logits [n, V], each row dense, labels [n], weights of the rows [n] in float32 -> scaled sum of the losses, float32. With
    `learn`, `logits` then holds the gradient of that sum."""
    assert logits.stride(1) == 1 and labels.is_contiguous() and (weights is None or weights.is_contiguous())
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        _rows[(len(logits),)](  # pyright: ignore[reportIndexIssue]
            logits, labels, labels if weights is None else weights, losses, logits.stride(0), logits.shape[1],
            scale, label_smoothing, z_loss, IGNORE=ignore, LEARN=learn, WEIGHTED=weights is not None,
            SMOOTHED=label_smoothing != 0.0, BLOCK=ROW_BLOCK, num_warps=ROW_WARPS,
        )  # fmt: skip
    return losses.sum()


@triton.jit
def _rows(
    logits, labels, weights, losses, stride, vocabulary, scale, smoothing, z_loss,
    IGNORE: tl.constexpr, LEARN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows × stride may pass 2³¹
    logits += row * stride
    if WEIGHTED:
        scale *= tl.load(weights + row)
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
            if SMOOTHED:
                plain += tl.where(inside, x, 0.0)
        peak = tl.max(top, 0)
        lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
        chosen = tl.load(logits + label).to(tl.float32)
        uniform = smoothing / vocabulary
        loss = lse - (1.0 - smoothing) * chosen + z_loss * lse * lse
        if SMOOTHED:
            loss -= uniform * tl.sum(plain, 0)
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


def scale_in_place(x: Tensor, scale: Tensor) -> None:
    """x times a number on the GPU, which is read before anything else: by 1 nothing is read or written."""
    assert x.is_contiguous()
    with torch.cuda.device(x.device):
        _scale[(triton.cdiv(x.numel(), BLOCK),)](x, scale, x.numel(), BLOCK=BLOCK, num_warps=8)  # pyright: ignore[reportIndexIssue]


@triton.jit
def _scale(x, scales, count, BLOCK: tl.constexpr):
    scale = tl.load(scales).to(tl.float32)
    if scale != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * scale
        tl.store(x + at, value.to(x.dtype.element_ty), mask=at < count)


def numbers(logits: Tensor, labels: Tensor, temperature: float, out: Tensor) -> None:
    """logits [n, V], each row dense, labels [n] -> out [4, n] of log_probs.py: z of the label, lse, Σ p z, likeliest or not."""
    assert logits.stride(1) == 1 and labels.is_contiguous() and out.stride(1) == 1 and out.dtype == torch.float32
    with torch.cuda.device(logits.device):
        _numbers[(len(logits),)](  # pyright: ignore[reportIndexIssue]
            logits, labels, out, logits.stride(0), out.stride(0), logits.shape[1], 1.0 / temperature, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _numbers(logits, labels, out, stride, between, vocabulary, sharpness, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    first = tl.full([BLOCK], 0, tl.int32)  # where a lane's maximum was seen first
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        inside = at < vocabulary
        z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32) * sharpness
        higher = tl.maximum(top, z)
        first = tl.where(z > top, at, first)
        shrink, weight = tl.exp(top - higher), tl.exp(z - higher)
        total = total * shrink + weight
        mean = mean * shrink + tl.where(weight > 0.0, weight * z, 0.0)
        top = higher
    peak = tl.max(top, 0)
    share = tl.exp(top - peak)
    whole = tl.sum(total * share, 0)
    likeliest = tl.min(tl.where(top == peak, first, vocabulary), 0)
    tl.store(out + row, tl.load(logits + label).to(tl.float32) * sharpness)
    tl.store(out + between + row, peak + tl.log(whole))
    tl.store(out + 2 * between + row, tl.sum(mean * share, 0) / whole)
    tl.store(out + 3 * between + row, tl.where(likeliest == label, 1.0, 0.0))


def gradient_in_place(logits: Tensor, labels: Tensor, temperature: float, slopes: list[Tensor]) -> None:
    """`logits` then holds its gradient. slopes: as log_probs.py has them, [n] each."""
    lse, mean, dlogprob, dentropy = (value.contiguous() for value in slopes)
    assert logits.stride(1) == 1 and labels.is_contiguous()
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    with torch.cuda.device(logits.device):
        _gradient[grid](  # pyright: ignore[reportIndexIssue]
            logits, labels, lse, mean, dlogprob, dentropy, logits.stride(0), logits.shape[1], 1.0 / temperature,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _gradient(logits, labels, lses, means, dlogprobs, dentropies, stride, vocabulary, sharpness, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    logits += row * stride
    dlogprob, dentropy = tl.load(dlogprobs + row), tl.load(dentropies + row)
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * sharpness
    grad = -tl.exp(z - tl.load(lses + row)) * (dlogprob + dentropy * (z - tl.load(means + row)))
    grad = tl.where(at == tl.load(labels + row), grad + dlogprob, grad)
    tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=inside)
