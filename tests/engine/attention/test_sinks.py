"""Sinks against a softmax with one more column, which has no value."""

from __future__ import annotations

import pytest
import torch

from ithaca.engine.attention.backends import Cpu, Cudnn
from ithaca.engine.attention.formula import Math
from ithaca.engine.attention.sinks import sink_gradient, with_sink

from .masks import distance, visible

SEEN = visible(torch.arange(33), torch.arange(33), None, None)


def tensors():
    made = torch.Generator().manual_seed(0)
    shapes = ((6, 33, 8), (2, 33, 8), (2, 33, 8), (6, 33, 8))
    q, k, v, dout = (torch.randn(2, *shape, generator=made, dtype=torch.float64) for shape in shapes)
    return q, k, v, dout, torch.linspace(-3.0, 4.0, 6, dtype=torch.float64)


def with_a_column(q, k, v, sink):
    k, v = (t.repeat_interleave(3, 1) for t in (k, v))
    scores = (q @ k.mT * 0.5).masked_fill(~SEEN, -torch.inf)
    column = sink[:, None, None].expand(2, 6, 33, 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", [Cpu, Math])
def test_output_and_every_gradient(kernel):
    q, k, v, dout, sink = tensors()
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    right, right_lse = with_a_column(*leaves)
    grads = torch.autograd.grad(right, leaves, dout)
    right, right_lse = right.detach(), right_lse.detach()
    how = dict(causal=True, scale=0.5, window=None)
    out, lse = with_sink(*kernel().forward(q, k, v, **how), sink)
    assert distance(out, right) < 1e-10 and distance(lse, right_lse) < 1e-10
    ours = *kernel().backward(dout, q, k, v, out, lse, **how), sink_gradient(dout, out, lse, sink)
    for mine, theirs in zip(ours, grads, strict=True):
        assert mine.shape == theirs.shape and distance(mine, theirs) < 1e-10


def test_one_score_where_it_is_not_the_whole_row():
    """cuDNN takes no block of one query and one key, so it is done here: its weight is what the row's lse says."""
    q, k, v, dout, sink = (t.float()[..., :1, :] if t.dim() == 4 else t.float() for t in tensors())
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    score = (leaves[0] * leaves[1].repeat_interleave(3, 1)).sum(-1) * 0.5
    share = (score - torch.logaddexp(score, sink[:, None])).exp()[..., None]
    grads = torch.autograd.grad(share * leaves[2].repeat_interleave(3, 1), leaves, dout)
    how = dict(causal=False, scale=0.5, window=None)
    out, lse = with_sink(*Cudnn().forward(q, k, v, **how), sink)
    for mine, theirs in zip(Cudnn().backward(dout, q, k, v, out, lse, **how), grads, strict=True):
        assert distance(mine, theirs) < 1e-6


def test_half_precision_is_rounded_once():
    q, k, v, dout, sink = tensors()
    out, lse = Math().forward(q, k, v, causal=True, scale=0.5, window=None)
    half, half_lse = with_sink(out.bfloat16(), lse.float(), sink.bfloat16())
    right, right_lse = with_sink(out.bfloat16().double(), lse, sink.bfloat16().double())
    assert half.dtype == torch.bfloat16 and half_lse.dtype == torch.float32
    assert distance(half_lse, right_lse) < 1e-6 and distance(half, right) < 2e-3
    grad = sink_gradient(dout.bfloat16(), half, half_lse, sink.bfloat16())
    right_grad = sink_gradient(dout.bfloat16().double(), half.double(), half_lse.double(), sink.bfloat16().double())
    assert grad.dtype == torch.float32 and distance(grad, right_grad) < 1e-6


def test_rows_that_saw_nothing_but_the_sink():
    q, k, v, dout, sink = tensors()
    out, lse = Math().forward(q, k, v, causal=True, scale=0.5, window=None)
    seeing = with_sink(out.clone(), lse, sink)
    out[:, :, 5], lse[:, :, 5] = torch.nan, -torch.inf
    blind = with_sink(out, lse, sink)
    assert bool((blind[0][:, :, 5] == 0).all()) and torch.equal(blind[1][:, :, 5], sink.expand(2, 6))
    rest = [row for row in range(33) if row != 5]
    assert torch.equal(blind[0][:, :, rest], seeing[0][:, :, rest])
    grad = sink_gradient(dout, *blind, sink)
    assert distance(grad, sink_gradient(dout[:, :, rest], *(t[:, :, rest] for t in seeing), sink)) < 1e-12
