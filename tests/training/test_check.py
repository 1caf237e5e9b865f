"""`ithaca train --check`: whatever a run would refuse, and files can tell, in words and code; and `ithaca train` refuses it the
same, before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ithaca.base.run_folder import RunFolder
from ithaca.cli.main import main
from ithaca.training import entry as verb
from ithaca.training import preflight

from ..data.make import MARKED, byte_level, chat, pack_ids, save_tokenizer, write_jsonl
from ..data.make import words as some_words

TINY: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole: a model of 128 positions with weights; other: the config of a larger one with the weights of the first."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, max_position_embeddings=128, **TINY)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "whole")
    shutil.copytree(folder / "whole", folder / "other")
    LlamaConfig(vocab_size=64, max_position_embeddings=128, **{**TINY, "intermediate_size": 64}).save_pretrained(
        folder / "other"
    )
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(models)
    pack_ids(Path("packed"), [list(range(64)) * 4])
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        given = {
            "model.folder": "models/whole", "model.dtype": "fp32", "data.context": "64", "data.packed": "packed",
            "train.steps": "2", "train.warmup": "0", "launch.cpu": "1", "run.folder": "run", "checkpoint.every": "1",
        }  # fmt: skip
        flags = [word for word in words if not word.partition("=")[1]]
        given |= dict(word.split("=", 1) for word in words if "=" in word)
        code = main(["train", *flags, *(part for name, value in given.items() for part in (f"--{name}", value))])
        out = capsys.readouterr()
        return code, out.out, out.err

    Path("run.yaml").write_text("{}")
    return call


PROBLEMS = {
    "beyond the model's positions": (["data.context=256"], 2, "longer than the 128 positions the model was made for"),
    "rope": (
        ["model.rope.rope_type=yarn", "model.rope.factor=2", "model.rope.original_max_position_embeddings=4096"],
        2, "original_max_position_embeddings=4,096 is longer than the 128 positions",
    ),
    "lora targets": (["model.lora.rank=2", "model.lora.targets=[q_proj, query]"], 2, "names query, which this model does not have"),
    "weights of another model": (["model.folder=models/other"], 2, "needs (64, 32)"),
    "layers": (["stack.recompute=[none]"], 2, "names 1 layers, but the model has 2"),
    "no data": (["data.packed=nowhere"], 2, "is not there yet"),
    "vocabulary": (["data.packed=large"], 3, "outside the model's vocabulary of 64 tokens"),
    "damaged data": (["data.packed=damaged"], 3, "damaged"),
    "sources": (["data.packed=null", "data.sources=[broken.jsonl]"], 3, "broken.jsonl"),
    "a tokenizer is needed": (["data.packed=null", "data.sources=[text.txt]"], 3, "a tokenizer is needed"),
    "questions that do not fit": (["eval.every=1", "eval.tasks=[needle]", "eval.lengths=[2]"], 2, "does not fit into eval length"),
    "held-out data": (["eval.every=1", "eval.packed=large"], 3, "outside the model's vocabulary"),
    "a file in the way": (["run.folder=run.yaml"], 2, "a file is in the way"),
    "another contract": (["run.folder=older"], 2, "contract version 7"),
    "rows": (["run.folder=trained", "train.steps=3", "train.rows=2"], 4, "step-2 was made with train.rows=1"),
    "context on resume": (["run.folder=trained", "train.steps=3", "data.context=32"], 2, "data.context 64 → 32"),
    "no good checkpoint": (["run.folder=broken", "train.steps=3"], 4, "has no good checkpoint"),
}  # fmt: skip


def test_check_and_train_refuse_the_same_and_nothing_is_started(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Every case, by both; all in one test, because two steps are trained for some of them."""
    pack_ids(Path("large"), [list(range(100)) * 2], vocabulary=100)
    pack_ids(Path("damaged"), [list(range(64)) * 4])
    (Path("damaged") / "documents.bin").write_bytes(b"")
    Path("broken.jsonl").write_text("{\n")
    Path("text.txt").write_text("text")
    Path("older").mkdir()
    Path("older/status.json").write_text('{"contract": 7}')
    assert run("run.yaml", "run.folder=trained", "--quiet")[0] == 0
    shutil.copytree("trained", "broken")
    for path in Path("broken/checkpoints").glob("step-*/state.json"):
        path.unlink()

    def never(*_: object, **__: object) -> int:
        return 99  # a run was started

    monkeypatch.setattr(verb, "start", never)
    for case, (words, code, text) in PROBLEMS.items():
        shown = [run("run.yaml", *words, *more) for more in (["--check"], [])]
        for found, out, err in shown:
            assert found == code and "this run cannot start: 1 problem" in err and text in err, (case, found, err)
            assert "can start" not in out
        assert shown[0][2] == shown[1][2], case
        if words[-1] != "run.folder=run.yaml":
            assert not Path("run/checkpoints").exists(), case
    found, _, err = run(
        "run.yaml", "--check", "data.context=256", "run.folder=older", "eval.every=1", "eval.packed=large"
    )
    assert found == 2 and "this run cannot start: 2 problems" in err, "all at once"
    shutil.rmtree("packed")
    pack_ids(Path("packed"), [list(range(64))[::-1] * 4])
    found, _, err = run("run.yaml", "--check", "run.folder=trained", "train.steps=3")
    assert found == 3 and "holds other data than step-2 was trained on" in err
    with RunFolder("trained").claim():
        found, _, err = run("run.yaml", "--check", "run.folder=trained")
    assert found == 2 and "trained is in use by pid" in err


