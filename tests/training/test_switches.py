"""Epochs, the best checkpoint and an early end, dry runs, and training from Python: real runs of a few steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.exits import Failed
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import Config, load
from ithaca.config.nodes import load_plain
from ithaca.data.order import Order
from ithaca.observe.metrics import read_metrics
from ithaca.training import trainer
from ithaca.training.best import Best

from ..data.make import pack_ids

BASE: dict[str, Any] = {
    "recipe": "tiny_cpu",
    "data": {"context": 32},
    "stack": {"ulysses": 1, "ring": 1, "heads_per_stage": None, "recompute": "none", "store": "gpu", "tile": None},
    "train": {"steps": 6, "rows": 2, "warmup": 0, "schedule": "constant"},
    "eval": {"rows": 2, "sources": [{"synthetic": "recall"}]},
    "log": {"every": 1},
    "launch": {"cpu": 1},
}
Write = Callable[..., dict[str, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: str, **changes: dict[str, Any]) -> dict[str, Any]:
    sections = {name: {**BASE.get(name, {}), **change} for name, change in changes.items()}
    return {**BASE, **sections, "run": {"folder": folder}}


def losses(folder: str | Path) -> list[float]:
    found = {line["step"]: line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in line}
    return [found[step] for step in sorted(found)]


def events(folder: str | Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(Path(folder) / "metrics.jsonl") if line.get("event") == kind]


def checkpoints(folder: str | Path) -> list[str]:
    return sorted(path.name for path in (Path(folder) / "checkpoints").glob("step-*"))


# -- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "weights", "epochs", "samples"),
    [
        ([7], [1.0], 1, 7),
        ([7], [1.0], 2.5, 18),
        ([10], [1.0], 1.1, 11),
        ([3, 9], [1.0, 3.0], 1, 12),
        ([3, 9], [1.0, 1.0], 1, 18),
    ],
)
def test_an_epoch_is_over_when_every_source_was_gone_through(sizes, weights, epochs, samples):
    order = Order(sizes, weights)
    assert order.until(epochs) == samples
    assert all(done >= epochs for done in order.epochs(samples)) and min(order.epochs(samples - 1)) < epochs


def test_epochs_are_counted_in_steps_and_resumed_in_their_middle(here: Path, capsys: pytest.CaptureFixture[str]):
    pack_ids(Path("packed"), [[(7 * at + row) % 30 for at in range(32)] for row in range(5)])

    def epochs(folder: str, count: float) -> ithaca.Trained:
        # with Muon, whose momentum goes on too
        given = config(folder, data={"packed": "packed", "sources": []}, train={"epochs": count, "optimizer": "muon"})
        del given["train"]["steps"], given["eval"]
        given["stack"] = "auto"
        return ithaca.train(given)

    whole = epochs("whole", 2)
    assert (whole.state, whole.step, whole.steps) == ("finished", 5, 5)
    assert epochs("parts", 0.8).step == 2
    parts = epochs("parts", 2)
    assert parts.step == 5 and parts.losses == whole.losses == tuple(losses("whole"))
    assert [line["samples"] for line in read_metrics(Path("parts/metrics.jsonl")) if "loss" in line] == [2, 4, 6, 8, 10]
    written = load_plain(Path("whole/config.yaml").read_text(), "config.yaml")["train"]
    assert (written["epochs"], written["steps"]) == (2.0, 0) and load("whole/config.yaml").config.train.epochs == 2
    capsys.readouterr()
    assert main(["train", "whole/config.yaml"]) == 0
    assert capsys.readouterr().out.startswith("this run is finished: whole has step 5 of train.epochs=2")
    assert main(["train", "whole/config.yaml", "--check", "--train.epochs", "3"]) == 0
    assert capsys.readouterr().out.endswith("trains step 6 of 8 (3 epochs), from step-5, in whole\n")


def test_steps_and_epochs_take_each_others_place(here: Path):
    Path("run.yaml").write_text("recipe: tiny_cpu\ndata: {sources: [a.npy]}\ntrain: {epochs: 2}\n")
    train = load("run.yaml").config.train
    assert (train.steps, train.epochs) == (0, 2)
    train = load("run.yaml", ["train.steps=7"]).config.train
    assert (train.steps, train.epochs) == (7, None)
    for words, problem in (
        (["train.steps=7", "train.epochs=1"], "train.steps=7 and train.epochs=1 are both given; drop one of them"),
        (["data.sources=[{synthetic: recall}]"], "train.epochs needs data that has an end, and synthetic: recall has none"),
        (["train.steps=0", "train.epochs=null"], "train.steps is missing or 0"),
        (["phases=[{context: 64, steps: 2}]"], "train.epochs cannot be given with phases"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem.replace("+", r"\+")):
            load("run.yaml", words)


# -- the best, and an early end ---------------------------------------------------------------------------------------


def scored(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Evaluations run as they are, and find these losses after one step, two, ..."""
    plain = trainer.run_suite

    def run_suite(run: Any, suite: Any, step: int, **more: Any) -> Any:
        record = plain(run, suite, step, **more)
        record["held_out"]["loss"] = scores[step - 1]
        return record

    monkeypatch.setattr(trainer, "run_suite", run_suite)


