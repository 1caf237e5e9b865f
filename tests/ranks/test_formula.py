"""The formula that real ranks are compared by is right itself; on the CPU, where there is another kernel to ask."""

from __future__ import annotations

import pytest
import torch

from ithaca.engine.attention.backends import Cpu
from ithaca.stack import Stack
from ithaca.verify.case import Case

from .formula import Formula, run_exactly


@pytest.mark.parametrize(
    ("causal", "window", "queries", "keys"),
    [(True, None, 33, 33), (False, None, 7, 33), (True, 5, 33, 33), (False, 40, 9, 33)],
)
def test_as_the_kernel_says(causal: bool, window: int | None, queries: int, keys: int):
    made = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 6, queries, 8, generator=made) for _ in range(2))
    k, v = (torch.randn(2, 2, keys, 8, generator=made) for _ in range(2))
    mask = dict(causal=causal, scale=0.3, window=window)
    ours, kernels = Formula().forward(q, k, v, **mask), Cpu().forward(q, k, v, **mask)
    pairs = [*zip(ours, kernels, strict=True)]
    gradients = (kernel.backward(dout, q, k, v, *kernels, **mask) for kernel in (Formula(), Cpu()))
    for one, other in [*pairs, *zip(*gradients, strict=True)]:
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("model", ["gemma3", "mixtral"])
def test_a_whole_case(workers, model: str):
    case = Case(model, Stack(ulysses=2, ring=2, heads_per_stage=1, store="host", tile=61), 4, length=251, packed=True)
    items = workers.run(run_exactly, case, ("logits", "case"), world=4)[0]
    assert items and [(item.name, item.error) for item in items if not item.ok] == []
