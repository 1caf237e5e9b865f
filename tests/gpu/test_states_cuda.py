"""States that wait in host memory, updated on a GPU by blocks: the numbers of states that stay there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ithaca.engine import host_adamw
from ithaca.engine.host_adamw import HostAdamW
from ithaca.engine.optimizer import global_norm, gradients, norm_of, update

from ..training.test_states import STEPS, followed

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("late", ["nothing", "come", "go", "update"])
@patch.object(host_adamw, "BLOCK", 1000)
def test_an_update_by_blocks_is_that_of_the_whole(late: str, monkeypatch: pytest.MonkeyPatch):
    """Also where one of the three streams is late: a missing wait would show as other numbers."""
    torch.manual_seed(0)
    shapes = [(1,), (999,), (64, 300), (7, 1001)]
    here = nn.ParameterList(nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes)
    away = nn.ParameterList(nn.Parameter(value.detach().cpu().pin_memory()) for value in here)
    settings = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    plain = torch.optim.AdamW(here.parameters(), fused=True, **settings)
    blocks = HostAdamW([{"params": list(away.parameters())}], device=DEVICE, **settings)
    _make_late(late, monkeypatch)
    for _ in range(3):
        for mine, theirs in zip(away, here, strict=True):
            theirs.grad = torch.randn_like(theirs)
            for part in (0.25 * theirs.grad, 0.75 * theirs.grad):  # added in the same order below
                with blocks.adding():
                    mine.grad = part.cpu().pin_memory()
            theirs.grad = 0.25 * theirs.grad + 0.75 * theirs.grad
        norms = norm_of(gradients(away), blocks), global_norm(gradients(here))
        assert torch.equal(*norms)
        update(blocks, gradients(away), norms[0], 0.5)
        update(plain, gradients(here), norms[1], 0.5)
        for mine, theirs in zip(away, here, strict=True):
            assert torch.equal(mine, theirs.cpu())
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(blocks.state[mine][name], plain.state[theirs][name].cpu())
    assert all(state["exp_avg"].is_pinned() for state in blocks.state.values())


def _make_late(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cycles, copy, updating = 3_000_000, host_adamw.Lane.copy, host_adamw._updating

    def slow_copy(lane: host_adamw.Lane, pairs, *, after):
        if pairs and lane.stream is not None and pairs[0][0].is_cuda == (which == "come"):
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(cycles)
        return copy(lane, pairs, after=after)

    def slow_update(*given):
        work = updating(*given)

        def late(block):
            torch.cuda._sleep(cycles)
            work(block)

        return late

    if which in ("come", "go"):
        monkeypatch.setattr(host_adamw.Lane, "copy", slow_copy)
    elif which == "update":
        monkeypatch.setattr(host_adamw, "_updating", slow_update)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_twenty_steps_and_resuming_across(tmp_path: Path, deterministic, accumulation: int):
    ways = {STEPS: False}, {7: True, 14: False, STEPS: True}
    (here, kept), (away, moved) = (
        followed({}, way, accumulation, str(tmp_path / str(len(way))), "cuda") for way in ways
    )
    assert away == pytest.approx(here, rel=1e-6)
    for name, value in kept.items():
        assert float((moved[name].cpu() - value.cpu()).norm()) <= 1e-6 * float(value.norm()), name
