"""Segments against the plainest attention: every mask we support, on whatever tokens a rank holds, forward and backward."""

from __future__ import annotations

import pytest
import torch

from ithaca.engine.attention.backends import Cpu, _calls
from ithaca.engine.attention.segments import Running, attend, attend_backward, attend_into, plan_segments
from ithaca.engine.sequence import Layout, document_bounds

from .masks import distance, plain_attention, visible

CPU = torch.device("cpu")
DOCUMENTS = {"one": None, "three": [[50, 1, 46], [30, 60, 7]]}


def tensors(rows, heads, kv_heads, q_len, k_len, size=8):
    torch.manual_seed(0)
    shapes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len), (heads, q_len))
    return tuple(torch.randn(rows, h, s, size, dtype=torch.float64) for h, s in shapes)


def expected(q, k, v, dout, seen, scale):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = plain_attention(*leaves, seen, scale)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("window", [None, 1, 7, 40, 200])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_one_call_sees_what_it_may_and_nothing_else(documents, window):
    lengths = DOCUMENTS[documents]
    bounds = None if lengths is None else [document_bounds(row, 101) for row in lengths]
    plan = plan_segments([(0, 101)], [(0, 101)], bounds, window, CPU)
    q, k, v, dout = tensors(2, 6, 2, 101, 101)
    tokens = torch.arange(101)
    seen = torch.stack([visible(tokens, tokens, None if bounds is None else bounds[row], window) for row in range(2)])
    out, lse, grads = expected(q, k, v, dout, seen, 0.3)
    kernel = Cpu()
    got, got_lse = attend(kernel, q, k, v, plan, 0.3)
    assert distance(got, out) < 1e-12 and distance(got_lse, lse) < 1e-12
    for mine, theirs in zip(attend_backward(kernel, dout, q, k, v, got, got_lse, plan, 0.3), grads, strict=True):
        assert distance(mine, theirs) < 1e-12


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("ring", [2, 3])
def test_ring_steps_add_up_to_the_whole(ring, documents, window):
    """Each rank's zigzag chunks meet every other rank's, and the merged result is the full attention."""
    layout = Layout(97, 1, ring)
    lengths = DOCUMENTS[documents]
    bounds = None if lengths is None else [document_bounds(row, layout.padded) for row in lengths]
    q, k, v, dout = tensors(2, 4, 2, layout.padded, layout.padded)
    tokens = torch.arange(layout.padded)
    seen = torch.stack([visible(tokens, tokens, None if bounds is None else bounds[row], window) for row in range(2)])
    out, lse, grads = expected(q, k, v, dout, seen, 0.5)
    kernel, total = Cpu(), [torch.zeros_like(t) for t in (q, k, v)]
    for rank in range(ring):
        mine = layout.tokens(rank, 0)
        running = Running(q[:, :, mine])
        plans = {}
        for other in range(ring):
            plans[other] = plan_segments(layout.chunks(rank), layout.chunks(other), bounds, window, CPU)
            theirs = layout.tokens(other, 0)
            attend_into(running, kernel, q[:, :, mine], k[:, :, theirs], v[:, :, theirs], plans[other], 0.5)
        assert distance(running.out, out[:, :, mine]) < 1e-12 and distance(running.lse, lse[:, :, mine]) < 1e-12
        for other, plan in plans.items():
            theirs = layout.tokens(other, 0)
            if plan.segments:
                parts = attend_backward(
                    kernel, dout[:, :, mine], q[:, :, mine], k[:, :, theirs], v[:, :, theirs], running.out, running.lse,
                    plan, 0.5,
                )  # fmt: skip
                for grad, part, where in zip(total, parts, (mine, theirs, theirs), strict=True):
                    grad[:, :, where] += part
    for mine, theirs in zip(total, grads, strict=True):
        assert distance(mine, theirs) < 1e-12


def test_work_follows_the_square_of_document_lengths():
    """Ten documents of 100 tokens cost a tenth of one document of 1,000."""

    def cells(plan):
        return sum((s.q[1] - s.q[0]) * (s.k[1] - s.k[0]) for s in plan.segments)

    whole = plan_segments([(0, 1000)], [(0, 1000)], None, None, CPU)
    packed = plan_segments([(0, 1000)], [(0, 1000)], [document_bounds([100] * 10, 1000)], None, CPU)
    assert cells(whole) == 1000**2 and cells(packed) == 10 * 100**2


def test_zigzag_balances_the_causal_triangle():
    layout = Layout(960, 1, 4)
    loads = []
    for rank in range(4):
        mine = layout.tokens(rank, 0)
        loads.append(sum(int((layout.tokens(o, 0)[None] <= mine[:, None]).sum()) for o in range(4)))
    assert max(loads) - min(loads) <= 960  # one row of a million cells


@pytest.mark.parametrize(("length", "ulysses", "ring"), [(1021, 4, 2), (5, 8, 1), (5, 2, 4), (1, 1, 1), (64, 3, 3)])
def test_every_token_is_on_exactly_one_rank(length, ulysses, ring):
    layout = Layout(length, ulysses, ring)
    held = torch.cat([layout.tokens(r, u) for r in range(ring) for u in range(ulysses)])
    assert held.sort().values.tolist() == list(range(layout.padded))
    assert layout.padded >= length and layout.padded - length < 2 * ring * ulysses * ring


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(1, 8, 2), (3, 4, 4), (2, 6, 1), (1, 1, 1)])
@pytest.mark.parametrize("limit", [101, 250, 401, 10**6])
def test_calls_cover_every_head_once_and_stay_small(rows, heads, kv_heads, limit):
    """How cuDNN's calls are cut where a tensor has too many elements to address."""
    q, k = torch.zeros(rows, heads, 10, 10), torch.zeros(rows, kv_heads, 10, 10)
    seen, group = torch.zeros(rows, heads, dtype=torch.long), heads // kv_heads
    owner = torch.arange(kv_heads).repeat_interleave(group).expand(rows, -1)
    for a, b in _calls(q, k, limit):
        seen[a] += 1
        assert max(q[a].numel(), k[b].numel()) < limit
        owned = {int(h) for h in owner[a].flatten()}
        assert owned == set(range(kv_heads)[b[1]])
    assert bool((seen == 1).all())


def test_a_head_that_no_call_can_address():
    with pytest.raises(ValueError, match=r"one head of 10 tokens × 10 .*Stack\.ring"):
        _calls(torch.zeros(1, 2, 10, 10), torch.zeros(1, 1, 10, 10), 100)
