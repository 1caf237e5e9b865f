"""What kernels allocate inside, beyond their results, as read from their sources. A plan counts it, a dry run allocates it."""

from __future__ import annotations

BLOCK = 128  # rows that kernels round the sequence up to


def attention_workspace(kernel: str, direction: str, shape: tuple[int, ...], kv_heads: int) -> int:
    """Bytes of one call on q of `shape` [B, H, S, D] and as many keys."""
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
    if kernel == "flash" and heads > 1:
        # it wants heads inside tokens, and copies output and its gradient into that order
        inside += 4 * queries * width
    return inside
