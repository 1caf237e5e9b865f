"""A scratch folder that is no good, on one rank only: every rank raises, none waits for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.base.processes.pool import WorkerError, Workers

from .tiny import tiny, tokens


def scratch_on(rank: int, bad: str, good: str) -> None:
    """prepare with a bad folder on one rank."""
    mine = bad if dist.get_rank() == rank else good
    ithaca.prepare(tiny(), ithaca.Stack(ulysses=2, store="disk"), device="cpu", scratch=mine)


def bad_folder(kind: str, folder: Path) -> Path:
    if kind == "a file":
        (folder / "taken").write_text("not a folder")
        return folder / "taken"
    return folder / "nowhere" if kind == "missing" else Path("/proc")  # where not even root can make a file


WORDS = {
    "a file": ["is not a folder", "create it"],
    "missing": ["does not exist", "create it"],
    "read-only": ["no file can be made in scratch folder /proc", "make it writable"],
}


@pytest.mark.parametrize("kind", WORDS)
def test_one_bad_scratch_folder_stops_all_ranks(workers: Workers, tmp_path: Path, kind: str):
    bad = bad_folder(kind, tmp_path)
    with pytest.raises(WorkerError) as caught:
        workers.run(scratch_on, 1, str(bad), str(tmp_path), world=2)
    assert caught.value.kind == "ValueError" and caught.value.ranks == [0, 1]
    first = str(caught.value).splitlines()[0]
    for word in ["rank 1: ", str(bad), *WORDS[kind], "choose another folder with scratch=..., or use store='host'"]:
        assert word in first


def test_all_bad_scratch_folders_are_counted(workers: Workers, tmp_path: Path):
    with pytest.raises(WorkerError) as caught:
        workers.run(scratch_on, 5, "", str(tmp_path / "nowhere"), world=2)
    assert "(2 of 2 ranks report an error)" in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("kind", WORDS)
def test_one_process_alone_says_it_without_a_rank(tmp_path: Path, kind: str):
    bad = bad_folder(kind, tmp_path)
    with pytest.raises(ValueError) as caught:
        ithaca.prepare(tiny(), ithaca.Stack(store="disk", shard_parameters=False), device="cpu", scratch=bad)
    assert "rank" not in str(caught.value)
    assert all(word in str(caught.value) for word in WORDS[kind])


def no_room_on(rank: int) -> list[str]:
    """The disk of one rank is too small for a step: asked before the first layer stores anything, and again."""
    run = ithaca.prepare(tiny(), ithaca.Stack(ulysses=2, store="disk"), device="cpu")
    if dist.get_rank() == rank:
        run.store._file.free_bytes = lambda: 100  # pyright: ignore[reportAttributeAccessIssue]
    raised = []
    for _ in range(2):
        try:
            run.loss(run.shard(tokens()))
            raised.append("nothing")
        except ValueError as error:
            raised.append(str(error))
    with torch.no_grad():
        run.loss(run.shard(tokens()))  # keeps nothing, so there is room
    return raised


def test_too_little_room_on_one_rank_stops_all_ranks_every_time(workers: Workers):
    raised = workers.run(no_room_on, 1, world=2)
    assert raised[0] == raised[1]
    for text in raised[0]:
        assert text.startswith("rank 1: scratch folder") and "has 100 B free, this step needs" in text
        assert "choose another folder" in text
