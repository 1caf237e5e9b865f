"""`ithaca train` as a user types it: text in, a model folder out; mistakes in one screen; a signal saves and stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaca.cli.main import main

from ..data.make import byte_level, save_tokenizer, words

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ALONE = ["--launch.cpu", "1", "--stack.ulysses", "1", "--stack.ring", "1"]
SHORT = ["--data.context", "256", "--train.rows", "2", "--log.every", "1"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with weights and a tokenizer."""
    folder = save_tokenizer(tmp_path_factory.mktemp("model") / "tiny", byte_level(size=300))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, max_position_embeddings=512, **TINY)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    lines = [json.dumps({"text": words(20 + 7 * i % 90, seed=i)}) for i in range(200)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_text_in_model_folder_out(model_folder: Path, texts: Path, tmp_path: Path, capsys):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"model: {{folder: {model_folder}, dtype: fp32}}\n"
        f"data: {{context: 128, sources: [{texts}]}}\n"
        "stack: {tile: 64, heads_per_stage: 2}\n"
        f"train: {{steps: 3, rows: 2, lr: 1e-3}}\n"
        f"run: {{folder: {tmp_path / 'run'}}}\n"
        "launch: {cpu: 1}\nlog: {every: 1}\n"
    )
    code, out, err = run(capsys, "train", run_file)
    assert code == 0 and "trains tiny at 128 tokens, 3 steps" in out and "step 3/3 loss" in out, err
    assert "200 documents" in err and "rows of 128 tokens" in out  # counted before the first step
    code, out, err = run(capsys, "train", run_file, "--train.steps", 4, "--train.schedule", "constant")
    assert code == 0 and "resumes step-3" in out.replace("  ", " ") and "step 4/4" in out
    assert "report: " in out and (tmp_path / "run" / "report" / "index.html").is_file()
    code, _, err = run(capsys, "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")
    assert code == 0, err
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    changed = [n for n, p in trained.named_parameters() if not torch.equal(p, start.get_parameter(n))]
    assert len(changed) == len(list(start.parameters())) and (tmp_path / "out" / "tokenizer.json").is_file()


def test_token_ids_need_no_tokenizer(tmp_path: Path, texts: Path, capsys):
    """A model folder may be a config alone, and data token ids; the ids are then checked against the model's vocabulary."""
    LlamaConfig(vocab_size=64, max_position_embeddings=128, **TINY).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "row.npy", np.arange(128) % 64)
    np.save(tmp_path / "wrong.npy", np.arange(128))
    (tmp_path / "run.yaml").write_text(
        f"model: {{folder: {tmp_path / 'model'}, random_init: true}}\n"
        f"data: {{context: 128, packed: {tmp_path / 'packed'}, sources: [{tmp_path / 'row.npy'}]}}\ntrain: {{steps: 2}}\n"
    )
    assert run(capsys, "data", "pack", tmp_path / "run.yaml")[0] == 0
    trained = ["train", tmp_path / "run.yaml", "--data.packed", "null", *ALONE]
    code, out, err = run(capsys, *trained, "--run.folder", tmp_path / "run")
    assert code == 0, err
    assert "1 row of 128 tokens" in out and "finished 2 steps" in out
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    (source,) = about["data"]["sources"]
    assert (source["kind"], source["documents"], source["supervised"], source["counts"]["rows"]) == (
        "tokens",
        1,
        127,
        1,
    )
    assert about["environment"]["ranks"] == 1 and "torch" in about["environment"]["versions"]
    assert f"steps: 2  # {tmp_path / 'run.yaml'}:3\n" in (tmp_path / "run" / "config.yaml").read_text()
    code, _, err = run(capsys, *trained, "--data.sources", tmp_path / "wrong.npy", "--run.folder", tmp_path / "wrong")
    assert code == 3 and "64" in err and "vocabulary" in err
    code, _, err = run(capsys, *trained, "--data.sources", texts, "--run.folder", tmp_path / "text")
    assert code == 3 and "holds text, so a tokenizer is needed" in err


def test_lora_from_the_config(model_folder: Path, tmp_path: Path, capsys):
    arguments = ["--recipe", "tiny_cpu", "--model.folder", model_folder, "--model.random_init", "false", *SHORT]
    arguments += [
        "--model.lora.rank",
        "4",
        "--train.steps",
        "2",
        "--launch.cpu",
        "1",
        "--stack.ulysses",
        "1",
        "--stack.ring",
        "1",
    ]
    code, out, err = run(capsys, "train", *arguments, "--run.folder", tmp_path / "run")
    assert (code, err) == (0, "") and "of them trained" in out
    code, _, err = run(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["what is to be trained", "ithaca recipes ls"]),
        (["--recipe", "tiny_cpu", "--train.stepss", "3"], 2, ["train.stepss", "did you mean train.steps"]),
        (["--recipe", "tiny_cpuu"], 2, ["tiny_cpuu", "tiny_cpu"]),
        (["nowhere.yaml"], 2, ["nowhere.yaml", "no such file"]),
        (["--recipe", "tiny_cpu", "--stack.ulysses", "3", "--launch.cpu", "4"], 2, ["world size 4", "ulysses × ring"]),
    ],
    ids=["nothing", "typo", "recipe", "file", "stack"],
)
def test_mistakes_are_one_screen(arguments, code, words, capsys):
    found, out, err = run(capsys, "train", *arguments)
    assert found == code and all(word in err for word in words), err
    assert "Traceback" not in out + err and len(err.splitlines()) < 20


def test_a_context_beyond_the_rotary_settings_says_how_to_extend(model_folder: Path, tmp_path: Path, capsys):
    long = [
        "--recipe",
        "tiny_cpu",
        "--model.folder",
        model_folder,
        "--model.random_init",
        "false",
        "--data.context",
        "2K",
    ]
    long += [
        "--launch.cpu",
        "1",
        "--stack.ulysses",
        "1",
        "--stack.ring",
        "1",
        "--run.folder",
        tmp_path,
        "--train.steps",
        "1",
    ]
    code, _, err = run(capsys, "train", *long)
    assert code == 2 and "512 positions" in err and "--model.rope.rope_type yarn --model.rope.factor 4" in err
    rope = ["--model.rope.rope_type", "yarn", "--model.rope.factor", "4"]
    rope += ["--model.rope.original_max_position_embeddings", "512"]
    code, _, err = run(capsys, "train", *long, *rope, "--train.rows", "1")
    assert code == 0, err


def test_broken_data_is_exit_3_before_anything_starts(model_folder: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": "broken\n')
    arguments = [
        "--recipe",
        "tiny_cpu",
        "--model.folder",
        model_folder,
        "--data.sources",
        f"[{tmp_path / 'bad.jsonl'}]",
    ]
    code, _, err = run(capsys, "train", *arguments, *SHORT, *ALONE, "--run.folder", tmp_path / "run")
    assert code == 3 and "bad.jsonl:2" in err and "Traceback" not in err, err


def test_a_loss_that_is_not_finite_is_exit_6(tmp_path: Path, capsys):
    arguments = ["--recipe", "tiny_cpu", *SHORT, "--launch.cpu", "1", "--stack.ulysses", "1", "--stack.ring", "1"]
    arguments += ["--train.lr", "1e30", "--train.warmup", "0", "--train.clip", "null", "--train.steps", "9"]
    code, out, err = run(capsys, "train", *arguments, "--checkpoint.every", "1", "--run.folder", tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert code == 6 and status["state"] == "failed" and status["exit_code"] == 6
    assert "weights were not touched" in out + err and "Rows 2 to 3" in status["cause"]
    assert status["checkpoint"] == "checkpoints/step-1"
