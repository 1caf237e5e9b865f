"""CUDA kernels against the plainest attention in float64: every mask, GQA, forward and backward."""

from __future__ import annotations

import pytest
import torch

from ithaca.base.kernels import SCORES
from ithaca.engine.attention.backends import BACKENDS
from ithaca.engine.attention.choice import Kernels, Need
from ithaca.engine.attention.kernel import merge
from ithaca.engine.attention.segments import Running, attend, attend_backward, attend_into, plan_segments
from ithaca.engine.attention.sinks import sink_gradient, with_sink
from ithaca.engine.sequence import Layout, document_bounds

from ..engine.attention.masks import distance, plain_attention, visible
from ..engine.attention.test_segments import TREE, seen_along_paths

pytestmark = pytest.mark.gpu
KERNELS = [name for name in BACKENDS if name != "cpu"]
LIMIT = 5e-3  # a bf16 kernel rounds its probabilities and its output


def kernel(name: str, head_dim: int, windowed: bool, dtype=torch.bfloat16, **more):
    made = BACKENDS[name]()
    reason = made.problem(torch.device("cuda", 0), dtype, head_dim, windowed, **more)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    return made


def tensors(rows, heads, kv_heads, length, size, value_dim=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    value_dim = value_dim or size
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_dim), (heads, value_dim))
    return tuple(torch.randn(rows, h, length, d, device="cuda", dtype=dtype) for h, d in shapes)


def expected(q, k, v, dout, seen, scale, softcap=None):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = plain_attention(*leaves, seen, scale, softcap)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout.double())


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "lengths", [None, [[300, 1, 212]], [[300, 1, 212], [13, 400, 100]]], ids=["one", "packed", "rows"]
)
@pytest.mark.parametrize("name", KERNELS)
def test_masks(name, lengths, window, size):
    made = kernel(name, size, window is not None)
    rows = 1 if lengths is None else len(lengths)
    bounds = None if lengths is None else [document_bounds(row, 513) for row in lengths]
    plan = plan_segments([(0, 513)], [(0, 513)], bounds, window, torch.device("cuda", 0))
    q, k, v, dout = tensors(rows, 6, 2, 513, size)
    tokens = torch.arange(513)
    seen = torch.stack(
        [visible(tokens, tokens, None if bounds is None else bounds[row], window) for row in range(rows)]
    )
    out, lse, grads = expected(q, k, v, dout, seen, size**-0.5)
    got, got_lse = attend(made, q, k, v, plan, size**-0.5)
    assert got_lse.dtype == torch.float32 and got_lse.shape == q.shape[:3]
    assert distance(got, out) < LIMIT and distance(got_lse, lse) < 1e-5
    for mine, theirs in zip(attend_backward(made, dout, q, k, v, got, got_lse, plan, size**-0.5), grads, strict=True):
        assert distance(mine, theirs) < LIMIT


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [64, 100, 256, 257])
def test_cudnn_by_query_tiles(tile, causal):
    made = kernel("cudnn", 64, False)
    made.query_tile = tile
    q, k, v, dout = tensors(2, 4, 2, 513, 64)
    tokens = torch.arange(513)
    seen = visible(tokens, tokens, None, None) if causal else torch.ones(513, 513, dtype=torch.bool)
    out, lse, _ = expected(q, k, v, dout, seen.expand(2, -1, -1), 0.125)
    got, got_lse = made.forward(q, k, v, causal=causal, scale=0.125, window=None)
    assert distance(got, out) < LIMIT and distance(got_lse, lse) < 1e-5


@pytest.mark.parametrize("limit", [70_000, 140_000, 300_000])
def test_cudnn_in_several_calls(limit):
    """As it does above 2³¹ elements: some query heads of a KV head in one call, the others in the next."""
    made = kernel("cudnn", 64, False)
    q, k, v, dout = tensors(2, 6, 2, 513, 64)
    whole, whole_lse = made.forward(q, k, v, causal=True, scale=0.125, window=None)
    grads = made.backward(dout, q, k, v, whole, whole_lse, causal=True, scale=0.125, window=None)
    made.limit = limit
    out, lse = made.forward(q, k, v, causal=True, scale=0.125, window=None)
    assert distance(out, whole) < 1e-3 and distance(lse, whole_lse) < 1e-6
    parts = made.backward(dout, q, k, v, out, lse, causal=True, scale=0.125, window=None)
    for mine, theirs in zip(parts, grads, strict=True):
        assert distance(mine, theirs) < LIMIT


