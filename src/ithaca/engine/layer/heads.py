"""Heads between two layouts: tokens first [B, t, H, D], as projections make them, and heads first [n, B, t, D], as exchanges
send them. A stage holds heads of every rank, such as 0, 4, 8, ... of 32, or the same KV head for several ranks, so a copy
goes by runs of heads in equal steps: one call for most stages, not one per head.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor


def to_heads_first(value: Tensor, heads: list[int], into: Tensor) -> None:
    """into[slot] = value[:, :, heads[slot]]"""
    for slots, run in _runs(tuple(heads)):
        into[slots] = value[:, :, run].permute(2, 0, 1, 3)


def to_tokens_first(value: Tensor, heads: list[int], into: Tensor) -> None:
    """into[:, :, heads[slot]] = value[slot]"""
    for slots, run in _runs(tuple(heads)):
        into[:, :, run] = value[slots].permute(1, 2, 0, 3)


@lru_cache(maxsize=4096)
def _runs(heads: tuple[int, ...]) -> tuple[tuple[slice, slice], ...]:
    """(slots, heads) of equal ascending steps that together make up `heads`."""
    runs, start = [], 0
    while start < len(heads):
        stop = start + 1
        step = heads[stop] - heads[start] if stop < len(heads) else 1
        if step > 0:
            while stop < len(heads) and heads[stop] - heads[stop - 1] == step:
                stop += 1
        step = max(step, 1)
        runs.append((slice(start, stop), slice(heads[start], heads[stop - 1] + 1, step)))
        start = stop
    return tuple(runs)
