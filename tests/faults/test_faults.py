"""Faults on demand: what is refused, when one fires, and that it fires once per run folder."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ithaca.base import faults
from ithaca.cli.main import main

ALLOWED = {faults.ALLOW: "1"}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reliability.md"


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.arm([], 0, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "kind[=value]@rank:step[:point][!]"),
        ("kill@x:1", "such as kill@1:41:bwd"),
        ("murder@1:2", "there is no kind 'murder'; there are kill, term"),
        ("kill@1:2:middle", "there is no point 'middle'; there are fwd, bwd"),
        ("nan@1:2:bwd", "nan has no other point than fwd"),
        ("kill=3@1:2", "kill takes no value"),
        ("hang=1.2.3@1:2", "'1.2.3' is not a number"),
        ("kill@1:3:load", "write :0:load"),
    ],
)
def test_what_cannot_be_read_says_what_could_stand_there(text: str, words: str):
    with pytest.raises(ValueError) as error:
        faults.parse_all([text], ALLOWED)
    assert words in str(error.value) and repr(text) in str(error.value)


def test_faults_are_refused_unless_they_are_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(faults.ALLOW, raising=False)
    assert main(["train", "--recipe", "tiny_cpu", "--fault", "kill@1:2"]) == 2
    assert "ITHACA_ALLOW_FAULTS=1" in capsys.readouterr().err
    monkeypatch.setenv(faults.ALLOW, "1")
    assert main(["train", "--recipe", "tiny_cpu", "--fault", "kill@1"]) == 2
    assert "kill@1:41:bwd" in capsys.readouterr().err


def raised(point: str, step: int | None = None) -> bool:
    try:
        faults.reach(point, step)
    except faults.FaultRaised:
        return True
    return False


def test_one_fires_on_its_rank_in_its_step_at_its_point(tmp_path: Path):
    given = faults.parse_all(["raise@1:3:bwd", "raise@0:3:bwd", "raise@1:5:data"], ALLOWED)
    assert not faults.armed() and not raised("bwd", 3)
    faults.arm(given, 1, tmp_path)
    faults.at(2)
    assert not raised("bwd")
    faults.at(3)
    assert not raised("fwd") and raised("bwd") and not raised("bwd")
    assert raised("data", 5)  # read ahead, in step 3
    assert sorted(path.name for path in (tmp_path / "faults").iterdir()) == ["raise@1:3:bwd", "raise@1:5:data"]


def test_once_per_run_folder_unless_it_is_to_come_again(tmp_path: Path):
    texts = ["raise@0:1", "raise@0:1", "raise@0:2!"]
    fired = []
    for _ in range(4):  # four attempts of one run
        faults.arm(faults.parse_all(texts, ALLOWED), 0, tmp_path)
        fired.append((raised("fwd", 1), raised("fwd", 2)))
    assert fired == [(True, True), (True, True), (False, True), (False, True)]
    faults.arm(faults.parse_all(texts, ALLOWED), 0, tmp_path / "other")
    assert raised("fwd", 1)


def test_numbers_and_time(monkeypatch: pytest.MonkeyPatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    faults.arm(faults.parse_all(["nan@0:2", "slow=2.5@0:3", "hang=4@0:1", "oom@0:4"], ALLOWED), 0, None)
    faults.at(1)
    faults.reach("fwd")
    faults.drag(1.0)
    assert slept == [4.0] and faults.spoil(1.0) == 1.0 and not faults.slows()
    faults.at(2)
    assert math.isnan(faults.spoil(1.0)) and faults.spoil(1.0) == 1.0
    faults.at(4)
    faults.drag(2.0)
    assert slept == [4.0, 3.0] and faults.slows()
    with pytest.raises(MemoryError):
        faults.reach("fwd")


@pytest.mark.parametrize(("kind", "status"), [("kill", -9), ("term", -15), ("segv", -11), ("exit=6", 6)])
def test_what_ends_a_process(kind: str, status: int):
    program = f"import os\nfrom ithaca.base import faults\nfaults.arm(faults.parse_all(['{kind}@0:0'], os.environ), 0, None)\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "faults.reach('fwd')"],
        env={**os.environ, **ALLOWED},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and f"fault: {kind}@0:0" in done.stderr


def test_the_page_knows_every_kind_and_every_point():
    page = PAGE.read_text()
    assert all(f"| `{name}` |" in page for name in (*faults.KINDS, *faults.POINTS))
