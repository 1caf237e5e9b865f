"""Whatever optimizer a run has, its states come back as they were; random states too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.storage import rng
from ithaca.storage.checkpoint import load, save

from .runs import seeded, started, state_of, tiny, tokens, weights

OPTIMIZERS: dict[str, Any] = {
    "adamw, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw, foreach, amsgrad": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adamw, learning rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "radam": lambda p: torch.optim.RAdam(p),
}


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def step(run: ithaca.Run, optimizer: Any, number: int) -> None:
    run.loss(run.shard(tokens(number, rows=2))).backward()
    optimizer.step()
    optimizer.zero_grad()


def go_on(folder: str, name: str, stack: dict[str, Any], before: int) -> Any:
    """Some steps, a checkpoint, two more steps; and the two again from the checkpoint."""
    run = ithaca.prepare(tiny(num_hidden_layers=1), ithaca.Stack(**stack), device="cpu")
    optimizer = OPTIMIZERS[name](run.model.parameters())
    for number in range(before):
        step(run, optimizer, number)
    path = save(Path(folder), run, optimizer, {}, step=before).wait()
    other = ithaca.prepare(tiny(num_hidden_layers=1, seed=9), ithaca.Stack(**stack), device="cpu")
    again = OPTIMIZERS[name](other.model.parameters())
    for group in again.param_groups:  # what the checkpoint says counts
        group["lr"] = torch.tensor(7.0) if isinstance(group["lr"], torch.Tensor) else 7.0
    load(path, other, again)
    for number in (before, before + 1):
        step(run, optimizer, number)
        step(other, again, number)
    ours, theirs = state_of(other, again), state_of(run, optimizer)
    same = ours.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours
    )
    kinds = [
        (key, type(a) is type(b), a == b)
        for one, two in zip(again.param_groups, optimizer.param_groups, strict=True)
        for (key, a), b in zip(one.items(), two.values(), strict=True)
        if key != "params"
    ]
    final, expected = weights(other), weights(run)
    return same, kinds, all(torch.equal(final[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_and_options_come_back(tmp_path: Path, name: str):
    same, kinds, alike = go_on(str(tmp_path), name, dict(shard_parameters=False), 2)
    assert same and alike and all(kind and equal for _, kind, equal in kinds), kinds


def test_a_run_saved_before_its_first_step(tmp_path: Path):
    """No states yet: making some would count as a step."""
    same, _, alike = go_on(str(tmp_path), "adamw, fused", dict(shard_parameters=False), 0)
    assert same and alike


@pytest.mark.parametrize("name", ["adamw, fused", "sgd with momentum"])
def test_and_on_shards(workers: Workers, tmp_path: Path, name: str):
    for same, _, alike in workers.run(go_on, str(tmp_path), name, dict(ulysses=2), 1, world=2):
        assert same and alike


class Local(torch.optim.SGD):
    """Keeps a plain tensor per shard, as optimizers do that do not know DTensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = parameter.to_local().clone()


def local_states(folder: str) -> None:
    run, _ = started(stack=dict(ulysses=2))
    optimizer = Local(run.model.parameters())
    optimizer.step()
    save(Path(folder), run, optimizer, {}, step=1)


def test_states_that_are_not_sharded_like_their_parameter_are_refused(workers: Workers, tmp_path: Path):
    """torch would store one rank's and call it everybody's."""
    from ithaca.base.processes.pool import WorkerError

    with pytest.raises(WorkerError, match="mean is not sharded like its parameter") as caught:
        workers.run(local_states, str(tmp_path), world=2)
    assert caught.value.kind == "CheckpointError" and list(tmp_path.iterdir()) == []


# 8-bit states, where torchao is installed.


