"""A resumed run continues as if it had not stopped: to the bit on the same ranks, within rounding on any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.workers import Workers

from .runs import resumed, seeded, started, train, trained_and_saved, weights


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def uninterrupted(preset: str, stack: dict[str, Any], **model: Any) -> Any:
    run, optimizer = started(preset, stack, **model)
    seeded()
    return train(run, optimizer, range(6)), weights(run)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SAME_WORLD: list[Any] = [
    pytest.param(1, "llama3", {}, {}, id="1"),
    pytest.param(2, "qwen3", dict(ulysses=2), {}, id="2, tied"),
    pytest.param(2, "llama3", dict(shard_parameters=False), {}, id="2, whole parameters"),
    pytest.param(4, "llama3", dict(ulysses=2), dict(asynchronous=True), id="4, asynchronous"),
    pytest.param(4, "qwen3_moe", dict(ring=2), {}, id="4, experts: 6 on 4 ranks"),
    pytest.param(4, "llama3", dict(replicate=2, ulysses=2), {}, id="4, replicas"),
    pytest.param(2, "llama3", {}, dict(lora=True), id="2, adapters"),
]


@pytest.mark.parametrize(("world", "preset", "stack", "options"), SAME_WORLD)
def test_same_ranks_continue_bit_for_bit(workers: Workers, tmp_path: Path, world, preset, stack, options):
    """Against the continuation of the run that was saved."""
    model = {key: value for key, value in options.items() if key == "lora"}
    there = workers.run(trained_and_saved, str(tmp_path), preset, stack, world=world, **options)
    here = workers.run(resumed, str(tmp_path), preset, stack, world=world, **model)
    for (losses, final), (again, last) in zip(there, here, strict=True):
        assert again == losses and len(set(losses)) == 3
        assert same(last, final)


def test_one_process_without_a_group(tmp_path: Path):
    """Also: saving does not change the run that saves."""
    stack = dict(shard_parameters=False)
    losses, final = uninterrupted("llama3", stack)
    for folder, asynchronous in ((tmp_path / "now", False), (tmp_path / "later", True)):
        there, last = trained_and_saved(str(folder), "llama3", stack, asynchronous=asynchronous)
        assert there == losses[3:] and same(last, final)
        here, last = resumed(str(folder), "llama3", stack)
        assert here == losses[3:] and same(last, final) and not dist.is_initialized()


def quiet(folder: str, stack: dict[str, Any], steps: tuple[int, int], previous: bool) -> list[float]:
    """Steps without random draws, so that ranks may differ in number; resumed first, saved afterwards."""
    from ithaca.storage.checkpoint import load, save

    torch.manual_seed(7)
    run, optimizer = started("llama3", stack, seed=5 if previous else 0)
    if previous:
        assert load(Path(folder), run, optimizer)["step"] == steps[0]
    from . import runs

    noise, runs.shared_noise = runs.shared_noise, lambda: 0
    try:
        losses = train(run, optimizer, range(*steps))
    finally:
        runs.shared_noise = noise
    save(Path(folder), run, optimizer, {}, step=steps[1])
    return losses


def test_ranks_and_stack_may_change_on_the_way(workers: Workers, tmp_path: Path):
    """4 ranks, then 2, then 8, each with another split of sequence and parameters."""
    reference = workers.run(quiet, str(tmp_path / "one"), dict(shard_parameters=False), (0, 6), False, world=1)[0]
    found = workers.run(quiet, str(tmp_path / "many"), dict(ulysses=2, ring=2, tile=8), (0, 2), False, world=4)[0]
    found += workers.run(quiet, str(tmp_path / "many"), dict(ring=2, store="host"), (2, 4), True, world=2)[0]
    stack = dict(ulysses=4, replicate=2, heads_per_stage=1, recompute="layer")
    found += workers.run(quiet, str(tmp_path / "many"), stack, (4, 6), True, world=8)[0]
    assert found == pytest.approx(reference, rel=1e-4)
    assert len(set(reference)) == 6


def whole_states(folder: str, stack: dict[str, Any]) -> Any:
    from ithaca.storage.checkpoint import load

    from .runs import state_of

    run, optimizer = started("qwen3_moe", stack, seed=5)
    load(Path(folder), run, optimizer)
    return weights(run), state_of(run, optimizer), [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def test_what_is_loaded_does_not_depend_on_the_ranks(workers: Workers, tmp_path: Path):
    """Saved on 4 ranks, some of which hold no experts; every weight and state is the same to the bit on 1 and 8."""
    workers.run(trained_and_saved, str(tmp_path), "qwen3_moe", dict(ulysses=2), world=4)
    there = workers.run(whole_states, str(tmp_path), dict(ulysses=2), world=4)[0]
    for world, stack in ((1, dict(shard_parameters=False)), (8, dict(ulysses=8, replicate=1))):
        here = workers.run(whole_states, str(tmp_path), stack, world=world)[0]
        assert same(here[0], there[0]) and same(here[1], there[1]) and here[2] == there[2]
    assert any("exp_avg" in key for key in there[1])
