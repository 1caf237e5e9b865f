"""The backend `math` against the plainest attention: everything that it alone can do, in blocks whose size is bounded."""

from __future__ import annotations

import logging
import os
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ithaca.base.kernels import SCORES
from ithaca.engine.attention import formula
from ithaca.engine.attention.backends import Cpu
from ithaca.engine.attention.choice import Kernels, Need
from ithaca.engine.attention.formula import Math

from .masks import distance, plain_attention

LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families
CPU = torch.device("cpu")
SHAPES = [(True, 37, 37), (False, 9, 37), (False, 37, 9), (False, 1, 37), (True, 1, 1)]  # causal, queries, keys


def tensors(queries, keys, size, value_dim, heads=6, kv_heads=2, rows=2, dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    shapes = ((heads, queries, size), (kv_heads, keys, size), (kv_heads, keys, value_dim), (heads, queries, value_dim))
    return tuple(torch.randn(rows, *shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes)


def seen_by(queries, keys, causal, window):
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    return seen if window is None else seen & (behind <= window)


def compare(kernel, given, causal, window, scale, limit, **softcap):
    """Output, lse and gradients with those of autograd in float64."""
    q, k, v, dout = given
    leaves = [t.double().clone().requires_grad_() for t in (q, k, v)]
    seen = seen_by(q.shape[2], k.shape[2], causal, window).expand(q.shape[0], -1, -1)
    right, right_lse = plain_attention(*leaves, seen, scale, softcap.get("softcap"))
    grads = torch.autograd.grad(right, leaves, dout.double())
    right, right_lse = right.detach(), right_lse.detach()
    how = dict(causal=causal, scale=scale, window=window, **softcap)
    out, lse = kernel.forward(q, k, v, **how)
    assert out.dtype == q.dtype and lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert distance(out, right) < limit and distance(lse, right_lse) < min(limit, 1e-5)
    ours = kernel.backward(dout, q, k, v, out, lse, **how)
    for mine, theirs in zip(ours, grads, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == q.dtype and distance(mine, theirs) < limit


@pytest.mark.parametrize("blocks", ["one", "many"])
@pytest.mark.parametrize(("causal", "queries", "keys"), SHAPES)
def test_every_mask_cap_and_size(causal, queries, keys, blocks, monkeypatch):
    if blocks == "many":  # edges that divide no length, and a head at a time
        monkeypatch.setattr(formula, "EDGE", 8)
        monkeypatch.setattr(formula, "SCORES", 8 * 8 * 3 * 8)
    few = blocks == "many" and not LONG  # of many blocks each takes long
    shapes = ((6, 8), (2, 11), (1, 3)) if few else product((6, 2, 1), (8, 3, 11))
    for window, softcap, (kv_heads, value_dim) in product((None, 0, 5, 40), (None, 0.7), shapes):
        given = tensors(queries, keys, 8, value_dim, kv_heads=kv_heads)
        compare(Math(), given, causal, window, 0.4, 1e-12, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 80, 256, 512])
def test_head_sizes_and_dtypes(size, dtype):
    given = tensors(131, 131, size, size, rows=1, dtype=dtype)
    limit = 2e-6 if dtype == torch.float32 else 5e-3
    compare(Math(), given, True, None, size**-0.5, limit, softcap=1.5)
    compare(Math(), given, True, 17, size**-0.5, limit)


@pytest.mark.parametrize("value_dim", [16, 24, 40])
@pytest.mark.parametrize(("causal", "queries", "keys"), SHAPES)
def test_the_cpu_kernel_takes_values_of_another_size(causal, queries, keys, value_dim):
    for window in (None, 5):
        compare(Cpu(), tensors(queries, keys, 24, value_dim), causal, window, 0.2, 1e-12)


def test_rows_that_see_nothing_are_zero_and_not_nan():
    q, k, v, dout = tensors(12, 5, 8, 8)
    how = dict(causal=True, scale=0.4, window=None, softcap=0.7)
    out, lse = Math().forward(q, k, v, **how)
    assert bool((out[:, :, :7] == 0).all()) and bool((lse[:, :, :7] == -torch.inf).all())
    last = [t[:, :, 7:] for t in (dout, q, out, lse)]
    dq, dk, dv = Math().backward(dout, q, k, v, out, lse, **how)
    ours = Math().backward(last[0], last[1], k, v, *last[2:], **how)
    assert bool((dq[:, :, :7] == 0).all())
    for mine, theirs in zip((dq[:, :, 7:], dk, dv), ours, strict=True):
        assert distance(mine, theirs) < 1e-12


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that was made inside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        new = [t.untyped_storage() for t in made if t.untyped_storage().data_ptr() not in given]
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in new)])
        return result


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 16), (8, 8, 16), (8, 1, 64)])
def test_no_tensor_is_larger_than_a_block_or_the_inputs(heads, kv_heads, size, monkeypatch):
    monkeypatch.setattr(formula, "SCORES", 2**18)
    q, k, v, dout = tensors(601, 601, size, size, heads, kv_heads, rows=1, dtype=torch.float32)
    how = dict(causal=True, scale=0.1, window=None, softcap=2.0)
    with Largest() as largest:
        out, lse = Math().forward(q, k, v, **how)
        Math().backward(dout, q, k, v, out, lse, **how)
    assert 2**17 < largest.bytes <= max(2**18, q.nbytes) < heads * 601 * 601 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "size"),
    [(32, 8, 2**20, 2**20, 128), (128, 1, 70_000, 70_000, 576), (24, 24, 1, 2**22, 128), (16, 2, 2**22, 64, 512)],
)
def test_blocks_of_long_rows(heads, kv_heads, queries, keys, size, dtype):
    q, k = (torch.empty(2, h, s, size, dtype=dtype, device="meta") for h, s in ((heads, queries), (kv_heads, keys)))
    group, wide = heads // kv_heads, 8 if dtype == torch.float64 else 4
    met = torch.zeros(2, heads)
    for row, own, shared, (rows, columns) in formula._heads(q, k, k):
        assert (own.start, own.stop) == (shared.start * group, shared.stop * group)
        met[row, own] += 1
        few = shared.stop - shared.start
        made = [few * group * rows * columns, few * group * rows * size, few * columns * size]  # scores, queries, keys
        assert max(made) * wide <= SCORES
        assert 2 * max(made) * wide > SCORES or few == kv_heads, "smaller blocks are slower"
    assert bool((met == 1).all())


