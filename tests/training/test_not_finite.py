"""Runs whose weights are lost to NaN: exit code 6, nothing of it on disk, the last good checkpoint still there and named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ithaca.base.exits import NOT_FINITE, Failed, worth_another_try
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.observe.metrics import read_metrics
from ithaca.storage import check
from ithaca.training.trainer import train

PLAIN = ["ulysses=1", "ring=1", "recompute=none", "store=gpu", "tile=null", "shard_parameters=false"]
SHORT = ["data.context=64", "train.warmup=0", "train.schedule=constant", "log.every=1", "checkpoint.keep_last=1"]
ALONE = ["launch.cpu=1", "train.rows=1", *(f"stack.{each}" for each in PLAIN)]
TWO = ["launch.cpu=2", "train.rows=2", "stack.ulysses=2", "stack.ring=1"]
LOST = "train.lr=3.4e38"  # a number that float32 holds, though no sum with it


def run(folder: str, *overrides: str) -> tuple[int, str]:
    config = load(None, [*SHORT, f"run.folder={folder}", *overrides], "tiny_cpu").config
    try:
        return train(config, quiet=True), ""
    except Failed as error:
        assert not worth_another_try(error), "a supervisor does not start it again"
        return error.exit_code, str(error)


def run_on_ranks(folder: str, overrides: list[str]) -> tuple[int, str]:
    return run(folder, *TWO, *overrides)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*step-*"))


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize("asynchronous", ["true", "false"] if os.environ.get("ITHACA_FAULTS") == "long" else ["true"])
def test_a_lost_update_is_not_saved_and_costs_no_good_checkpoint(workers: Workers, tmp_path: Path, asynchronous: str):
    settings = ["checkpoint.every=1", f"checkpoint.asynchronous={asynchronous}"]
    assert workers.run(run_on_ranks, str(tmp_path), [*settings, "train.steps=2"], world=2) == [(0, "")] * 2
    for code, text in workers.run(run_on_ranks, str(tmp_path), [*settings, "train.steps=4", LOST], world=2):
        assert code == NOT_FINITE and text.startswith("step 3 was not saved: rank 0: ") and " is not finite (" in text
        assert "Last good checkpoint (every number in it is finite): checkpoints/step-2. Lower train.lr" in text
    assert names(tmp_path) == ["step-2"] and check.verify(tmp_path / "checkpoints/step-2") == []
    found = status(tmp_path)
    assert (found["state"], found["exit_code"], found["checkpoint"]) == ("failed", 6, "checkpoints/step-2")
    assert workers.run(run_on_ranks, str(tmp_path), [*settings, "train.steps=3"], world=2) == [(0, "")] * 2


def test_where_nothing_is_saved_in_between_the_next_loss_tells_and_the_words_are_true(tmp_path: Path):
    settings = [*ALONE, "checkpoint.every=2"]
    assert run(str(tmp_path), *settings, "train.steps=2") == (0, "")
    code, text = run(str(tmp_path), *settings, "train.steps=9", LOST)
    assert code == NOT_FINITE and text.startswith("step 4: loss nan") and "were not touched" not in text
    assert "The weights were not finite before this step (on rank 0, first in model." in text
    assert "Last good checkpoint (every number in it is finite): checkpoints/step-2." in text
    assert names(tmp_path) == ["step-2"] and check.verify(tmp_path / "checkpoints/step-2") == []


def test_a_run_without_a_checkpoint_says_that_there_is_none(tmp_path: Path):
    code, text = run(str(tmp_path), *ALONE, "train.steps=1", LOST)
    assert code == NOT_FINITE and "There is no checkpoint yet." in text and "starts from the beginning" in text
    assert names(tmp_path) == [] and status(tmp_path)["checkpoint"] is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (LOST, "step 1 cannot be evaluated: model.embed_tokens.weight is not finite ("),
        ("train.lr=1e30", "step 1: what the evaluation found is not finite (loss nan)"),
    ],
)
def test_an_evaluation_that_is_not_finite_is_said_not_published(tmp_path: Path, setting: str, words: str):
    evaluated = ["eval.every=1", "eval.rows=1", "eval.sources=[{synthetic: recall}]"]
    code, text = run(str(tmp_path), *ALONE, "train.steps=2", "checkpoint.every=1", *evaluated, setting)
    assert code == NOT_FINITE and text.startswith(words) and "There is no checkpoint yet." in text
    assert not any("eval_loss" in line for line in read_metrics(tmp_path / "metrics.jsonl"))


def test_a_bad_checkpoint_of_an_older_version_is_passed_over(tmp_path: Path):
    settings = [*ALONE, "checkpoint.every=2", "checkpoint.keep_last=2"]
    assert run(str(tmp_path), *settings, "train.steps=2") == (0, "")
    with mock.patch("ithaca.storage.checkpoint.require_finite"):  # which did not look
        assert run(str(tmp_path), *settings, "train.steps=3", LOST) == (0, "")
    assert names(tmp_path) == ["step-2", "step-3"] and check.verify(tmp_path / "checkpoints/step-3")
    assert run(str(tmp_path), *settings, "train.steps=4") == (0, "")
    said = (tmp_path / "logs/rank-0.log").read_text()
    assert "step-3 holds numbers that are not finite: " in said and "Using step-2" in said
    assert check.verify(tmp_path / "checkpoints/step-4") == []


@pytest.mark.parametrize("setting", ["--train.eps=1e-46", "--train.lr=1e39"])
def test_settings_that_float32_does_not_hold_are_refused_before_anything_is_trained(
    tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]
):
    words = [word for each in ALONE for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
    assert main(["train", "--recipe", "tiny_cpu", *words, *setting.split("="), "--run.folder", str(tmp_path)]) == 2
    assert f"{setting.partition('=')[0]}: " in (said := capsys.readouterr().err) and "in float32" in said
    assert not (tmp_path / "checkpoints").exists()
