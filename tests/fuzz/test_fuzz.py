"""Seeded nonsense: no traceback, no hang, no success for what was refused, whatever is given to the command line.

Short here, with another seed of the same generator for each change of this number; `make fuzz` is the long one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cases import cases
from .options import BASES, parsers
from .received import FILES
from .running import Case, Tally, run_case
from .world import make_world

LONG = os.environ.get("ITHACA_FUZZ") == "long"
SEED, CASES, COMMANDS = (int(os.environ.get("ITHACA_FUZZ_SEED", "2")), 5000, 100) if LONG else (1, 90, 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.getcwd()
    try:
        yield make_world(tmp_path_factory.mktemp("world"))
    finally:
        os.chdir(before)


@pytest.mark.timeout(4 * 3600 if LONG else 300)
def test_no_traceback_no_hang_no_nonsense(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tally = Tally()
    for number, case in enumerate(cases(world, SEED, CASES)):
        command = COMMANDS > 0 and number % (CASES // COMMANDS) == 0
        tally.add(run_case(case, world, tmp_path / "here", command=command))
    with capsys.disabled():
        if LONG:
            print(f"\n{tally.words()}")
    assert not tally.bad, f"{tally.words()}\n" + "\n".join(map(str, tally.bad[:40]))


def test_every_verb_has_cases_and_what_they_start_from_is_accepted(world: Path, tmp_path: Path):
    assert set(parsers()) == set(BASES)
    for verb, words in BASES.items():
        outcome = run_case(Case(verb, tuple(words), False), world, tmp_path / "here")
        assert outcome.problem is None and outcome.code == 0, str(outcome)
    for about in FILES:
        for words in about.verbs:
            outcome = run_case(Case(about.file, words, False), world, tmp_path / "here")
            assert outcome.problem is None and outcome.code == 0, str(outcome)
