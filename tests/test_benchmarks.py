"""Benchmarks still run: on a CPU, with a model of no consequence."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPT = FOLDER / "side_by_side.py"


def side_by_side(out: Path, *arguments: str) -> tuple[list[list[str]], list[dict]]:
    """Rows of the table it writes, cell by cell, and its records."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,), (lines,) = out.glob("*.md"), out.glob("*.jsonl")
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    return rows[1:], [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="a process for each recipe, 18 s: make plans")
def test_a_row_for_each_recipe(tmp_path: Path):
    rows, records = side_by_side(tmp_path, "--contexts", "64", "--recipes", "hf,ithaca-auto", "--steps", "2")
    assert [row[:2] for row in rows] == [["64", "hf"], ["64", "ithaca-auto"]]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
    losses = [record["loss"] for record in records]
    assert max(losses) - min(losses) < 1e-4  # the same work


@pytest.mark.skipif(
    os.environ.get("ITHACA_PLANS") != "long", reason="three processes that import torch, 13 s: make plans"
)
def test_a_rank_of_many(tmp_path: Path):
    arguments = ["--rank-of", "2", "--contexts", "64", "--layers", "1", "--steps", "1", "--recipes", "streamed"]
    (row,), (record,) = side_by_side(tmp_path, *arguments)
    assert row[:2] == ["64", "streamed"] and record["status"] == "ok"
    assert 0 < record["fixed"] < record["seconds"]  # time outside the layers is known, and not scaled with them
    assert record["tokens_per_second"] > record["at_least"] > 0


def test_states_on_either_side(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """In this process: another would take five seconds to begin."""
    words = [
        "--model",
        "tiny_llama",
        "--context",
        "64",
        "--cpu",
        "--steps",
        "1",
        "--layers",
        "1",
        "--accumulation",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["states.py", *words])
    runpy.run_path(str(FOLDER / "states.py"), run_name="__main__")
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["states", "device", "host"] and {len(line) for line in lines} == {11}
    assert lines[1][-1] == "2.0 GB"  # nothing but the process
    assert float(lines[2][3].split()[0]) < float(lines[2][1].split()[0])


def test_a_recipe_beside_its_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    words = ["tiny_cpu", "--cpu", "--layers", "1", "--no-attention"]
    monkeypatch.setattr(sys, "argv", ["recipes.py", *words])
    runpy.run_path(str(FOLDER / "recipes.py"), run_name="__main__")
    head, line = (row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| "))
    assert line[:5] == ["tiny_cpu", "2K", "1", "none", "-"] and len(line) == len(head)
    assert float(line[5].split()[0]) > 0 and line[-1] == "2.0 GB"  # that is the process


@pytest.mark.skipif(
    os.environ.get("ITHACA_PLANS") != "long", reason="two processes that import torch, 10 s: make plans"
)
def test_four_bits_beside_sixteen(tmp_path: Path):
    script = [sys.executable, str(SCRIPT.with_name("qlora.py")), "--shape", "tiny_llama", "--context", "128", "--cpu"]
    done = subprocess.run([*script, "--steps", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and [line[:6] for line in done.stdout.splitlines()[2:]] == ["| bf16", "| nf4 "], done
    done = subprocess.run([*script, "--load", str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 0 and "first loss after" in done.stdout, done