def test_auto_takes_it_where_nothing_else_can_and_says_why(caplog):
    kernels = Kernels("auto")
    with caplog.at_level(logging.INFO, "ithaca"):
        assert kernels.resolve(Need(CPU, torch.float32, 512, True, value_dim=64)).name == "cpu"
        assert "is slow" not in caplog.text
        assert kernels.resolve(Need(CPU, torch.float32, 64, softcapped=True)).name == "math"
    (said,) = [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]
    assert "math" in said and "is slow" in said and "cpu: has no soft cap of scores" in said and "cudnn: " in said
    assert "attention kernel with a soft cap: math" in caplog.text
    assert "attention kernel with a sliding window and value_dim=64: cpu" in caplog.text


def test_a_kernel_without_a_cap_is_refused_by_name():
    assert Kernels("math").resolve(Need(CPU, torch.float32, 64)).name == "math"
    with pytest.raises(
        ValueError, match=r"head_dim=64, float32, cpu, a soft cap; cpu: has no soft cap of scores; remedy"
    ):
        Kernels("cpu").resolve(Need(CPU, torch.float32, 64, softcapped=True))
    q, k, v, _ = tensors(5, 5, 8, 8)
    with pytest.raises(AssertionError, match="has no soft cap"):
        Cpu().forward(q, k, v, causal=True, scale=1.0, window=None, softcap=1.0)
