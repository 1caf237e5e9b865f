"""Evaluation while training: training does not notice, and what it leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.pack import pack
from ithaca.data.source import Source
from ithaca.data.split import Split
from ithaca.engine.build import model_config
from ithaca.evaluation.held_out import open_held_out
from ithaca.observe.metrics import read_metrics
from ithaca.training.entry import _pack
from ithaca.training.preflight import check_run
from ithaca.training.trainer import train

from ..data.make import write_jsonl
from ..training.test_train import hashes_of, losses

SHORT = [
    "data.context=128",
    "train.warmup=2",
    "train.schedule=constant",
    "train.rows=4",
    "log.every=1",
    "train.steps=4",
]
ASKING = ["eval.every=2", "eval.rows=3", "eval.sources=[{synthetic: needles}]", "eval.tasks=needle,multi_key"]
ASKING += ["eval.samples=1", "eval.depths=3", "eval.lengths=100,200", "log.tensorboard=true"]


def run_once(folder: str, more: list[str]) -> tuple[int, bytes]:
    torch.manual_seed(123)
    code = train(load(None, [*SHORT, f"run.folder={folder}", *more], "tiny_cpu").config, quiet=True)
    return code, bytes(torch.get_rng_state().numpy())


def both(workers: Workers, folder: Path, world: int, stack: list[str]) -> dict[str, list[Any]]:
    settings = [f"stack.{each}" for each in stack] + [f"launch.cpu={world}", "checkpoint.every=2"]
    return {
        name: workers.run(run_once, str(folder / name), settings + more, world=world)
        for name, more in (("without", []), ("with", ASKING))
    }


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "two": (2, ["ulysses=2", "ring=1"]),
    "two, data parallel": (2, ["ulysses=1", "ring=1", "shard_parameters=false"]),
}
if os.environ.get("ITHACA_FAMILIES") == "long":  # make families
    LAYOUTS |= {"one": (1, ["ulysses=1", "ring=1"]), "four": (4, ["ulysses=2", "ring=2"])}


@pytest.mark.parametrize(("world", "stack"), LAYOUTS.values(), ids=LAYOUTS)
def test_training_is_bit_identical_with_and_without_it(workers: Workers, tmp_path: Path, world: int, stack: list[str]):
    found = both(workers, tmp_path, world, stack)
    assert found["with"] == found["without"], "exit codes and random states"
    metrics = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in found}
    assert losses(metrics["with"]) == losses(metrics["without"]) and len(losses(metrics["with"])) == 4
    for step in (2, 4):
        before, after = (hashes_of(tmp_path / name / "checkpoints" / f"step-{step}") for name in ("without", "with"))
        assert before == after and before
    evaluated = [line for line in metrics["with"] if line.get("event") == "eval"]
    assert [line["at_step"] for line in evaluated] == [2, 4]
    assert all(set(line) >= {"held_out", "needle", "needle_longest", "multi_key"} for line in evaluated)
    record = json.loads((tmp_path / "with" / "eval" / "step-4.json").read_text())
    assert record["step"] == 4 and record["language"] == "pairs"
    assert record["needle"]["lengths"] == [100, 200] and record["needle"]["depths"] == [0.0, 0.5, 1.0]
    assert [len(row) for row in record["needle"]["accuracy"]] == [3, 3]
    with_loss = [line for line in metrics["with"] if "eval_loss" in line]
    assert [line["eval_loss"] for line in with_loss] == [line["held_out"] for line in evaluated]


def test_tensorboard_has_curves_and_the_heat_map(workers: Workers, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    workers.run(run_once, str(tmp_path), ["launch.cpu=1", "stack.ulysses=1", "stack.ring=1", *ASKING], world=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert {"eval/needle", "eval/held_out", "eval/multi_key", "loss"} <= set(events.Tags()["scalars"])
    pictures = events.Images("eval/needles")
    assert [picture.step for picture in pictures] == [2, 4] and (pictures[0].width, pictures[0].height) == (72, 48)


def test_what_is_held_out_of_the_training_data_is_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the loop and by `ithaca eval`, which both find it in the data of the run; and it is the loss of just these documents."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 64, 20).tolist() for _ in range(120)]
    path = write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": each} for each in ids])
    alone = ["launch.cpu=1", "stack.ulysses=1", "stack.ring=1", f"data.sources=[{path}]", "data.validation=0.2"]
    alone += ["data.context=64", "train.rows=1", "train.warmup=0", "eval.every=1", "eval.rows=100", "train.steps=1"]
    config = load(None, [*alone, f"run.folder={tmp_path / 'run'}"], "tiny_cpu")
    vocabulary = model_config(config.config.model, 64).vocab_size
    packing: Any = {"vocabulary": vocabulary, "workers": 1, "quiet": True}  # here: it would start processes
    packed = pack([Source(str(path))], tmp_path / "run/data", **packing)
    _pack(config.config, quiet=True)
    assert train(config.config, quiet=True, text=config.text) == 0
    record = json.loads((tmp_path / "run/eval/step-1.json").read_text())["held_out"]
    assert not check_run(config.config, config.text).problems

    held_out = Split(0.2, 0, True).select(packed.hashes(), packed.folder)
    assert 0 < held_out.sum() < 60 and record["tokens"] == 19 * held_out.sum()
    beside = write_jsonl(tmp_path / "held_out.jsonl", [{"input_ids": ids[at]} for at in np.flatnonzero(held_out)])
    asked = ["eval", str(tmp_path / "run"), "--cpu", "1", "--quiet", "--eval.tasks", "[]", "--model.dtype", "fp32"]
    pack([Source(str(beside))], tmp_path / "beside", **packing)
    for more in ([], ["--eval.packed", str(tmp_path / "beside")]):
        out = tmp_path / f"out-{len(more)}"
        assert main([*asked, *more, "--out", str(out)]) == 0
        again = json.loads((out / "step-1.json").read_text())["held_out"]
        assert again["tokens"] == record["tokens"] and again["loss"] == pytest.approx(record["loss"], rel=1e-6)

    (tmp_path / "run/data").rename(tmp_path / "elsewhere")
    assert main([*asked, "--out", str(tmp_path / "out")]) == 3
    assert "is held out for validation, is not there; bring it back, or name" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(tmp_path / "run/data")

    # a part that is no row long is a row with padding
    long = load(None, [*alone, "data.context=512", "data.validation=1", f"run.folder={tmp_path / 'run'}"], "tiny_cpu")
    rows = open_held_out(long.config, vocabulary)
    assert rows is not None and len(rows) == 1 and rows.documents(0) == [20, 492] and rows.supervised(0) == 19
