"""A resumed run continues as if it had not stopped: to the bit on the same ranks, within rounding on any others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.base.processes.pool import Workers
from ithaca.storage.checkpoint import HostCopies, load, save

from .runs import resumed, seeded, started, state_of, train, trained_and_saved, weights


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SAME_WORLD: list[Any] = [
    pytest.param(1, "llama3", {}, {}, id="1"),
    pytest.param(2, "qwen3", dict(ulysses=2), {}, id="2, tied"),
    pytest.param(2, "llama3", {}, dict(lora=True, asynchronous=True), id="2, adapters, asynchronous"),
    pytest.param(2, "llama3", dict(replicate=2), {}, id="2, replicas"),
]
LONG = os.environ.get("ITHACA_FAULTS") == "long"  # make faults
if LONG:
    SAME_WORLD += [
        pytest.param(2, "llama3", dict(shard_parameters=False), {}, id="2, whole parameters"),
        pytest.param(4, "llama3", dict(ulysses=2), dict(asynchronous=True), id="4, asynchronous"),
        pytest.param(4, "llama3", dict(replicate=2, ulysses=2), {}, id="4, replicas"),
    ]


@pytest.mark.parametrize(("world", "preset", "stack", "options"), SAME_WORLD)
def test_same_ranks_continue_bit_for_bit(workers: Workers, tmp_path: Path, world, preset, stack, options):
    """Against the continuation of the run that was saved."""
    model = dict(num_hidden_layers=1, **{key: value for key, value in options.items() if key == "lora"})
    there = workers.run(trained_and_saved, str(tmp_path), preset, stack, world=world, **{**model, **options})
    here = workers.run(resumed, str(tmp_path), preset, stack, world=world, **model)
    for (losses, final, _), (again, last) in zip(there, here, strict=True):
        assert again == losses and len(set(losses)) == 2
        assert same(last, final)


def test_experts_on_more_ranks_than_there_are(workers: Workers, tmp_path: Path):
    """6 experts on 4 ranks, one of which has none: bit for bit there, and on one process the same weights and states."""
    model = dict(num_hidden_layers=1, mlp_only_layers=[])
    there = workers.run(trained_and_saved, str(tmp_path), "qwen3_moe", dict(ulysses=2), world=4, moment=True, **model)
    here = workers.run(resumed, str(tmp_path), "qwen3_moe", dict(ulysses=2), world=4, **model)
    assert [losses for losses, _, _ in there] == [losses for losses, _ in here]
    assert same(here[0][1], there[0][1])
    run, optimizer = started("qwen3_moe", dict(shard_parameters=False), seed=5, **model)
    load(tmp_path, run, optimizer)
    moment = {**weights(run), **state_of(run, optimizer)}
    assert same(moment, there[0][2]) and sum("experts" in key for key in moment) == 8
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-2 / 2, 0.1), (1e-2 / 2, 0.0)]


def test_one_process_without_a_group(tmp_path: Path):
    """Also: saving does not change the run that saves."""
    stack = dict(shard_parameters=False)
    run, optimizer = started("llama3", stack)
    seeded()
    losses, final = train(run, optimizer, range(4)), weights(run)
    for folder, asynchronous in ((tmp_path / "now", False), (tmp_path / "later", True)):
        there, last, _ = trained_and_saved(str(folder), "llama3", stack, asynchronous=asynchronous)
        assert there == losses[2:] and same(last, final)
        here, last = resumed(str(folder), "llama3", stack)
        assert here == losses[2:] and same(last, final) and not dist.is_initialized()


def test_one_process_with_a_group_of_its_own(tmp_path: Path):
    """The default stack on one GPU: FSDP2 makes a group of one."""
    there, final, _ = trained_and_saved(str(tmp_path), asynchronous=True)
    assert dist.get_world_size() == 1
    here, last = resumed(str(tmp_path))
    assert here == there and same(last, final)


def quiet(folder: str, stack: dict[str, Any], steps: range, previous: bool) -> list[float]:
    """Steps without random draws, so that ranks may differ in number; resumed first, saved afterwards."""
    run, optimizer = started("llama3", stack, seed=5 if previous else 0, num_hidden_layers=1)
    if previous:
        assert load(Path(folder), run, optimizer)["step"] == steps.start
    losses = train(run, optimizer, steps, noise=False)
    save(Path(folder), run, optimizer, {}, step=steps.stop)
    return losses


def test_ranks_and_stack_may_change_on_the_way(workers: Workers, tmp_path: Path):
    """2 ranks (4 in `make faults`), then 3 (2 and 8), each with another split of sequence and parameters."""
    reference = quiet(str(tmp_path / "one"), dict(shard_parameters=False), range(4), False)
    folder = str(tmp_path / "many")
    stacks: list[tuple[int, dict[str, Any]]] = [
        (2, dict(ring=2, store="host")),
        (3, dict(ulysses=3, heads_per_stage=1)),
    ]
    if LONG:
        eight = dict(ulysses=4, replicate=2, heads_per_stage=1, recompute="layer")
        stacks = [(4, dict(ulysses=2, ring=2, tile=8)), stacks[0], (8, eight)]
    ends = (2, 4) if len(stacks) == 2 else (2, 3, 4)
    found = []
    for (world, stack), end in zip(stacks, ends, strict=True):
        found += workers.run(quiet, folder, stack, range(len(found), end), bool(found), world=world)[0]
    assert found == pytest.approx(reference, rel=1e-4)
    assert len(set(reference)) == 4


def two_saves_in_the_same_memory(folder: str) -> Any:
    """-> weights and states when each was begun, and where its copies lie"""
    run, optimizer = started("llama3", dict(ulysses=2), num_hidden_layers=1)
    copies, moments, places = HostCopies(), [], []
    for save_number in range(2):
        train(run, optimizer, range(2 * save_number, 2 * save_number + 2), noise=False)
        moments.append({**weights(run), **state_of(run, optimizer)})
        saving = save(Path(folder), run, optimizer, {}, step=2 + save_number, asynchronous=True, copies=copies)
        places.append({name: kept.data_ptr() for name, kept in copies._kept.items()})
        train(run, optimizer, range(9, 10), noise=False)  # must not reach the copies
        saving.wait()
    return moments, places


def loaded_step(folder: str, step: int) -> Any:
    run, optimizer = started("llama3", dict(ulysses=2), num_hidden_layers=1)
    load(Path(folder) / f"step-{step}", run, optimizer)
    return {**weights(run), **state_of(run, optimizer)}


def test_a_save_uses_the_memory_of_the_one_before(workers: Workers, tmp_path: Path):
    found = workers.run(two_saves_in_the_same_memory, str(tmp_path), world=2)
    loaded = [workers.run(loaded_step, str(tmp_path), step, world=2) for step in (2, 3)]
    for rank, (moments, places) in enumerate(found):
        assert places[0] == places[1] and len(places[0]) > 10
        for number, moment in enumerate(moments):
            there = loaded[number][rank]
            assert moment.keys() == there.keys()
            assert all(
                torch.equal(value, there[name]) if isinstance(value, torch.Tensor) else value == there[name]
                for name, value in moment.items()
            )
