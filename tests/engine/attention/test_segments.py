"""Segments against the plainest attention: every mask we support, on whatever tokens a rank holds, forward and backward."""

from __future__ import annotations

import os
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ithaca.engine.attention.backends import Cpu, _calls
from ithaca.engine.attention.formula import Math
from ithaca.engine.attention.ring import ring_attend, ring_attend_backward
from ithaca.engine.attention.segments import (
    Running,
    attend,
    attend_backward,
    attend_backward_into,
    attend_into,
    plan_segments,
)
from ithaca.engine.batch import Batch
from ithaca.engine.mesh import Group
from ithaca.engine.sequence import Layout, document_bounds

from .masks import distance, plain_attention, visible

LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families
CPU = torch.device("cpu")
DOCUMENTS = {"one": None, "three": [[50, 1, 46], [30, 60, 7]]}


def tensors(rows, heads, kv_heads, q_len, k_len, size=8, value_dim=8):
    torch.manual_seed(0)
    shapes = (
        (heads, q_len, size),
        (kv_heads, k_len, size),
        (kv_heads, k_len, value_dim),
        (heads, q_len, value_dim),
    )
    return tuple(torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes)


def expected(q, k, v, dout, seen, scale, softcap=None):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = plain_attention(*leaves, seen, scale, softcap)
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


# kernel, soft cap, size of values; what both can do, and what only the formula can
FEATURES = [(Cpu, None, 8), (Cpu, None, 5), (Math, None, 11), (Math, 0.6, 8), (Math, 0.6, 5)]


@pytest.mark.parametrize(("kernel", "softcap", "value_dim"), FEATURES)
@pytest.mark.parametrize("chunk", [None, 1, 16, 33, 500] if LONG else [None, 1, 33])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_chunks_caps_and_values_in_one_call(documents, chunk, kernel, softcap, value_dim):
    lengths = DOCUMENTS[documents]
    bounds = None if lengths is None else [document_bounds(row, 101) for row in lengths]
    q, k, v, dout = tensors(2, 6, 2, 101, 101, value_dim=value_dim)
    tokens = torch.arange(101)
    for window in (None, 7, 40):
        plan = plan_segments([(0, 101)], [(0, 101)], bounds, window, CPU, chunk)
        each = [None, None] if bounds is None else bounds
        seen = torch.stack([visible(tokens, tokens, row, window, chunk) for row in each])
        out, lse, grads = expected(q, k, v, dout, seen, 0.3, softcap)
        got, got_lse = attend(kernel(), q, k, v, plan, 0.3, softcap=softcap)
        assert distance(got, out) < 1e-12 and distance(got_lse, lse) < 1e-12
        ours = attend_backward(kernel(), dout, q, k, v, got, got_lse, plan, 0.3, softcap=softcap)
        for mine, theirs in zip(ours, grads, strict=True):
            assert distance(mine, theirs) < 1e-12


def ring_of_two(length, documents, cases):
    """On each rank: how far output and gradients of its tokens are from the whole, for each case."""
    ring = Group(2, dist.get_rank(), dist.group.WORLD)
    layout = Layout(length, 1, 2)
    bounds = None if documents is None else [document_bounds(row, layout.padded) for row in documents]
    mine, tokens = layout.tokens(ring.rank, 0), torch.arange(layout.padded)
    apart = []
    for kernel, softcap, value_dim, window, chunk in cases:
        q, k, v, dout = tensors(2, 4, 2, layout.padded, layout.padded, value_dim=value_dim)
        each = [None, None] if bounds is None else bounds
        seen = torch.stack([visible(tokens, tokens, row, window, chunk) for row in each])
        out, lse, grads = expected(q, k, v, dout, seen, 0.5, softcap)
        plans = [
            plan_segments(layout.chunks(ring.rank), layout.chunks((ring.rank - step) % 2), bounds, window, CPU, chunk)
            for step in range(2)
        ]
        own = [t[:, :, mine] for t in (q, k, v)]
        got, got_lse = ring_attend(kernel(), *own, plans, 0.5, ring, softcap=softcap)
        ours = ring_attend_backward(
            kernel(), dout[:, :, mine], *own, got, got_lse, plans, 0.5, ring, softcap=softcap
        )  # fmt: skip
        pairs = zip((got, got_lse, *ours), (out, lse, *grads), strict=True)
        apart.append(max(distance(one, other[:, :, mine]) for one, other in pairs))
    return apart


