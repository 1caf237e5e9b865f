"""Masters, gradients and optimizer states in host memory (train.offload_optimizer): the run of states on the device, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ithaca
from ithaca.base.exits import MEMORY, Failed
from ithaca.base.processes.pool import Workers
from ithaca.config.schema import Train
from ithaca.engine import host_adamw, parallelize
from ithaca.engine.host_adamw import HostAdamW
from ithaca.engine.optimizer import build_optimizer
from ithaca.storage import checkpoint
from ithaca.training.step import train_step

from ..contract.tiny import meta, tiny, tokens, whole

STEPS = 20
TRAIN = Train(steps=STEPS, lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1, clip=0.5)


def run_of(stack: dict[str, Any], away: bool, device: str) -> tuple[ithaca.Run, torch.optim.Optimizer]:
    model = tiny("llama3", num_hidden_layers=1)
    run = ithaca.prepare(model, ithaca.Stack(**stack), device=device, offload_parameters=away)
    optimizer = build_optimizer(run.model, replace(TRAIN, offload_optimizer=away), device=run.mesh.device)
    assert isinstance(optimizer, HostAdamW) == away
    return run, optimizer


@patch.object(host_adamw, "BLOCK", 1000)  # shorter than most tensors here, and not a whole number of rows
def followed(stack: dict[str, Any], ways: dict[int, bool], accumulation: int, folder: str, device: str = "cpu") -> Any:
    """The run, up to each step of `ways` with its states on the host or not, and a checkpoint there. -> losses, norms; weights"""
    numbers, first, run = [], 0, None
    for last, away in ways.items():
        run, optimizer = run_of(stack, away, device)
        if first:
            checkpoint.load(Path(folder), run, optimizer)
        for step in range(first, last):
            rows = tokens(2, 12, seed=step).chunk(accumulation)
            done = train_step(run, optimizer, [run.shard(each) for each in rows], TRAIN, step, range(2))
            numbers += [done.loss, done.grad_norm]
        first = last
        if last < max(ways):
            checkpoint.save(Path(folder), run, optimizer, {}, step=last)
    assert run is not None
    return numbers, {name: whole(value) for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize(("world", "stack", "accumulation"), [(1, {}, 2), (2, dict(ulysses=2, tile=4), 1)], ids=str)
def test_many_steps_and_resuming_across(
    workers: Workers, tmp_path: Path, world: int, stack: dict[str, Any], accumulation: int
):
    """To the bit, also where the run goes on with its states on the other side."""
    ways = {8: False}, {3: True, 6: False, 8: True}
    (here, kept), (away, moved) = (
        workers.run(followed, stack, way, accumulation, str(tmp_path / str(len(way))), world=world)[0] for way in ways
    )
    assert here == away and here[0] > here[-2]
    for name, value in kept.items():
        assert torch.equal(moved[name], value), name


def test_a_host_that_is_too_small_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    model = meta("llama3")
    need = sum(4 * 4 * parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(parallelize, "available_memory", lambda: need - 1)
    with pytest.raises(
        Failed, match=r"optimizer states of 94,656 trained weights take .* of host memory here"
    ) as error:
        ithaca.prepare(model, device="cpu", offload_parameters=True, weights="nowhere")
    assert error.value.exit_code == MEMORY and "are available: use more hosts" in str(error.value)
    with pytest.raises(ValueError, match="shard_parameters=False keeps parameters whole there"):
        ithaca.prepare(
            model, ithaca.Stack(shard_parameters=False), device="cpu", offload_parameters=True, weights="nowhere"
        )
