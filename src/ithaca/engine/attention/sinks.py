"""Attention sinks: a learned score of each head that every query sees beside its keys, and that has no value (gpt-oss).

A sink is one more block of a ring: it adds to the sum of weights and nothing to the output, so no kernel needs to know of it.

    lse' = logaddexp(lse, sink)        out' = out · exp(lse - lse')        dsink = -Σ exp(sink - lse') · rowsum(dout · out')

The gradients of q, k and v are those of the kernel's own backward, given out' and lse'. In fp32 (fp64 for fp64), a head and some
tokens at a time, and the output in place: no more memory than there was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...base.holding import module_holds
from ..tiling import tiles

module_holds(__name__, "attention")
TOKENS = 2**16  # widened at a time


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D], which is written over, and lse [B, H, S] of all keys, sink [H] -> out' and lse'. A row that saw no key has
    lse -inf: its output is 0."""
    both = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    for head in range(out.shape[1]):
        share = (lse[:, head] - both[:, head]).exp()
        blind = lse[:, head] == -torch.inf  # such a row may hold anything
        for tokens in tiles(out.shape[2], TOKENS):
            part = out[:, head, tokens]
            part.copy_((part * share[:, tokens, None]).masked_fill_(blind[:, tokens, None], 0.0))
    return out, both


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """dsink [H] in the dtype of lse, from out' and lse'. Of the tokens given: ranks with others add theirs."""
    grad = torch.empty(sink.shape, dtype=lse.dtype, device=lse.device)
    for head in range(out.shape[1]):
        share = (sink[head].to(lse.dtype) - lse[:, head]).exp()
        parts = []
        for tokens in tiles(out.shape[2], TOKENS):
            along = (dout[:, head, tokens].to(lse.dtype) * out[:, head, tokens]).sum(-1)
            parts.append(-(share[:, tokens] * along).sum())
        grad[head] = torch.stack(parts).sum()
    return grad