CHUNKS = (None, 9, 25, 50) if LONG else (None, 9, 50)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_ring_with_chunks_caps_and_values(workers, documents):
    """Chunks of the mask end inside of those that a rank holds, and at their ends."""
    cases = [(*feature, window, chunk) for feature, window, chunk in product(FEATURES, (None, 5), CHUNKS)]
    for apart in workers.run(ring_of_two, 97, DOCUMENTS[documents], cases, world=2):
        assert len(apart) == len(cases) and max(apart) < 1e-12


# -- trees ------------------------------------------------------------------------------------------------------------------

# A prompt with three answers, of which the second goes on in two ways; a chain; a node that has lost its only token; a document
TREE = [(20, None), (9, 0), (7, 0), (11, 2), (1, 2), (13, 0), (8, None), (5, 6), (0, 7), (6, 8), (3, 8), (10, None)]


class Packed(Cpu):
    """Documents in one call, as kernels on a GPU have it."""

    packed = True

    def forward_packed(self, q, k, v, *, bounds, longest, scale, window, softcap=None):
        parts = [self.forward(*each, causal=True, scale=scale, window=window) for each in self._each(bounds, q, k, v)]
        assert max(out.shape[2] for out, _ in parts) == longest
        self.calls.forward -= len(parts) - 1
        return tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))

    def backward_packed(self, dout, q, k, v, out, lse, *, bounds, longest, scale, window, softcap=None):
        each = self._each(bounds, dout, q, k, v, out, lse)
        parts = [self.backward(*tensors, causal=True, scale=scale, window=window) for tensors in each]
        self.calls.backward -= len(parts) - 1
        return tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))

    def _each(self, bounds, *tensors):
        return [[t[:, :, a:b] for t in tensors] for a, b in pairwise(bounds.tolist())]


