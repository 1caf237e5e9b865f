"""The ladder, measured: every rung in a process of its own, and one that does not fit says so."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.main import main
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import read_sizes
from ithaca.observe.profiler import case, rungs
from ithaca.observe.profiler.case import problem
from ithaca.observe.profiler.measure import OutOfMemory
from ithaca.observe.profiler.rungs import apart, measure_ladder
from ithaca.observe.profiler.wanted import Wanted
from ithaca.planner.chart import ladder_svg
from ithaca.planner.ladder import describe, ladder
from ithaca.planner.search import plan
from ithaca.stack import Stack

from .test_profile import SIZES

WANTED = Wanted(job=Job(read_sizes("llama3_8b"), Stack(), 2), model="llama3_8b")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def answer(tensors: int) -> dict[str, Any]:
    return {
        "peak": tensors + 10**9, "tensors": tensors, "tokens_per_second": 123.0, "seconds": 1.0, "device": "NVIDIA H200",
        "kernel": "fa4", "categories": {"kept": tensors - 5, "tile": 5}, "problem": None,
    }  # fmt: skip


def test_it_goes_on_where_a_rung_does_not_fit():
    found = ladder("llama3_8b", gpus="8xH100-80GB", context="1M", layers=2)
    asked: list[Wanted] = []

    def run(wanted: Wanted) -> dict[str, Any]:
        asked.append(wanted)
        return answer(28 * 10**9) if wanted.job.stack.ulysses > 1 else problem("out of memory")

    measure_ladder(found, "llama3_8b", layers=2, steps=1, cpu=False, limit=80 * 10**9, sweeps=True, run=run)
    points = [each for every in found.sweeps.values() for each in every]
    assert len(asked) == len(found.rungs) + len(points) and all(each.measured for each in [*found.rungs, *points])
    assert [each.job.rows for each in asked[:3]] == [8, 8, 1], "GPUs that do not share a sequence have one each"
    assert {each.layers for each in asked} == {2} and {each.job.world for each in asked} == {8}
    assert [each.job.stack for each in asked[: len(found.rungs)]] == [rung.plan.stack for rung in found.rungs]
    told = describe(found)
    assert "2 of 32 layers" in told[0] and "measured on NVIDIA H200" in told[0]
    plain = next(line for line in told if line.split()[0] == "plain")
    assert "out of memory" in plain and "GB" in plain
    top = next(line for line in told if "+streamed layer" in line)
    off = 28e9 / (found.rungs[-1].plan.memory.peak + 1e8) - 1
    assert "28.0 GB" in top and f"{off:+.1%}" in top and top.split()[-1] == "kept"
    shown = found.json()
    assert shown["rungs"][0]["measured"]["problem"] == "out of memory" and shown["layers"] == 2
    assert shown["rungs"][-1]["measured"]["peak"] == 29 * 10**9
    assert shown["sweeps"]["tile"][0]["measured"]["tensors"] == 28 * 10**9
    drawn = ladder_svg(shown)
    assert ", out of memory<" in drawn and ", measured 29.0 GB<" in drawn and "black marks are measured" in drawn


def test_another_process_reads_what_is_wanted():
    job = plan(
        "tiny_gemma3", gpus="4xH100", context="64K", host="1TB", lora=8, lora_targets=("q_proj",), deterministic=True
    ).job
    job = replace(job, stack=replace(job.stack, recompute="30 layer + 4 keep_attention"))
    wanted = Wanted(job=job, model="tiny_gemma3", layers=2, states=True, limit=10**9)
    assert Wanted.read(json.loads(json.dumps(wanted.json()))) == wanted and hash(wanted)


def killed(wanted: Wanted) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def ended(wanted: Wanted) -> dict[str, Any]:
    print("no attention kernel for this\n", file=sys.stderr)
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (killed, "killed, probably for want of host memory"),
        (ended, "no attention kernel for this"),
    ],
)
def test_how_a_process_ended(function: Callable[[Wanted], dict[str, Any]], words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rungs, "answer", function)
    assert apart(WANTED)["problem"] == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemory("CUDA out of memory", 0), "out of memory"),
        (ValueError("no attention kernel for this\nor that"), "no attention kernel for this"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_what_a_case_says_of_an_error(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch):
    def fail(wanted: Wanted) -> None:
        raise error

    monkeypatch.setattr(case, "measure", fail)
    assert case.answer(WANTED)["problem"] == words


def test_a_rung_for_real(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """One rung runs in its process; the others are not worth the seconds."""

    def run(wanted: Wanted) -> dict[str, Any]:
        whole = wanted.job.stack.recompute == "layer" and wanted.job.stack.store == "gpu"
        return apart(wanted) if whole else problem("left out")

    real = rungs.measure_ladder
    monkeypatch.setattr(rungs, "measure_ladder", lambda *args, **more: real(*args, **more, run=run))
    assert main(["ladder", str(tiny), "--gpus", "2xH100", "--context", "64", "--measure", "--cpu", "--steps", "1"]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "+checkpointing" in line)
    # "+checkpointing", predicted and measured tensors with their units, deviation, tokens/s, largest
    assert row[2] == row[4] == "MB" and float(row[3]) == pytest.approx(float(row[1]), rel=0.15)
    assert row[5].endswith("%") and float(row[6].replace(",", "")) > 0 and row[7] == "optimizer"
