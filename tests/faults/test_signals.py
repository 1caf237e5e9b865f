"""What a run of several ranks does in the middle of things: signals at every point, a wish to save, a NaN on one rank, a slow rank,
other settings on resume. Ranks of the shared pool, so a run takes about a second; faults are those that users rehearse with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ithaca.base import faults
from ithaca.base.exits import Failed
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.engine import own_time
from ithaca.observe.metrics import read_metrics
from ithaca.storage.check import verify
from ithaca.training.trainer import train

SHORT = ["data.context=64", "train.warmup=1", "train.schedule=constant", "train.rows=4", "log.every=1"]
EVAL = ["eval.every=2", "eval.rows=4", "eval.sources=[{synthetic: recall}]"]
FOUR = ["launch.cpu=4", "stack.ulysses=2", "stack.ring=2"]
TWO = ["launch.cpu=2", "stack.ulysses=2", "stack.ring=1"]
ONE = ["launch.cpu=1", "stack.ulysses=1", "stack.ring=1"]
LONG = os.environ.get("ITHACA_FAULTS") == "long"


def run_once(folder: str, overrides: list[str], injected: list[str], allow_change: bool = False) -> tuple[int, str]:
    """-> exit code, and the error in words"""
    config = load(None, [*SHORT, f"run.folder={folder}", *overrides], "tiny_cpu").config
    torch.manual_seed(123)
    try:
        given = [faults.parse(each) for each in injected]
        return train(config, quiet=True, allow_change=allow_change, injected=given), ""
    except Failed as error:
        return error.exit_code, str(error)


def run(workers: Workers, folder: Path, *overrides: str, injected: tuple[str, ...] = (), world: int = 2, **more: Any):
    layout = {4: FOUR, 2: TWO, 1: ONE}[world]
    return workers.run(run_once, str(folder), [*layout, *overrides], list(injected), *more.values(), world=world)


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def said(folder: Path) -> str:
    return (folder / "logs/rank-0.log").read_text()


# Signals (F11): one rank gets it, all save the same step


SIGNALS = [
    ("term@1:2:fwd", 2),
    ("term@1:3:data", 2),  # read while step 2 is trained
    ("term@1:2:eval", 2),
    ("term@0:2:save.before_rename", 2),
]
MORE_SIGNALS = [("term@0:2:bwd", 4), ("term@3:2:optim", 4), ("term@2:2:save.begin", 4)]


@pytest.mark.parametrize(("fault", "world"), [*SIGNALS, *(MORE_SIGNALS if LONG else [])])
def test_a_signal_to_one_rank_saves_one_step_on_all(workers: Workers, tmp_path: Path, fault: str, world: int):
    several = ["train.steps=6", "checkpoint.every=2", "checkpoint.asynchronous=false", *EVAL]
    assert run(workers, tmp_path, *several, injected=(fault,), world=world) == [(75, "")] * world
    found = status(tmp_path)
    assert (found["state"], found["step"], found["exit_code"]) == ("stopped", 2, 75) and found["cause"] == "SIGTERM"
    assert found["checkpoint"] == "checkpoints/step-2" and found["resume"].startswith("ithaca train ")
    assert verify(tmp_path / found["checkpoint"]) == []
    lines = said(tmp_path)
    assert "SIGTERM at step 2: saving" in lines and "The same command goes on" in lines
    if "eval" in fault:
        assert not any("eval_loss" in line for line in read_metrics(tmp_path / "metrics.jsonl")), "it was left at once"


def test_a_signal_while_a_save_is_being_written_publishes_both(workers: Workers, tmp_path: Path):
    """Asynchronous: step 2 is being written when the signal comes in step 3."""
    assert run(workers, tmp_path, "train.steps=4", "checkpoint.every=2", injected=("term@1:3:bwd",)) == [(75, "")] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-2", "step-3"]
    assert run(workers, tmp_path, "train.steps=4", "checkpoint.every=2") == [(0, "")] * 2
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4]


def wish_and_run(folder: str, overrides: list[str], step: int) -> tuple[int, str]:
    """A file called SAVE appears while step `step` is trained."""
    kept = faults.reach

    def reach(point: str, at: int | None = None) -> None:
        if point == "optim" and faults._step == step:
            (Path(folder) / "SAVE").touch()
        kept(point, at)

    faults.reach = reach
    try:
        return run_once(folder, overrides, [])
    finally:
        faults.reach = kept


def test_a_file_called_save_saves_a_live_run(workers: Workers, tmp_path: Path):
    """Published before the next step begins, though saves are asynchronous; the file is gone; the run goes on."""
    settings = [*TWO, "train.steps=5", "checkpoint.every=null", "checkpoint.keep_last=9"]
    assert workers.run(wish_and_run, str(tmp_path), settings, 2, world=2) == [(0, "")] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-2", "step-5"]
    assert not (tmp_path / "SAVE").exists()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    order = [line.get("step") or line.get("checkpoint") for line in lines if "step" in line or line["event"] == "save"]
    assert order == [1, 2, "step-2", 3, 4, 5, "step-5"]


# Memory (F18)


def test_too_little_host_memory_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("ithaca.engine.offload.host.available_memory", lambda: 1000)
    settings = [*SHORT, "launch.cpu=1", "stack.ulysses=1", "stack.ring=1", f"run.folder={tmp_path}", "train.steps=2"]
    words = [word for each in settings for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
    assert main(["train", "--recipe", "tiny_cpu", *words]) == 5
    err = capsys.readouterr().err
    assert "the host has 1.0 KB of memory available, this step needs " in err and "store" in err
    found = status(tmp_path)
    assert (found["state"], found["exit_code"], found["step"]) == ("failed", 5, 0)
    assert found["cause"] in err


# Numbers (F16) and slow ranks (F21)


def test_a_loss_that_is_nan_on_one_rank_touches_no_weight_of_any(workers: Workers, tmp_path: Path):
    settings = ["train.steps=4", "checkpoint.every=2"]
    found = run(workers, tmp_path, *settings, injected=("nan@1:4",))
    assert [code for code, _ in found] == [6] * 2
    for _, text in found:
        assert (
            text.startswith("step 4: loss nan (of rank 1), gradient norm nan") and "Rows 12 to 15 of the data" in text
        )
        assert "weights were not touched" in text and str(tmp_path / "bad_batch.json") in text
    about = json.loads((tmp_path / "bad_batch.json").read_text())
    assert about["step"] == 4 and about["ranks"] == [1] and [row["row"] for row in about["rows"]] == [12, 13, 14, 15]
    state = status(tmp_path)
    assert (state["state"], state["exit_code"], state["checkpoint"]) == ("failed", 6, "checkpoints/step-2")
    assert run(workers, tmp_path, *settings) == [(0, "")] * 2, "the fault is spent, and step 2 was good"
    clean = tmp_path.with_name(tmp_path.name + "-clean")
    run(workers, clean, *settings)
    assert weights(tmp_path, 4) == weights(clean, 4)


def weights(folder: Path, step: int) -> dict[str, str]:
    manifest = json.loads((folder / f"checkpoints/step-{step}/manifest.json").read_text())
    return {name: about["sha256"] for name, about in manifest["files"].items() if name.endswith(".distcp")}


def run_by_another_clock(folder: str, overrides: list[str], injected: list[str]) -> tuple[int, str]:
    """What a rank does alone takes hours on this clock, the same on every rank however busy the machine is; sleep takes none."""
    now = [0.0]

    def pass_by(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    kept = own_time.time, faults.time
    own_time.time = cast(Any, SimpleNamespace(perf_counter=lambda: pass_by(10_000.0)))
    faults.time = cast(Any, SimpleNamespace(sleep=pass_by))
    try:
        return run_once(folder, overrides, injected)
    finally:
        own_time.time, faults.time = kept


def test_a_slow_rank_is_named_in_the_log_and_the_metrics(workers: Workers, tmp_path: Path):
    # a median needs three ranks, and nine steps; one head at a time, each of them would take long
    settings = ["launch.cpu=3", "stack.ulysses=1", "stack.ring=3", "stack.heads_per_stage=null", "train.steps=10"]
    found = workers.run(run_by_another_clock, str(tmp_path), settings, ["slow=40@2:3"], world=3)
    assert found == [(0, "")] * 3
    events = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line.get("event") == "straggler"]
    assert [event["rank"] for event in events] == [2] and events[0]["ratio"] > 5
    assert "rank 2 is " in said(tmp_path) and "× slower than the median" in said(tmp_path)


# Going on (F13, F15)


def test_other_ranks_and_other_settings_on_resume(workers: Workers, tmp_path: Path):
    assert run(workers, tmp_path, "train.steps=2") == [(0, "")] * 2
    code, text = run(workers, tmp_path, "train.steps=4", "data.seed=7", "train.lr=0.002")[0]
    assert code == 2 and "data.seed 0 → 7" in text and "--allow-change" in text and "train.lr" not in text
    assert run(workers, tmp_path, "train.steps=3", "train.lr=0.002", world=1) == [(0, "")]
    assert "changed since step 2: train.lr 0.01 → 0.002, train.steps 2 → 3" in said(tmp_path)
    assert "layout changed: 2 ranks (ulysses 2 × ring 1) → 1 ranks (ulysses 1 × ring 1); model and" in said(tmp_path)
    assert "data goes on at sample 8" in said(tmp_path)
    assert run(workers, tmp_path, "train.steps=4", "data.seed=7", world=1, allow_change=True) == [(0, "")]
    assert "changed since step 3: data.seed 0 → 7, " in said(tmp_path)