def seen_along_paths(nodes, length, window, chunk):
    """Which keys each token sees, from the list of tokens on the way to it."""
    seen, paths, at = torch.zeros(length, length, dtype=torch.bool), [], 0
    for size, parent in [*nodes, (length - sum(n for n, _ in nodes), None)]:
        above = [] if parent is None else paths[parent]
        paths.append(above + list(range(at, at + size)))
        for place, token in enumerate(paths[-1][len(above) :], len(above)):
            first = 0 if window is None else max(0, place - window + 1)
            first = first if chunk is None else max(first, place // chunk * chunk)
            seen[token, paths[-1][first : place + 1]] = True
        at += size
    return seen


@pytest.mark.parametrize("kernel", [Cpu, Packed])
@pytest.mark.parametrize("chunk", [None, 10, 23])  # answers begin where one of 10 does
@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_a_tree_in_one_call(window, chunk, kernel):
    lengths, parents = [n for n, _ in TREE], [parent for _, parent in TREE]
    plan = plan_segments([(0, 97)], [(0, 97)], [document_bounds(lengths, 97)], window, CPU, chunk, [parents])
    q, k, v, dout = tensors(1, 6, 2, 97, 97)
    out, lse, grads = expected(q, k, v, dout, seen_along_paths(TREE, 97, window, chunk)[None], 0.3)
    used = kernel()
    got, got_lse = attend(used, q, k, v, plan, 0.3)
    assert distance(got, out) < 1e-12 and distance(got_lse, lse) < 1e-12
    for mine, theirs in zip(attend_backward(used, dout, q, k, v, got, got_lse, plan, 0.3), grads, strict=True):
        assert distance(mine, theirs) < 1e-12
    squares = [s for s in plan.segments if s.causal]
    rectangles = len(plan.segments) - len(squares)
    calls = 1 + rectangles if kernel is Packed else len(plan.segments)
    assert (used.calls.forward, used.calls.backward) == (calls, calls)
    if window is chunk is None:
        assert len(squares) == 12 and rectangles == 4, "a rectangle for each node with children and tokens"


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("ring", [2, 3])
def test_a_tree_around_a_ring(ring, window, chunk):
    layout = Layout(93, 1, ring)
    other = [(93, None)]
    bounds = [document_bounds([n for n, _ in nodes], layout.padded) for nodes in (TREE, other)]
    parents = [[parent for _, parent in TREE], []]
    seen = torch.stack([seen_along_paths(nodes, layout.padded, window, chunk) for nodes in (TREE, other)])
    q, k, v, dout = tensors(2, 4, 2, layout.padded, layout.padded)
    out, lse, grads = expected(q, k, v, dout, seen, 0.5)
    total = [torch.zeros_like(t) for t in (q, k, v)]
    for rank in range(ring):
        mine, plans = layout.tokens(rank, 0), []
        running = Running(q[:, :, mine])
        for other_rank in range(ring):
            chunks = layout.chunks(rank), layout.chunks(other_rank)
            plans.append(plan_segments(*chunks, bounds, window, CPU, chunk, parents))
            theirs = layout.tokens(other_rank, 0)
            attend_into(running, Cpu(), q[:, :, mine], k[:, :, theirs], v[:, :, theirs], plans[-1], 0.5)
        assert distance(running.out, out[:, :, mine]) < 1e-12 and distance(running.lse, lse[:, :, mine]) < 1e-12
        for other_rank, plan in enumerate(plans):
            theirs = layout.tokens(other_rank, 0)
            own = (t[:, :, mine] for t in (dout, q)), (t[:, :, theirs] for t in (k, v))
            parts = tuple(torch.zeros_like(t) for t in (q[:, :, mine], k[:, :, theirs], v[:, :, theirs]))
            attend_backward_into(parts, Cpu(), *own[0], *own[1], running.out, running.lse, plan, 0.5)
            for grad, part, where in zip(total, parts, (mine, theirs, theirs), strict=True):
                grad[:, :, where] += part
    for mine, theirs in zip(total, grads, strict=True):
        assert distance(mine, theirs) < 1e-12


def test_answers_to_a_prompt_share_its_rectangle():
    """Sixteen of them: what they see of the prompt is one call, under a window one for each that reaches it."""
    lengths, parents = [100] + [10] * 16, [None] + [0] * 16
    for window, rectangles in ((None, 1), (50, 16)):
        plan = plan_segments([(0, 260)], [(0, 260)], [document_bounds(lengths, 260)], window, CPU, None, [parents])
        assert len(plan.segments) == 17 + rectangles
        assert plan.bounds is not None and len(plan.bounds) == 18 and plan.longest == 100 and not plan.direct


def test_plans_are_kept_by_window_and_chunk():
    nothing = torch.empty(0)
    mesh = SimpleNamespace(ring=Group(2, 1, None), device=CPU)
    batch = Batch(nothing, nothing, nothing, None, Layout(100, 1, 2), [[60, 40]], 60, 1, 100)
    kinds = [(None, None), (8, None), (None, 8), (8, 8)]
    plans = [batch.plans_for(window, mesh, chunk) for window, chunk in kinds]
    assert [len(each) for each in plans] == [2] * 4
    assert all(batch.plans_for(window, mesh, chunk) is made for (window, chunk), made in zip(kinds, plans, strict=True))
    assert batch.plans_for(8, mesh) is plans[1] and len({id(each) for each in plans}) == 4
    layout = batch.layout
    right = plan_segments(layout.chunks(1), layout.chunks(0), [[(0, 60), (60, 100)]], None, CPU, 8)
    assert plans[2][1] == right != plans[0][1]


def test_chunks_of_one_row_are_documents_of_one_call():
    """A kernel that packs documents packs chunks, too."""
    plan = plan_segments([(0, 100)], [(0, 100)], [[(0, 30), (30, 100)]], None, CPU, 40)
    assert plan.bounds is not None and plan.bounds.tolist() == [0, 30, 70, 100] and plan.longest == 40


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
