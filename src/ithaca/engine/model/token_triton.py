"""Triton kernels of the per-token work, bit for bit what torch's operators make of bf16, but for silu's exponential.

Every product and sum is rounded to bf16 where an operator would have written it. Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ...base.holding import CALLER, module_holds

BLOCK = 4096  # numbers of a program
PROGRAMS = 1056  # of a norm's backward: each sums its rows' part of the weight's gradient
module_holds(__name__, CALLER)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [B, t, heads, D] of any layout with dense D, cos and sin [B or 1, t, D] -> the same, dense."""
    rows, tokens, heads, size = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = triton.next_power_of_2(size // 2)
    vectors = max(1, BLOCK // (2 * half))  # of a program
    with torch.cuda.device(x.device):
        _rotate[(triton.cdiv(rows * tokens * heads, vectors),)](  # pyright: ignore[reportIndexIssue]
            x, cos, sin, out, rows * tokens * heads, tokens, heads, size // 2,
            x.stride(0), x.stride(1), x.stride(2), cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
            BACK=back, VECTORS=vectors, HALF=half, num_warps=4, enable_fp_fusion=False,  # a fused sum rounds once less
        )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x, cos, sin, out, vectors, tokens, heads, half, of_row, of_token, of_head, of_cos_row, of_cos_token,
    BACK: tl.constexpr, VECTORS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)[:, None]  # rows × strides may pass 2³¹
    column = tl.arange(0, HALF)[None, :]
    inside = (vector < vectors) & (column < half)
    head, place = vector % heads, vector // heads
    token, row = place % tokens, place // tokens
    at = row * of_row + token * of_token + head * of_head + column
    angle = row * of_cos_row + token * of_cos_token + column
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    one = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    two = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    to = vector * 2 * half + column
    tl.store(out + to, one.to(dtype), mask=inside)
    tl.store(out + to + half, two.to(dtype), mask=inside)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """x and update [..., d] -> their sum (x, if there is no update), its RMSNorm, and one over the root mean square of each row."""
    shape, width = x.shape, x.shape[-1]
    x = x.contiguous()
    total = x if update is None else torch.empty_like(x)
    update = x if update is None else update.contiguous()
    normed = torch.empty_like(x)
    rows = x.numel() // width
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _add_norm[(rows,)](  # pyright: ignore[reportIndexIssue]
            x, update, weight, total, normed, scales, width, epsilon,
            ADDS=total is not x, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total.view(shape), normed.view(shape), scales


@triton.jit
def _add_norm(
    xs, updates, weights, totals, normeds, scales, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    dtype: tl.constexpr = normeds.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x = (x + tl.load(updates + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(totals + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)
    weight = tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normeds + at, (x * scale * weight).to(dtype), mask=inside)
    tl.store(scales + row, scale)


def norm_backward(
    total: Tensor, weight: Tensor, scales: Tensor, dnormed: Tensor, dtotal: Tensor | None, learn: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of add_norm's sum, by its norm and, where it is used beside that, by itself (dtotal); and that of the weight."""
    width = total.shape[-1]
    total, dnormed = total.contiguous(), dnormed.contiguous()
    dx = torch.empty_like(total)
    rows = total.numel() // width
    count = min(rows, PROGRAMS)
    sums = torch.empty(count if learn else 0, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(total.device):
        _norm_backward[(count,)](  # pyright: ignore[reportIndexIssue]
            total, weight, scales, dnormed, dnormed if dtotal is None else dtotal.contiguous(), dx, sums, rows, width,
            ADDS=dtotal is not None, LEARN=learn, PROGRAMS=count, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return dx, sums.sum(0).to(weight.dtype) if learn else None


@triton.jit
def _norm_backward(
    totals, weights, scales, dnormeds, dtotals, dxs, sums, rows, width,
    ADDS: tl.constexpr, LEARN: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # rows × width may pass 2³¹
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, PROGRAMS):
        at = row * width + column
        scale = tl.load(scales + row)
        unit = tl.load(totals + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(dnormeds + at, mask=inside, other=0.0).to(tl.float32)
        if LEARN:
            dweight += grad * unit
        grad *= weight
        dx = (grad - unit * (tl.sum(grad * unit, 0) / width)) * scale
        if ADDS:
            dx += tl.load(dtotals + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dxs + at, dx.to(dxs.dtype.element_ty), mask=inside)
    if LEARN:
        tl.store(sums + program * width + column, dweight, mask=inside)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of [..., i], whose rows may lie apart -> dense"""
    shape = gate.shape
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    if not gate.stride(1) == up.stride(1) == 1 or gate.stride(0) != up.stride(0):
        gate, up = gate.contiguous(), up.contiguous()
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device(gate.device):
        _product[(rows, triton.cdiv(width, block))](  # pyright: ignore[reportIndexIssue]
            gate, up, out, gate.stride(0), width, BLOCK=block, num_warps=4
        )
    return out.view(shape)


@triton.jit
def _product(gates, ups, out, stride, width, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gates + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(dtype), mask=inside)


def product_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product, and the gradients of gate and up. That of gate is written over `grad`."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    out, dup = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device(gate.device):
        _product_backward[(triton.cdiv(gate.numel(), BLOCK),)](  # pyright: ignore[reportIndexIssue]
            gate, up, grad, out, dup, gate.numel(), BLOCK=BLOCK, num_warps=8
        )
    return out, grad, dup


@triton.jit
def _product_backward(gates, ups, grads, out, dups, count, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + at, (active * up).to(dtype), mask=inside)
    tl.store(dups + at, (grad * active).to(dtype), mask=inside)
    dactive = (grad * up).to(dtype).to(tl.float32)
    tl.store(grads + at, (dactive * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=inside)


def expert_backward(wide: Tensor, dproduct: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """experts.py's, of [n, 2i], [n, i] and [n]."""
    wide, dproduct, weight = wide.contiguous(), dproduct.contiguous(), weight.contiguous()
    rows, width = dproduct.shape
    product, dwide = torch.empty_like(dproduct), torch.empty_like(wide)
    dweight = torch.empty(rows, dtype=torch.float32, device=wide.device)
    block = min(2048, triton.next_power_of_2(width))
    with torch.cuda.device(wide.device):
        _expert_backward[(rows,)](  # pyright: ignore[reportIndexIssue]
            wide, dproduct, weight, product, dwide, dweight, width, BLOCK=block, num_warps=4
        )
    return product, dwide, dweight


@triton.jit
def _expert_backward(wides, dproducts, weights, products, dwides, dweights, width, BLOCK: tl.constexpr):
    dtype: tl.constexpr = products.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        at, beside = row * width + column, row * 2 * width + column
        gate = tl.load(wides + beside, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(wides + beside + width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dproducts + at, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        active = gate * share
        total += grad * active * up
        grad *= weight
        tl.store(products + at, (active * up * weight).to(dtype), mask=inside)
        tl.store(dwides + beside, (grad * up * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=inside)
        tl.store(dwides + beside + width, (grad * active).to(dtype), mask=inside)
    tl.store(dweights + row, tl.sum(total, 0))


def combine(copies: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """experts.py's: copies [n, d], place and weights [t, k] -> [t, d], summed in float32."""
    copies, place = copies.contiguous(), place.contiguous()
    weights = None if weights is None else weights.contiguous()
    (tokens, count), width = place.shape, copies.shape[1]
    out = torch.empty(tokens, width, dtype=copies.dtype, device=copies.device)
    block = min(2048, triton.next_power_of_2(width))
    with torch.cuda.device(copies.device):
        _combine[(tokens, triton.cdiv(width, block))](  # pyright: ignore[reportIndexIssue]
            copies, place, place if weights is None else weights, out, width,
            COUNT=count, WEIGHTED=weights is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _combine(copies, places, weights, out, width, COUNT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(COUNT):
        place = tl.load(places + token * COUNT + at)
        copy = tl.load(copies + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            copy *= tl.load(weights + token * COUNT + at).to(tl.float32)
        total += copy
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
