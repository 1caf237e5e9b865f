"""Some ranks act, all ranks know the outcome: results, and errors of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from ithaca.base.exits import MEMORY, Failed, code_of
from ithaca.engine.ranks import gather, on_all_ranks, on_rank0, world_group
from ithaca.storage.files import CheckpointError, Damaged, NotWritten
from ithaca.storage.ranks import on_rank0 as on_rank0_of_storage

ERRORS = {
    "words": lambda: ValueError("no such thing"),
    "bytes": lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "odd byte"),  # a ValueError that words alone do not make
    "disk": lambda: OSError(28, "No space left on device", "/full"),
    "damaged": lambda: Damaged("shard 3"),
    "failed": lambda: Failed(7, "hangs"),
    "memory": lambda: MemoryError("no more"),
    "bug": lambda: KeyError("oops"),
}


def outcome(kind: str, how: str) -> tuple[str, int, str]:
    group = world_group()

    def act() -> Any:
        if group.rank == (0 if how != "all" else 1):
            raise ERRORS[kind]()
        return "fine"

    call = {"all": on_all_ranks, "first": on_rank0, "storage": on_rank0_of_storage}[how]
    try:
        return call(group, act), 0, ""
    except Exception as error:
        assert gather(group, group.rank) == [0, 1], "nobody was left waiting"
        return type(error).__name__, code_of(error), str(error)


@pytest.mark.parametrize(
    ("kind", "name", "code", "words"),
    [
        ("words", "ValueError", 2, "no such thing"),
        ("bytes", "ValueError", 2, "odd byte"),
        ("disk", "ValueError", 2, "/full"),
        ("damaged", "Damaged", 4, "shard 3"),
        ("failed", "Failed", 7, "hangs"),
        ("memory", "Failed", MEMORY, "MemoryError: no more"),
        ("bug", "RuntimeError", 1, "KeyError: 'oops'"),
    ],
)
@pytest.mark.parametrize("how", ["all", "first"])
def test_an_error_of_one_rank_is_everybodys(workers, how: str, kind: str, name: str, code: int, words: str):
    told = workers.run(outcome, kind, how, world=2)
    assert told[0] == told[1] and told[0][:2] == (name, code) and words in told[0][2]
    assert told[0][2].startswith("rank 1: ") == (how == "all")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("words", CheckpointError),
        ("bytes", CheckpointError),
        ("disk", NotWritten),
        ("damaged", Damaged),
        ("bug", CheckpointError),
    ],
)
def test_of_a_checkpoint_it_is_one_of_its_own(workers, kind: str, expected: type):
    assert {name for name, _, _ in workers.run(outcome, kind, "storage", world=2)} == {expected.__name__}


def test_a_result_reaches_all(workers):
    assert workers.run(result_of_rank0, world=2) == ["from 0", "from 0"]


def result_of_rank0() -> str:
    group = world_group()
    return on_rank0(group, lambda: f"from {group.rank}")