def test_a_run_that_can_start_says_what_it_would_do(run: Run):
    config = {"model", "data", "train", "checkpoint"}
    code, out, err = run("run.yaml", "--check")
    *text, verdict = out.splitlines()
    assert (code, err) == (0, "") and verdict == "this run can start: it trains step 1 of 2, in run"
    assert config <= {line.rstrip(":") for line in text} and not Path("run/checkpoints").exists()
    np.save("row.npy", np.arange(64))
    code, out, _ = run("run.yaml", "--check", "data.packed=null", "data.sources=[row.npy]")
    assert (
        code == 0 and out.splitlines()[-1] == "this run can start: it packs its data, then trains step 1 of 2, in run"
    )
    assert run("run.yaml", "train.steps=1", "train.schedule=constant", "--quiet")[0] == 0
    code, out, _ = run("run.yaml", "--check", "train.schedule=constant")
    assert code == 0 and out.splitlines()[-1] == "this run can start: it trains step 2 of 2, from step-1, in run"


def test_a_run_that_is_finished_says_so_and_starts_nothing(run: Run, monkeypatch: pytest.MonkeyPatch):
    assert run("run.yaml", "--quiet")[0] == 0
    before = Path("run/status.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(verb, "start", lambda *_, **__: pytest.fail("workers were started"))
        code, out, err = run("run.yaml")
        assert (code, err) == (0, "") and out == (
            "this run is finished: run has step 2 of train.steps=2; raise train.steps to go on, or write the model with: ithaca "
            "export run OUT\n"
        )
        assert run("run.yaml", "--check")[1].splitlines()[-1] == out.strip()
    assert Path("run/status.json").read_text() == before
    shard = next(Path("run/checkpoints/step-2").glob("*.distcp"))
    shard.write_bytes(bytes(len(shard.read_bytes())))  # damaged: the last step was not saved after all
    code, out, _ = run("run.yaml")
    assert code == 0 and "finished 2 steps" in out and json.loads(before)["state"] == "finished"


# Twelve chats, pairs of which one is no chat, and five texts: what somebody tries first.
SMALL: dict[str, Any] = dict(vocab_size=300, max_position_embeddings=512, **TINY)


@pytest.fixture
def small(run: Run, tmp_path: Path) -> list[str]:
    """Data that is not packed, and a model whose tokenizer has no chat template."""
    save_tokenizer(tmp_path / "base", byte_level(size=300), template=None)
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "base")
    write_jsonl(tmp_path / "chats.jsonl", [chat(some_words(3, seed), some_words(3, seed + 50)) for seed in range(12)])
    pair = {"prompt": some_words(2), "chosen": some_words(3), "rejected": some_words(3, 1)}
    write_jsonl(tmp_path / "pairs.jsonl", [pair, {**pair, "chosen": [{"role": "assistant", "content": "no"}]}])
    write_jsonl(tmp_path / "texts.jsonl", [{"text": some_words(20, seed)} for seed in range(5)])
    (tmp_path / "my.jinja").write_text(MARKED)
    return ["model.folder=base", "model.random_init=true", "data.packed=null", "data.context=512", "train.steps=1"]


def test_data_that_cannot_be_packed_is_found_before_the_run(
    run: Run, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By --check and --dry-run, small or large; nothing of it stays, and `train` has the same words."""
    chats, pairs = [*small, "data.sources=[chats.jsonl]"], [*small, "data.sources=[pairs.jsonl]", "objective.kind=dpo"]
    before = sorted(tmp_path.rglob("*"))
    no_template = "chats.jsonl:1: this is a chat, but the tokenizer has no chat template"
    for most in (preflight.SMALL, 0):
        monkeypatch.setattr(preflight, "SMALL", most)
        for flag in ("--check", "--dry-run"):
            code, out, err = run("run.yaml", *chats, flag)
            assert code == 3 and no_template in err and "(--data.chat_template)" in err and "can start" not in out
        code, _, err = run("run.yaml", *pairs, "--check")
        assert code == 3 and "pairs.jsonl:2" in err, err
        code, out, _ = run("run.yaml", *small, "data.sources=[texts.jsonl]", "data.validation=0.05", "--dry-run")
        assert code == 0 and ("this run can start, if the data packs: it packs" in out) == (most == 0)
        assert ("5 documents" in out and "1 row of 512 tokens" in out and f"in {tmp_path}" not in out) == (most > 0), (
            out
        )
    assert sorted(tmp_path.rglob("*")) == before
    code, _, err = run("run.yaml", *chats)
    assert code == 3 and no_template in err and "(--data.chat_template)" in err


def test_a_chat_template_goes_with_the_model(
    run: Run, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """From a setting of the run to the exported tokenizer, though its file is gone; `ask` says when there is none."""
    given = [
        "--tokenizer",
        "base",
        "--chat-template",
        "my.jinja",
        "--workers",
        "1",
    ]  # one process: templates take another each
    assert main(["data", "pack", "chats.jsonl", *given, "--out", "run/data"]) == 0
    code, _, err = run("run.yaml", *small, "data.sources=[chats.jsonl]", "data.chat_template=my.jinja")
    assert code == 0, err
    Path("my.jinja").unlink()
    assert main(["export", "run", "out", "--dtype", "fp32"]) == 0
    assert AutoTokenizer.from_pretrained("out").chat_template == MARKED
    capsys.readouterr()
    for model, template in (("run", True), ("base", False)):
        more = [] if template else ["--model.random_init", "true"]
        assert main(["ask", model, "why?", "--tokens", "1", "--cpu", "1", *more]) == 0
        assert ("plain text: there is no chat template" in capsys.readouterr().out) is not template
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["ask", "out", "why?"]) == 2 and "use the CPU with --cpu N" in capsys.readouterr().err
