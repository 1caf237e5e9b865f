"""`ithaca eval` as a user types it: runs, checkpoints and folders; mistakes in one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.evaluation.alone import evaluate_alone
from ithaca.evaluation.opening import find_model

from ..data.make import byte_level, save_tokenizer, words

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
DOTTED = ["model.dtype=fp32", "eval.samples=2", "eval.depths=2"]
ONE = ["--cpu", "1", *(f"--{each}" for each in DOTTED)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with weights and a tokenizer."""
    path = save_tokenizer(tmp_path_factory.mktemp("model") / "tiny", byte_level(bos=True, size=300))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, max_position_embeddings=1024, **TINY)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bare(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    path = tmp_path_factory.mktemp("bare") / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tiny"
    alone = ["--cpu", "1", "--stack.ulysses", "1", "--stack.ring", "1", "--data.context", "128", "--train.steps", "4"]
    arguments = [
        "train",
        "--recipe",
        "tiny_cpu",
        *alone,
        "--checkpoint.every",
        "2",
        "--quiet",
        "--run.folder",
        str(path),
    ]
    assert main(arguments) == 0
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def evaluate_on(source: str, overrides: list[str], out: str) -> int:
    return evaluate_alone(find_model(Path(source), overrides, Path(out)), quiet=True)


def test_a_run_a_checkpoint_and_any_layout(run_folder: Path, workers: Workers, capsys):
    code, out, err = run(capsys, "eval", run_folder, *ONE, "--eval.sources", "[{synthetic: needles}]")
    assert code == 0, err
    assert "needles found, by length and depth" in out and "multi_key" in out and "held-out data: loss" in out
    record = json.loads((run_folder / "eval" / "step-4.json").read_text())
    assert record["step"] == 4 and record["needle"]["lengths"] == [32, 64, 128] and record["language"] == "pairs"
    assert "Needles found" in (run_folder / "report" / "index.html").read_text()
    code, _, err = run(capsys, "eval", run_folder / "checkpoints" / "step-2", *ONE, "--eval.lengths", "64", "--quiet")
    assert code == 0 and (run_folder / "eval" / "step-2.json").is_file(), err
    given = [*DOTTED, "launch.cpu=2", "eval.tasks=needle,multi_key", "eval.sources=[{synthetic: needles}]"]
    assert workers.run(evaluate_on, str(run_folder), given, str(run_folder / "two"), world=2) == [0, 0]
    two = json.loads((run_folder / "two" / "step-4.json").read_text())
    assert two["held_out"]["loss"] == pytest.approx(record["held_out"]["loss"], rel=1e-4)
    assert two["needle"]["accuracy"] == record["needle"]["accuracy"]


def test_a_folder_with_a_tokenizer_and_a_held_out_file(folder: Path, tmp_path: Path, capsys):
    text = tmp_path / "held_out.txt"
    text.write_text(words(3000))
    lengths = ["--eval.lengths", "1000", "--data.context", "1K"]
    code, _, err = run(
        capsys, "eval", folder, *ONE, "--file", text, "--out", tmp_path / "out", *lengths, "--eval.rows", "3"
    )
    assert code == 0, err
    record = json.loads((tmp_path / "out" / "step-0.json").read_text())
    assert record["language"] == "words" and {each["task"] for each in record["tasks"]} == {
        "multi_key", "multi_value", "variable_tracking", "common_words",
    }  # fmt: skip
    assert record["held_out"]["positions"][-1]["to"] == 1024 and record["held_out"]["tokens"] > 2000
    code, _, err = run(capsys, "report", tmp_path / "out" / "step-0.json", "--out", tmp_path / "page.html")
    assert code == 0 and "Needles found" in (tmp_path / "page.html").read_text(), err


def test_a_folder_without_a_tokenizer_is_asked_in_ids(bare: Path, tmp_path: Path, capsys):
    code, _, err = run(
        capsys, "eval", bare, *ONE, "--out", tmp_path, "--eval.lengths", "128", "--eval.tasks", "needle,multi_value"
    )
    assert code == 0 and json.loads((tmp_path / "step-0.json").read_text())["language"] == "ids", err


def test_mistakes_are_one_screen(folder: Path, bare: Path, run_folder: Path, tmp_path: Path, capsys):
    short = tmp_path / "short.txt"
    short.write_text(words(5))
    words_only = ["--eval.language", "words"]
    cases = [
        ((folder, "--eval.lengths", "16"), 2, ["does not fit into eval length 16", "use lengths of at least"]),
        ((bare, *words_only), 2, ["needs a tokenizer", "--data.tokenizer", "--eval.language ids"]),
        ((bare, "--file", short), 3, ["holds text, so a tokenizer is needed"]),
        ((run_folder, "--eval.tasks", "common_words"), 2, ["common_words cannot be asked in the language pairs"]),
        ((run_folder, "--eval.tasks", "neddle"), 2, ["eval.tasks", "needle"]),
        ((run_folder, "--eval.lengths", "64,32"), 2, ["ascending"]),
        ((tmp_path / "nowhere",), 2, ["is not a folder"]),
        ((tmp_path,), 2, ["has neither config.yaml"]),
    ]
    for arguments, code, wanted in cases:
        found, out, err = run(capsys, "eval", *arguments, *ONE, "--out", tmp_path / "out")
        assert found == code and all(word in err for word in wanted), (arguments, found, err)
        assert "Traceback" not in out + err and len(err.splitlines()) < 20


def test_training_with_questions_that_do_not_fit_does_not_start(tmp_path: Path, capsys):
    arguments = [
        "--recipe",
        "tiny_cpu",
        "--cpu",
        "1",
        "--stack.ulysses",
        "1",
        "--stack.ring",
        "1",
        "--run.folder",
        tmp_path / "run",
    ]
    arguments += ["--eval.every", "2", "--eval.tasks", "multi_key", "--eval.lengths", "4"]
    code, _, err = run(capsys, "train", *arguments)
    assert (
        code == 2
        and "multi_key does not fit into eval length 4" in err
        and not (tmp_path / "run" / "metrics.jsonl").exists()
    )