@pytest.mark.parametrize("layouts", ["heads first", "tokens first", "mixed"])
@pytest.mark.parametrize("name", KERNELS)
def test_strides_do_not_matter(name, layouts):
    """cuDNN's backward trusts one set of strides; a mixture must still be right."""
    made = kernel(name, 64, False)
    q, k, v, dout = tensors(2, 4, 2, 256, 64)
    tokens = torch.arange(256)
    seen = visible(tokens, tokens, None, None).expand(2, -1, -1)
    out, _, grads = expected(q, k, v, dout, seen, 0.125)

    def tokens_first(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    if layouts != "heads first":
        q, k, v = tokens_first(q), tokens_first(k), tokens_first(v)
    if layouts == "tokens first":
        dout = tokens_first(dout)
    got, lse = made.forward(q, k, v, causal=True, scale=0.125, window=None)
    if layouts == "mixed":
        got = got.contiguous()
    assert distance(got, out) < LIMIT
    for mine, theirs in zip(
        made.backward(dout, q, k, v, got, lse, causal=True, scale=0.125, window=None), grads, strict=True
    ):
        assert distance(mine, theirs) < LIMIT


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", KERNELS)
def test_ring_merge(name, window):
    """Blocks of a zigzag ring merge to the whole, in fp32."""
    made = kernel(name, 64, window is not None)
    layout = Layout(500, 1, 2)
    bounds = [document_bounds([200, 300], layout.padded)]
    q, k, v, dout = tensors(1, 4, 2, layout.padded, 64)
    tokens = torch.arange(layout.padded)
    out, lse, grads = expected(q, k, v, dout, visible(tokens, tokens, bounds[0], window)[None], 0.125)
    total = [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    for rank in range(2):
        mine = layout.tokens(rank, 0).cuda()
        running, plans = Running(q[:, :, mine]), []
        for other in range(2):
            theirs = layout.tokens(other, 0).cuda()
            plan = plan_segments(layout.chunks(rank), layout.chunks(other), bounds, window, q.device)
            attend_into(running, made, q[:, :, mine], k[:, :, theirs], v[:, :, theirs], plan, 0.125)
            plans.append((theirs, plan))
        assert distance(running.out, out[:, :, mine]) < LIMIT and distance(running.lse, lse[:, :, mine]) < 1e-5
        for theirs, plan in plans:
            if plan.segments:
                parts = attend_backward(
                    made, dout[:, :, mine], q[:, :, mine], k[:, :, theirs], v[:, :, theirs],
                    running.out.bfloat16(), running.lse, plan, 0.125,
                )  # fmt: skip
                for grad, part, where in zip(total, parts, (mine, theirs, theirs), strict=True):
                    grad[:, :, where] += part
    for mine, theirs in zip(total, grads, strict=True):
        assert distance(mine, theirs) < LIMIT


@pytest.mark.parametrize("name", KERNELS)
def test_more_than_two_to_the_31_elements(name):
    """4.3M queries of 4 heads against few keys, and few queries against as many keys: checked at the far end."""
    made = kernel(name, 128, False)
    length, few, mask = 4_300_000, 64, {"causal": False, "scale": 0.1, "window": None}
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 4, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1, few, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 2**31
    out, lse = made.forward(q, k, v, **mask)
    dq, _, _ = made.backward(dout, q, k, v, out, lse, **mask)
    far = slice(length - 100, length)
    some = [t[:, :, far].clone() for t in (q, dout)]
    seen = torch.ones(1, 100, few, dtype=torch.bool)
    expected_out, expected_lse, (expected_dq, _, _) = expected(some[0], k, v, some[1], seen, 0.1)
    assert distance(out[:, :, far], expected_out) < LIMIT and distance(lse[:, :, far], expected_lse) < 1e-5
    assert distance(dq[:, :, far], expected_dq) < LIMIT
    del out, lse, dq
    keys, values = q[:, :1].expand(1, 4, length, 128).contiguous(), dout
    query, dquery = (torch.randn(1, 4, few, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = made.forward(query, keys, values, **mask)
    _, dk, dv = made.backward(dquery, query, keys, values, out, lse, **mask)
    # the same attention over the last keys alone, with the lse of all: gradients of a block are exact by themselves
    parts = [t[:, :, far].double() for t in (keys, values)]
    p = (query.double() @ parts[0].transpose(2, 3) * 0.1 - lse.double()[..., None]).exp()
    inner = dquery.double() @ parts[1].transpose(2, 3) - (dquery.double() * out.double()).sum(-1, keepdim=True)
    assert distance(dv[:, :, far], p.transpose(2, 3) @ dquery.double()) < 2 * LIMIT
    assert distance(dk[:, :, far], (p * inner).transpose(2, 3) @ query.double() * 0.1) < 2 * LIMIT


def compare(made, given, plan, seen, softcap=None, limit=LIMIT):
    q, k, v, dout = given
    scale = q.shape[3] ** -0.5
    out, lse, grads = expected(q, k, v, dout, seen, scale, softcap)
    got, got_lse = attend(made, q, k, v, plan, scale, softcap=softcap)
    assert got.dtype == q.dtype and got_lse.dtype == torch.float32
    assert distance(got, out) < limit and distance(got_lse, lse) < 1e-5
    ours = attend_backward(made, dout, q, k, v, got, got_lse, plan, scale, softcap=softcap)
    for mine, theirs in zip(ours, grads, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == q.dtype and distance(mine, theirs) < limit


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("size", "value_dim"), [(192, 128), (64, 128), (96, 24)])
@pytest.mark.parametrize("name", KERNELS)
def test_values_of_another_size_and_chunks(name, size, value_dim, window, chunk):
    """Chunks are documents, which `flash` and `fa4` take in one call."""
    made = kernel(name, size, window is not None, value_dim=value_dim)
    bounds = [document_bounds([300, 1, 212], 513)]
    plan = plan_segments([(0, 513)], [(0, 513)], bounds, window, torch.device("cuda", 0), chunk)
    tokens = torch.arange(513)
    seen = visible(tokens, tokens, bounds[0], window, chunk)[None]
    compare(made, tensors(1, 6, 2, 513, size, value_dim), plan, seen)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", KERNELS)
def test_trees(name, window):
    """Squares in one call where the kernel packs, and a rectangle for each node with children."""
    made = kernel(name, 64, window is not None)
    lengths, parents = [n for n, _ in TREE], [parent for _, parent in TREE]
    bounds = [document_bounds(lengths, 97)]
    plan = plan_segments([(0, 97)], [(0, 97)], bounds, window, torch.device("cuda", 0), None, [parents])
    compare(made, tensors(1, 6, 2, 97, 64), plan, seen_along_paths(TREE, 97, window, None)[None], limit=2 * LIMIT)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 2), (1, 300), (2, 1), (65, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_small_blocks_of_longer_rows(name, queries, keys):
    """As a ring has them: output and lse are those of the whole row."""
    made = kernel(name, 64, False)
    q, k, v, dout = tensors(1, 6, 2, 513, 64)
    q, dout = q[:, :, :queries].contiguous(), dout[:, :, :queries].contiguous()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(3, 1).mT / 8
    right = scores.softmax(-1) @ leaves[2].repeat_interleave(3, 1)
    grads = torch.autograd.grad(right, leaves, dout.double())
    how = dict(causal=False, scale=0.125, window=None)
    blocks = [[t[:, :, part].contiguous() for t in (k, v)] for part in (slice(keys), slice(keys, None))]
    out, lse = merge(*(made.forward(q, *block, **how) for block in blocks))
    assert distance(out, right.detach()) < LIMIT and distance(lse, scores.logsumexp(-1).detach()) < 1e-5
    parts = [made.backward(dout, q, *block, out.bfloat16(), lse, **how) for block in blocks]
    ours = (
        parts[0][0].float() + parts[1][0],
        *(torch.cat(pair, 2) for pair in zip(parts[0][1:], parts[1][1:], strict=True)),
    )
    for mine, theirs in zip(ours, grads, strict=True):
        assert distance(mine, theirs) < 2 * LIMIT  # of the sum of two that were rounded


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("lengths", [None, [300, 1, 212]], ids=["one", "packed"])
@pytest.mark.parametrize("name", KERNELS)
def test_sinks(name, lengths, window):
    """One more column of scores, which has no value. A document of one token sees nothing but itself and the sink."""
    made = kernel(name, 64, window is not None)
    bounds = None if lengths is None else [document_bounds(lengths, 513)]
    plan = plan_segments([(0, 513)], [(0, 513)], bounds, window, torch.device("cuda", 0))
    q, k, v, dout = tensors(1, 6, 2, 513, 64)
    sink, tokens = torch.linspace(-3.0, 4.0, 6, device="cuda").bfloat16(), torch.arange(513)
    seen = visible(tokens, tokens, bounds and bounds[0], window).cuda()
    leaves = [t.double().requires_grad_() for t in (q, k, v, sink)]
    scores = (leaves[0] @ leaves[1].repeat_interleave(3, 1).mT / 8).masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, leaves[3][:, None, None].expand(1, 6, 513, 1)], -1)
    right = scores.softmax(-1)[..., :-1] @ leaves[2].repeat_interleave(3, 1)
    dout = (dout + 3 * right.detach()).bfloat16()  # a sink's gradient is a sum over tokens: let it not be one of noise
    grads = torch.autograd.grad(right, leaves, dout.double())
    out, lse = with_sink(*attend(made, q, k, v, plan, 0.125), sink)
    assert distance(out, right.detach()) < LIMIT
    ours = *attend_backward(made, dout, q, k, v, out, lse, plan, 0.125), sink_gradient(dout, out, lse, sink)
    for mine, theirs in zip(ours, grads, strict=True):
        assert distance(mine, theirs) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize(("size", "value_dim"), [(64, 64), (80, 40), (256, 256), (512, 512)])
def test_plain_products(size, value_dim, softcap, window, dtype):
    """In float32 as exact as on the CPU: the products of `math` do not go by TF32."""
    made = kernel("math", size, window is not None, dtype, softcapped=softcap is not None, value_dim=value_dim)
    plan = plan_segments([(0, 513)], [(0, 513)], None, window, torch.device("cuda", 0))
    tokens = torch.arange(513)
    seen = visible(tokens, tokens, None, window).expand(2, -1, -1)
    given = tensors(2, 6, 2, 513, size, value_dim, dtype)
    compare(made, given, plan, seen, softcap, 5e-6 if dtype == torch.float32 else LIMIT)


@pytest.mark.parametrize("heads", [(16, 2), (16, 16)])
def test_plain_products_hold_a_few_blocks(heads):
    """16K tokens: all scores would be 17 GB."""
    made = kernel("math", 128, False, softcapped=True)
    q, k, v, dout = tensors(1, *heads, 2**14, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, how = torch.cuda.memory_allocated(), dict(causal=True, scale=0.1, window=None, softcap=30.0)
    out, lse = made.forward(q, k, v, **how)
    made.backward(dout, q, k, v, out, lse, **how)
    results = 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q.numel() // 128
    sums = 2 * 4 * k.numel()
    assert torch.cuda.max_memory_allocated() - before < results + sums + 5 * SCORES


def test_what_auto_takes():
    kernels, cuda = Kernels("auto"), torch.device("cuda", 0)
    usual = Need(cuda, torch.bfloat16, 128)
    latent = Need(cuda, torch.bfloat16, 192, value_dim=128)
    assert "math" not in {kernels.resolve(need).name for need in (usual, latent)}
    rare = [
        Need(cuda, torch.bfloat16, 128, softcapped=True),
        Need(cuda, torch.bfloat16, 512),
        Need(cuda, torch.float32, 128),
    ]
    assert {kernels.resolve(need).name for need in rare} == {"math"}
