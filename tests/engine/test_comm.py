"""Rank 0 of N without its peers: what it sends comes back, so that what is measured works on numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from ithaca.engine.comm import all_to_all, shift
from ithaca.engine.job import Job
from ithaca.engine.mesh import Mesh, build_mesh
from ithaca.engine.model.sizes import sizes_of
from ithaca.observe.profiler.steps import ready
from ithaca.planner.dry_run.run import fake_group
from ithaca.stack import Stack

CPU = torch.device("cpu")


@pytest.fixture
def mesh():
    with fake_group(4):
        yield build_mesh(Stack(ulysses=2, ring=2), CPU)


@pytest.mark.parametrize("there", [1, 2, 3])
def test_what_is_sent_comes_back(mesh: Mesh, there: int):
    send = torch.randn(2, 3, 5)
    out = torch.full((there, 3, 5), float("nan"))
    (came,) = all_to_all(out, send, [there, 0], [1, 1], mesh.ulysses).wait()
    assert came is out and torch.equal(out[:2], send[:there]) and not out[2:].any()
    came = shift((send, send + 1), mesh.ring).wait()
    assert torch.equal(came[0], send) and torch.equal(came[1], send + 1) and came[0].data_ptr() != send.data_ptr()


def test_weights_stay_numbers(monkeypatch: pytest.MonkeyPatch):
    """Whatever torch's fake process group leaves in the sums of gradients."""
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=128,
    )  # fmt: skip
    job = Job(sizes_of(config.to_dict(), "small"), Stack(ulysses=4, heads_per_stage=1, tile=16), 256, world=4)
    with ready(job, config, CPU) as step:
        before = [each.to_local().clone() for each in step.run.model.parameters()]
        spoilt: list[torch.Tensor] = []

        def spoiled(model: torch.nn.Module) -> list[torch.Tensor]:
            spoilt.extend(each.grad for each in model.parameters() if each.grad is not None)
            for grad in spoilt:
                grad.fill_(float("nan"))
            return spoilt

        monkeypatch.setattr("ithaca.observe.profiler.steps.gradients", spoiled)
        step()
        after = [each.to_local() for each in step.run.model.parameters()]
    assert len(spoilt) == len(before)
    assert all(torch.allclose(one, two, rtol=1e-3) for one, two in zip(before, after, strict=True))
