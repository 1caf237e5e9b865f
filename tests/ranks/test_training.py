"""Whole runs on NCCL ranks: as one rank would have trained, also after a change of ranks."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.observe.metrics import read_metrics
from ithaca.training.trainer import train

pytestmark = pytest.mark.ranks

SHORT = [
    "launch.cpu=null", "model.dtype=bf16", "data.context=256", "train.warmup=2", "train.schedule=constant", "train.rows=4",
    "train.lr=1e-3", "log.every=1", "launch.share_gpu=true",
]  # fmt: skip
STACKS: dict[str, tuple[int, list[str]]] = {
    "one": (1, ["ulysses=1", "ring=1"]),
    "one, other tiles": (1, ["ulysses=1", "ring=1", "tile=96"]),
    "one, plain": (1, ["ulysses=1", "ring=1", "recompute=none", "store=gpu", "tile=null", "engine=composed"]),
    "three": (3, ["ulysses=1", "ring=3"]),
    "four": (4, ["ulysses=2", "ring=2"]),
    "four, data parallel": (4, ["ulysses=2", "ring=1", "replicate=2", "store=disk"]),
    "eight": (8, ["ulysses=4", "ring=2", "heads_per_stage=null"]),
}
STEPS = 20


def run_once(folder: str, overrides: list[str]) -> int:
    return train(load(None, [*SHORT, f"run.folder={folder}", *overrides], "tiny_cpu").config, quiet=True)


def run(ranks: Workers, folder: Path, stack: str, steps: int, *more: str) -> list[float]:
    world, settings = STACKS[stack]
    chosen = [f"stack.{setting}" for setting in settings] + [f"launch.workers={world}", f"train.steps={steps}", *more]
    assert ranks.run(run_once, str(folder), chosen, world=world) == [0] * world
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone(ranks: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one rank in several orders of summation."""
    return {
        name: run(ranks, tmp_path_factory.mktemp("alone"), name, STEPS) for name in STACKS if name.startswith("one")
    }


@pytest.mark.parametrize("stack", ["four", "four, data parallel"])
def test_four_ranks_train_as_one(ranks: Workers, alone: dict[str, list[float]], tmp_path: Path, stack: str):
    losses = run(ranks, tmp_path, stack, STEPS)
    spread = max(apart(one, other) for one, other in combinations(alone.values(), 2))
    assert 0 < apart(losses, alone["one"]) <= spread < 0.01
    assert losses[-1] < 0.95 * losses[0]


def test_eight_then_three_then_one(ranks: Workers, alone: dict[str, list[float]], tmp_path: Path):
    """Saved beside training, resumed on other ranks, evaluated on the way, and exported."""
    saving = ["checkpoint.every=2", "checkpoint.asynchronous=true"]
    evaluated = ["eval.every=5", "eval.rows=2", "eval.sources=[{synthetic: recall}]"]
    for stack, steps in (("eight", 8), ("three", 14), ("one", STEPS)):
        losses = run(ranks, tmp_path / "run", stack, steps, *saving, *evaluated)
    spread = max(apart(one, other) for one, other in combinations(alone.values(), 2))
    assert apart(losses, alone["one"]) <= spread
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics if "eval_loss" in line] == [5, 10, 15, 20]
    assert [line["event"] for line in metrics if line.get("event") in ("start", "resume")] == [
        "start",
        "resume",
        "resume",
    ]
    assert main(["ckpt", "verify", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