@torch.compiler.set_stance("force_eager")  # compiling takes a minute, and the states are the same
def eight_bit(folder: str, stack: dict[str, Any], previous: bool, **shape: int) -> Any:
    """Two steps, a checkpoint, two more; or just those, from the checkpoint. -> last losses, weights, states when saved"""
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    model = tiny(seed=5 if previous else 0, num_hidden_layers=1, **shape)
    run = ithaca.prepare(model, ithaca.Stack(**stack), device="cpu")
    optimizer = AdamW8bit(run.model.parameters(), lr=1e-3)

    def steps(numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            loss = run.loss(run.shard(tokens(number, rows=4)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    if previous:
        load(Path(folder), run, optimizer)
    else:
        steps(range(2))
        save(Path(folder), run, optimizer, {}, step=2)
    states = state_of(run, optimizer)
    packed = sum(map(is_packed, optimizer.state.values()))
    return steps(range(2, 4)), weights(run), states, packed


def is_packed(state: dict[str, Any]) -> bool:
    value = state["exp_avg"]
    return hasattr(value.to_local() if hasattr(value, "to_local") else value, "codes")


def test_eight_bit_states_continue_bit_for_bit(workers: Workers, tmp_path: Path):
    pytest.importorskip("torchao")
    there = workers.run(eight_bit, str(tmp_path), dict(ulysses=2), False, world=2, hidden_size=256)
    here = workers.run(eight_bit, str(tmp_path), dict(ulysses=2), True, world=2, hidden_size=256)
    for (losses, final, _, packed), (again, last, _, _) in zip(there, here, strict=True):
        assert packed > 5 and again == losses
        assert all(torch.equal(last[key], value) for key, value in final.items())


def test_eight_bit_states_move_to_other_ranks(workers: Workers, tmp_path: Path):
    """A matrix of 64 x 64 is in 8 bits on one rank, and not on two, where a shard is too small. The embedding, 257 x 64, does not
    divide into blocks, but the second of two ranks has 128 rows of it, and those do: half of it is in 8 bits then."""
    pytest.importorskip("torchao")
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    alone = workers.run(eight_bit, one, dict(shard_parameters=False), False, world=1)[0]
    again = workers.run(eight_bit, one, dict(), True, world=1)[0]
    assert again[0] == alone[0] and all(torch.equal(again[2][key], value) for key, value in alone[2].items())
    moved = workers.run(eight_bit, one, dict(ulysses=2), True, world=2)[0]
    assert alone[3] > 3 and moved[3] == 0
    wider = {key: value for key, value in alone[2].items() if "proj" in key}
    assert all(torch.equal(moved[2][key], value) for key, value in wider.items()), "nothing is lost on the way out"
    assert moved[0] == pytest.approx(alone[0], rel=1e-3)
    apart = workers.run(eight_bit, two, dict(ulysses=2), False, world=2)[0]
    back = workers.run(eight_bit, two, dict(), True, world=1)[0]
    assert apart[3] == 0 and back[3] > 3
    assert back[0] == pytest.approx(apart[0], rel=1e-3)
    for key, value in apart[2].items():
        assert float((back[2][key] - value).abs().max()) <= 0.02 * float(value.abs().max()), key


# Random states.


def drawn() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        numpy.random.randn(3).tolist(),
        torch.randn(1).item(),
    ]


def test_random_states_go_through_json():
    import json

    seeded()
    numpy.random.randn()  # leaves a second number for later
    random.gauss(0, 1)
    states = json.loads(json.dumps(rng.capture(torch.device("cpu"))))
    expected = drawn()
    seeded()
    assert drawn() != expected
    rng.restore(states, torch.device("cpu"))
    assert drawn() == expected


def test_on_other_ranks_they_are_seeded_by_where_the_run_stands():
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    found = []
    for place in [*places, places[0]]:
        rng.reseed(*place)
        found.append(str(drawn()))
    assert len(set(found[:4])) == 4 and found[4] == found[0]


def draws(folder: str, previous: bool) -> list[Any]:
    run, _ = started(stack=dict(ulysses=dist.get_world_size()))
    if previous:
        load(Path(folder), run)
    else:
        seeded()
        torch.manual_seed(dist.get_rank())
        save(Path(folder), run, None, {"seed": 3}, step=4)
    return drawn()


def test_each_rank_has_its_own(workers: Workers, tmp_path: Path):
    there = workers.run(draws, str(tmp_path), False, world=2)
    assert workers.run(draws, str(tmp_path), True, world=2) == there and there[0] != there[1]
    alone = workers.run(draws, str(tmp_path), True, world=1)[0]
    rng.reseed(3, 4, 0)
    assert alone == drawn()
