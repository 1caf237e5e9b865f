"""The plainest attention there is, for comparison: whole score matrix, explicit mask, float64, autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    tokens_q: Tensor, tokens_k: Tensor, bounds: list[tuple[int, int]] | None, window: int | None, chunk: int | None = None
) -> Tensor:  # fmt: skip
    """Which key a query may see: causal, same document, same chunk of it, within the window. Tokens are indices of a sequence."""
    i, j = tokens_q[:, None], tokens_k[None]
    seen = j <= i
    if window is not None:
        seen &= i - j < window
    number, first = (torch.zeros(int(max(tokens_q.max(), tokens_k.max())) + 1, dtype=torch.int64) for _ in range(2))
    for n, (a, b) in enumerate(bounds or []):
        number[a:b], first[a:b] = n, a
    seen &= number[tokens_q][:, None] == number[tokens_k][None]
    if chunk is not None:
        seen &= (i - first[i]) // chunk == (j - first[j]) // chunk
    return seen


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """seen [B, Sq, Sk]. -> out, lse in float64"""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None].to(q.device), float("-inf"))
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1.0))  # gradients may be exactly 0 (a window of one token)
