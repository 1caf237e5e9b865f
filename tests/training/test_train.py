"""Whole runs: the layout does not change the losses, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.base.processes.pool import Workers
from ithaca.config import load
from ithaca.observe.metrics import read_metrics
from ithaca.training.trainer import train

# tiny_cpu with a shorter context; a constant rate, so that a run can be made longer
SHORT = ["data.context=128", "train.warmup=2", "train.schedule=constant", "train.rows=4", "log.every=1"]
STACKS: dict[str, tuple[int, list[str]]] = {
    "alone": (1, ["ulysses=1", "ring=1"]),
    "alone, plain": (1, ["ulysses=1", "ring=1", "recompute=none", "store=gpu", "tile=null", "shard_parameters=false"]),
    "two": (2, ["ulysses=1", "ring=2", "store=disk"]),
    "four": (4, ["ulysses=2", "ring=2"]),
    "four, data parallel": (4, ["ulysses=2", "ring=1", "replicate=2", "engine=composed", "recompute=layer"]),
    "eight": (8, ["ulysses=4", "ring=2", "heads_per_stage=null"]),
    "three": (3, ["ulysses=1", "ring=3"]),
    "five": (5, ["ulysses=5", "ring=1"]),  # of 4 or 8 heads: some ranks have none in some stages
    "two, accumulating": (2, ["ulysses=2", "ring=1"]),
}
STEPS = 8


def run_once(folder: str, overrides: list[str]) -> int:
    torch.manual_seed(123)  # a run must not depend on what happened before it
    return train(load(None, [*SHORT, f"run.folder={folder}", *overrides], "tiny_cpu").config, quiet=True)


def run(workers: Workers, folder: Path, stack: str, steps: int, *more: str) -> list[dict[str, Any]]:
    world, settings = STACKS[stack]
    chosen = [f"stack.{each}" for each in settings] + [f"launch.cpu={world}", f"train.steps={steps}", *more]
    assert workers.run(run_once, str(folder), chosen, world=world) == [0] * world
    return read_metrics(folder / "metrics.jsonl")


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in metrics if "loss" in line]


@pytest.fixture(scope="module")
def straight(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(workers, tmp_path_factory.mktemp("straight"), "four", STEPS)


LONG = os.environ.get("ITHACA_LOSSES") == "long"  # make losses
LAYOUTS = ["alone, plain", "two", "four, data parallel", "two, accumulating", *(["alone", "eight"] if LONG else [])]


@pytest.mark.parametrize("stack", LAYOUTS)
def test_the_layout_does_not_change_the_losses(workers: Workers, tmp_path: Path, straight: list, stack: str):
    more = ["train.accumulation=2"] if "accumulating" in stack else []
    found = run(workers, tmp_path, stack, 4, *more)
    assert losses(found) == pytest.approx(losses(straight)[:4], rel=1e-4)
    assert [line["samples"] for line in found if "loss" in line] == [4 * step for step in range(1, 5)]
    assert losses(straight)[-1] < 0.9 * losses(straight)[0]


def test_other_ranks_go_on_with_the_next_samples(workers: Workers, tmp_path: Path, straight: list):
    for steps, stack in zip((3, 6), ("three", "alone"), strict=True):
        run(workers, tmp_path, stack, steps)
    found = run(workers, tmp_path, "five", STEPS)
    assert losses(found) == pytest.approx(losses(straight), rel=1e-4)
    assert [line["samples"] for line in found if "loss" in line] == [4 * step for step in range(1, STEPS + 1)]
    assert [line["event"] for line in found if "event" in line] == [
        "start", "save", *["resume", "save"] * 2
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-6", "step-8"]


@pytest.mark.parametrize("stack", ["two", *(["alone", "four"] if LONG else [])])
def test_the_same_ranks_go_on_bit_for_bit(workers: Workers, tmp_path: Path, stack: str):
    whole = run(workers, tmp_path / "whole", stack, 4, "checkpoint.every=2")
    run(workers, tmp_path / "parts", stack, 3)
    parts = run(workers, tmp_path / "parts", stack, 4, "checkpoint.every=2")
    assert losses(parts) == losses(whole)
    hashes = [hashes_of(tmp_path / name / "checkpoints" / "step-4") for name in ("whole", "parts")]
    assert hashes[0] == hashes[1] and hashes[0]


def hashes_of(checkpoint: Path) -> dict[str, str]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {name: about["sha256"] for name, about in manifest["files"].items() if name.endswith(".distcp")}


def test_what_a_run_leaves_behind(workers: Workers, tmp_path: Path):
    metrics = run(workers, tmp_path, "two", 3, "eval.every=2", "eval.rows=2", "eval.sources=[{synthetic: recall}]")
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 3 and status["checkpoint"] == "checkpoints/step-3"
    again = load(tmp_path / "config.yaml", [], None).config
    assert again.stack.ring == 2 and again.train.steps == 3
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["environment"]["ranks"] == 2 and about["data"]["sources"][0]["kind"] == "synthetic"
    lines = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["tokens"] == 3 * 4 * 128
    assert "eval_loss" in lines[1] and "eval_loss" not in lines[2]
    assert all(line["tokens_per_second"] > 0 and line["mfu"] is None for line in lines)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