KEEPING = {"every": 1, "keep_best": True, "stop_after": 3}


def test_the_best_is_kept_and_exported_and_a_run_that_gets_no_better_ends(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    scored(monkeypatch, [5.0, 4.0, 4.5, 4.25, 4.125, 3.0])
    once = ithaca.train(config("once", eval=KEEPING, checkpoint={"keep_last": 1}))
    assert (once.state, once.step, once.steps) == ("finished", 5, 6)
    assert once.best == {"metric": "held_out", "value": 4.0, "step": 2}
    assert checkpoints("once") == ["step-2", "step-5"] and Path("once/checkpoints/BEST").read_text() == "step-2\n"
    assert [event["at_step"] for event in events("once", "best")] == [1, 2]
    cause = "3 evaluations without improvement, eval.stop_after=3"
    assert [event["cause"] for event in events("once", "stop")] == [cause]
    assert json.loads(Path("once/status.json").read_text())["cause"] == cause
    capsys.readouterr()
    assert main(["train", "once/config.yaml"]) == 0
    assert capsys.readouterr().out == (
        "this run is finished: once ended after step 5, for 3 evaluations were not better than held_out 4 after step 2; raise or "
        "drop eval.stop_after to go on, or write the model with: ithaca export once OUT\n"
    )
    assert main(["ckpt", "ls", "once"]) == 0 and "step-2 (BEST)" in capsys.readouterr().out
    assert main(["export", "once", "out", "--checkpoint", "best"]) == 0
    assert "of step 2 to out" in capsys.readouterr().out
    assert main(["export", "once", "third", "--checkpoint", "newest"]) == 4
    assert "--checkpoint newest is unknown; choose latest, best or step-N" in capsys.readouterr().err
    # in parts: the counters go on, and the best of the first part is still the best
    parts = ithaca.train(config("parts", eval=KEEPING, train={"steps": 3}, checkpoint={"keep_last": 1}))
    assert (parts.state, parts.step) == ("finished", 3) and checkpoints("parts") == ["step-2", "step-3"]
    parts = ithaca.train(config("parts", eval=KEEPING, checkpoint={"keep_last": 1}))
    assert (parts.step, parts.best, checkpoints("parts")) == (5, once.best, ["step-2", "step-5"])
    assert losses("parts") == losses("once")
    # more patience: it goes on, and finds a better one
    more = ithaca.train(config("parts", eval={**KEEPING, "stop_after": 4}, checkpoint={"keep_last": 1}))
    assert (more.step, more.best and more.best["step"], checkpoints("parts")) == (6, 6, ["step-6"])


def in_group(folder: str) -> tuple[int, Any, list[float]]:
    """A rank for which evaluations find something else than for the others: rank 0 is believed."""
    import torch.distributed as dist

    torch.manual_seed(3)
    plain, rank = trainer.run_suite, dist.get_rank()

    def run_suite(run: Any, suite: Any, step: int, **more: Any) -> Any:
        record = plain(run, suite, step, **more)
        record["held_out"]["loss"] = 4.0 + (step if rank == 0 else -step)
        return record

    trainer.run_suite = run_suite
    try:
        done = ithaca.train(config(folder, eval={"every": 1, "stop_after": 2}, launch={"cpu": 2}, stack={"ring": 2}))
    finally:
        trainer.run_suite = plain
    return done.step, done.best, list(done.losses)


def test_all_ranks_of_a_group_decide_alike(workers: Workers, here: Path):
    first, second = workers.run(in_group, str(here / "run"), world=2)
    assert first == second and first[:2] == (3, {"metric": "held_out", "value": 5.0, "step": 1})


def test_accuracies_are_to_rise_and_another_question_starts_anew():
    asked = ["eval.every=1", "eval.tasks=[needle, multi_key]", "eval.keep_best=true", "eval.stop_after=2"]
    given = load(None, [*asked, "eval.improvement=0.1"], "tiny_cpu").config
    best = Best.of(given)
    assert best is not None and best.metric == "needle" and Best.of(load(None, [], "tiny_cpu").config) is None
    for step, score in enumerate((0.5, 0.55, 0.7, 0.7, 0.75), 1):
        best = best.after({"needle": score, "multi_key": 0.0}, step, given.eval.improvement)
    assert (best.value, best.step, best.since) == (0.7, 3, 2) and best.enough(given.eval)
    same, other = (Best.of(load(None, [*asked, each], "tiny_cpu").config) for each in ("eval.every=5", "eval.seed=1"))
    assert same is not None and same.resumed(best.json()) == best
    assert other is not None and other.resumed(best.json()) == other
    for words, problem in (
        ("eval.metric=held_out", "eval.metric=held_out is not measured; give eval.sources, eval.packed or data.validation"),
        ("eval.metric=common_words", "eval.metric=common_words is not measured; add common_words to eval.tasks"),
        ("eval.every=null", "eval.keep_best compares evaluations, and there are none; give eval.every"),
        ("phases=[{context: 64, steps: 80}, {context: 2K, steps: 9}]", "eval.stop_after compares evaluations of one context"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            load(None, [*asked, words], "tiny_cpu")


# -- dry run, and from Python -----------------------------------------------------------------------------------------


def test_a_dry_run_counts_and_plans_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]):
    pack_ids(Path("packed"), [list(range(30)) * 4, list(range(20)) * 4])
    Path("more.npy").write_bytes(next(Path("packed").glob("*.bin")).read_bytes())
    given = ["--data.context", "50", "--data.packed", "packed", "--data.sources", "[]", "--train.epochs", "3"]
    words = ["train", "--recipe", "tiny_cpu", *given, "--run.folder", "run", "--dry-run"]
    before = sorted(here.rglob("*"))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 documents, 200 tokens" in out and "4 rows of 50 tokens, 100.00% full" in out
    assert "on the CPU there is no plan; stack: ulysses 2" in out
    assert out.endswith("this run can start: it trains step 1 of 3 (3 epochs), in run; nothing was written\n")
    assert sorted(here.rglob("*")) == before
    assert main([*words, "--data.context", "250"]) == 0 and "warning: that is all the data" in capsys.readouterr().out
    gpu = [word for word in words if word != "4"]
    assert main([*gpu, "--launch.cpu", "null"]) == 0 and (
        torch.cuda.is_available() or "torch sees no GPU here, so there is no plan" in capsys.readouterr().out
    )
    assert sorted(here.rglob("*")) == before


@pytest.mark.skipif(
    os.environ.get("ITHACA_FAULTS") != "long",
    reason="a start that imports everything, 10 s: make faults; others start commands",
)
def test_from_python_with_workers_of_its_own(here: Path):
    """A dict; the command line on the same folder finds it finished."""
    done = ithaca.train(config("run", train={"steps": 2}, launch={"cpu": 2}, stack={"ring": 2}))
    assert (done.state, done.step, done.steps, done.folder) == ("finished", 2, 2, Path("run"))
    assert (
        list(done.losses) == losses("run") and done.checkpoint == Path("run/checkpoints/step-2") and done.best is None
    )
    assert {path.name for path in Path("run/logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    again = ithaca.train(load("run/config.yaml").config)
    assert again == done and len(events("run", "start")) == 1 and not events("run", "resume")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (config("run", train={"stepss": 2}), ValueError, "unknown key train.stepss; did you mean train.steps"),
        (config("run", data={"context": "1Q"}), ValueError, "data.context='1Q' is not a number of tokens"),
        (config("run", data={"context": {1, 2}, "seed": object()}), ValueError, "config holds what YAML does not"),
        (config("run", model={"folder": "nowhere"}), Failed, "model.folder='nowhere' is not a folder"),
        ("nowhere.yaml", ValueError, "nowhere.yaml: no such file"),
        (3, ValueError, "config is a int; give a YAML file, a dict like one, or an ithaca Config"),
    ],
)
def test_from_python_the_words_are_those_of_the_command_line(here: Path, given: Any, error: type, words: str):
    with pytest.raises(error, match=words):
        ithaca.train(given)
    assert not Path("run").exists()


def test_a_config_is_whole():
    given = load(None, [], "tiny_cpu").config
    assert isinstance(given, Config)
    with pytest.raises(ValueError, match="a Config is whole already"):
        ithaca.train(given, recipe="tiny_cpu")
