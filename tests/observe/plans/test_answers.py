"""What a page is told: the numbers of the command line, changes that hold what they promise, a run that is the planned one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ithaca.cli.main import main
from ithaca.config import load
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.shrink import smallest
from ithaca.observe.plans import answers
from ithaca.observe.plans.asking import Wrong, read
from ithaca.planner.config import requested, run_yaml
from ithaca.planner.search import plan

EIGHT = {"model": "llama3_8b", "gpus": "8xH100-80GB", "context": "3M"}
CASES = {
    "eight": EIGHT,
    "more": {"model": "qwen3_32b", "gpus": "2x8xH200", "context": "1M", "rows": "2", "accumulation": "2", "host": "1TB",
             "synchronous": "yes", "deterministic": "yes"},
    "adapters": {"model": "llama31_8b", "gpus": "1xRTX4090", "context": "64K", "lora": "16", "lora_targets": "q_proj, v_proj",
                 "offload_optimizer": "yes", "disk": "1TB", "optimizer": "adamw"},
    "fixed": {**EIGHT, "context": "1M", "stack": "recompute=layer, tile=8K", "kernel": "cudnn"},
    "too much": {**EIGHT, "gpus": "2xH100-80GB"},
    "moe": {"model": "qwen3_30b_a3b", "gpus": "8xB200", "context": "512K"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_command_line(name: str, capsys: pytest.CaptureFixture[str]):
    asked = read(CASES[name])
    shown = answers.answer(asked)
    assert shown is not None
    code = main([*shlex.split(asked.command)[1:], "--json"])  # the page's own command
    said = json.loads(capsys.readouterr().out)
    assert code == (0 if shown["fits"] else 5)
    if not shown["fits"]:
        planned = answers._planned(asked.question, None)
        assert said.pop("advice") == [each["words"] for each in answers.advice_of(asked, planned)]
        said["advice"] = []
    assert json.loads(json.dumps(shown["plan"])) == said
    assert {bar["label"]: bar["parts"] for bar in shown["phases"]["bars"]} == said["phases"]
    assert shown["figures"][0]["value"] == said["peak"] and shown["fits"] == said["fits"]


def test_what_would_fit_does():
    """Each piece of advice, as the change it is offered as."""
    asked = read({**EIGHT, "gpus": "4xH100-80GB", "context": "4M"})
    shown = answers.answer(asked)
    assert shown is not None and not shown["fits"] and shown["yaml"] is None and shown["cost"] is None
    pieces = answers.pieces(asked, print)
    advice = next(pieces)
    assert advice["part"] == "advice" and len(advice["value"]) >= 3
    for each in advice["value"]:
        changed = answers.answer(read({**asked.words, **each["change"]}))
        assert each["change"] and changed is not None and changed["fits"], each


def test_what_takes_longer_is_what_the_planner_says_there():
    fixed = "ulysses=2, recompute=layer, tile=4K, heads_per_stage=4"
    asked = read({"model": "llama32_1b", "gpus": "2xRTX4090", "context": "512K", "stack": fixed})
    found = list(answers.pieces(asked, print))
    parts = {piece["part"]: piece["value"] for piece in found if piece["part"] != "cell"}
    assert list(parts) == ["ladder", "longest", "grid"]
    assert [rung["label"] for rung in parts["ladder"]["rungs"]][:2] == ["plain", "+FSDP"]
    top = answers.answer(read({**asked.words, "context": parts["longest"]["context"]}))
    assert top is not None and top["fits"] and top["plan"]["peak"] == parts["longest"]["peak"]
    grid, cells = parts["grid"], [piece["value"] for piece in found if piece["part"] == "cell"]
    assert len(cells) == len(grid["gpus"]) * len(grid["contexts"])
    row, column = grid["at"]
    (here,) = (cell for cell in cells if (cell["row"], cell["column"]) == (row, column))
    shown = answers.answer(asked)
    assert shown is not None and here["rate"] == shown["plan"]["time"]["tokens_per_second"]
    assert {cell["fits"] for cell in cells} == {True, False, None}, "one GPU cannot share a sequence"
    for cell in cells[:: len(cells) // 5]:
        words = {**asked.words, "gpus": grid["gpus"][cell["row"]], "context": grid["contexts"][cell["column"]]}
        if cell["fits"] is None:
            with pytest.raises(ValueError):
                answers.answer(read(words))
        else:
            there = answers.answer(read(words))
            assert there is not None and there["fits"] == cell["fits"]


def test_a_number_of_tokens_has_a_cost():
    shown = answers.answer(read({**EIGHT, "tokens": "1.5B", "price": "2.50"}))
    assert shown is not None
    rate, cost = shown["plan"]["time"]["tokens_per_second"], shown["cost"]
    assert cost["gpu_hours"] == pytest.approx(1.5e9 / rate / 3600) and cost["money"] == pytest.approx(
        2.5 * cost["gpu_hours"]
    )
    assert cost["seconds"] == pytest.approx(1.5e9 / rate / 8) and cost["steps"] == -(-1_500_000_000 // (3 * 2**20))
    assert f"steps: {cost['steps']}\n" in shown["yaml"]


def test_a_model_without_arithmetic_is_counted(tmp_path: Path):
    folder = tmp_path / "small"
    smallest("exaone4").save_pretrained(folder)
    asked, said = read({"model": str(folder), "gpus": "1xH100-80GB", "context": "256"}), []
    assert answers.answer(asked) is None
    (piece,) = answers.pieces(asked, said.append)
    shown = piece["value"]
    assert piece["part"] == "answer" and shown["fits"] and "dry run of its own code" in shown["counted"]
    assert said and said[0].startswith("dry run at 256") and shown["times"] is None and shown["cost"] is None
    assert shown["untimed"] == "small has no arithmetic here"
    assert answers.by_dry_run(read({**EIGHT, "model": str(folder)})) and not answers.by_dry_run(read(EIGHT))


def test_no_time_where_none_is_known_and_that_is_said():
    shown = answers.answer(read({**EIGHT, "gpus": "8xMI300X"}))
    assert shown is not None and shown["fits"] and shown["times"] is None and shown["cost"] is None
    assert shown["untimed"].startswith("nobody has run this on MI300X") and "tokens/s" not in json.dumps(
        shown["figures"]
    )
    timed = answers.answer(read(EIGHT))
    assert timed is not None and timed["untimed"] is None


def test_a_config_that_changes_is_read_again(tmp_path: Path):
    path = tmp_path / "config.json"
    config = preset_config("llama32_1b").to_dict()
    for layers in (4, 8):
        path.write_text(json.dumps({**config, "num_hidden_layers": layers, "note": "x" * layers}))
        shown = answers.answer(read({**EIGHT, "model": str(tmp_path), "context": "64K"}))
        assert shown is not None and shown["plan"]["model"]["layers"] == layers


@pytest.mark.parametrize("name", ["eight", "more", "adapters", "fixed"])
def test_the_run_is_the_planned_one(name: str, tmp_path: Path):
    asked = read(CASES[name])
    planned = plan(asked.model, gpus=asked.gpus, context=asked.context, **asked.options, **asked.pinned)
    (tmp_path / "run.yaml").write_text(run_yaml(planned, asked.model, kernel=asked.options.get("kernel")))
    config = load(tmp_path / "run.yaml").config
    rooms = {name: value for name, value in asked.options.items() if name in ("host", "disk")}
    again = plan(config.model.folder, gpus=asked.gpus, stack=config.stack.chosen, **rooms, **requested(config))
    assert again.json()["peak"] == planned.peak and again.job.trained == planned.job.trained
    assert again.host == planned.host and again.seconds == planned.seconds
    assert config.launch.world == planned.hardware.count


def test_what_is_wrong_is_said_by_field():
    words = {"model": "", "gpus": "8xH1000", "context": "3X", "rows": "0", "host": "0GB", "lora_targets": "q_proj",
             "stack": "tiles=3", "tokens": "many", "price": "0", "offload_optimizer": "perhaps", "nonsense": "1"}  # fmt: skip
    with pytest.raises(Wrong) as wrong:
        read(words)
    assert wrong.value.problems.keys() == words.keys()
    for name, words in (
        ("context", "20G"),
        ("context", "1"),
        ("gpus", "99999999xH100"),
        ("lora", "-1"),
        ("rows", "9" * 40),
    ):
        with pytest.raises(Wrong) as wrong:
            read({**EIGHT, name: words})
        assert list(wrong.value.problems) == [name]
