"""Measured for real, between gloo processes on the CPU."""

from __future__ import annotations

import json
import math

import pytest
import torch.distributed as dist

from ithaca.base.processes.pool import WorkerError
from ithaca.cli.main import main
from ithaca.observe.profiler.links import check_collectives, measure_links


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_says_the_same(workers, world: int):
    results = workers.run(measure_links, "cpu", nbytes=1 << 18, rounds=3, world=world)
    assert results == [results[0]] * world and set(results[0]) == {"all_to_all", "gather", "reduce", "ring"}
    assert all(math.isfinite(rate) and 1e5 < rate < 1e12 for rate in results[0].values())


def wrong_on_one() -> None:
    own = dist.all_reduce

    def wrong(tensor, *args, **kwargs):
        own(tensor, *args, **kwargs)
        tensor[-1] += dist.get_rank() == 1

    dist.all_reduce = wrong
    try:
        check_collectives("cpu", (4096,))
    finally:
        dist.all_reduce = own


def test_a_wrong_sum_is_named(workers):
    workers.run(check_collectives, "cpu", (4096, 1 << 20), world=3)
    with pytest.raises(
        WorkerError, match=r"collectives between these ranks are wrong: on rank 1 all-reduce of 4096 bytes"
    ):
        workers.run(wrong_on_one, world=2)


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--links", "--cpu", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["gpu"], shown["per_node"], shown["nodes"], shown["kept"]) == ("CPU process", 2, 1, False)
    assert shown["all_to_all"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu", "2"], "--cpu is for --links"),
        (["--links", "--cpu", "1"], "links are between processes, from 2 to 64 of them"),
        (["--links", "--cpu", "65"], "from 2 to 64"),
    ],
)
def test_what_cannot_be_measured(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
