"""What kernels and allocators take beyond what was asked for, as read from their sources. A plan counts it, a dry run too."""

from __future__ import annotations

BLOCK = 128  # rows that kernels round the sequence up to


def pinned(nbytes: int) -> int:
    """torch's own pinned memory comes in powers of two (a store pins its buffers by itself, as they are)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def attention_workspace(kernel: str, direction: str, shape: tuple[int, ...], kv_heads: int, processors: int = 0) -> int:
    """Bytes of one call on q of `shape` [B, H, S, D] and as many keys. processors: of the GPU, under torch's deterministic
    algorithms, where torch's flash adds dq up in as many copies as there are processors for each head."""
    rows, heads, tokens, width = shape
    tokens = -(-tokens // BLOCK) * BLOCK
    queries, keys = rows * heads * tokens, rows * kv_heads * tokens
    if direction == "forward" or kernel == "cpu":
        return 0
    sums = 4 * queries * width  # dq is added up in fp32
    if kernel == "fa4":  # and two numbers a row; with shared KV heads dk and dv are added up in fp32 as well
        return sums + 8 * queries + (8 * keys * width if heads > kv_heads else 0)
    # cuDNN and torch's flash: a number a row; with shared KV heads dk and dv of every query head in bf16
    inside = sums + 4 * queries + (4 * queries * width if heads > kv_heads else 0)
    if kernel == "flash" and processors:
        inside += (-(-processors // (rows * heads)) - 1) * sums
    if kernel == "flash" and heads > 1:
        # it wants heads inside tokens, and copies output and its gradient into that order
        inside += 4 * queries * width
    return inside
