"""Answers are transformers' own, token by token, on any number of ranks."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.evaluation.generate.greedy import generate

from ...contract.tiny import VOCABULARY, prepared, tiny
from ...data.make import CHATML, byte_level, save_tokenizer, words

LONG = os.environ.get("ITHACA_FAMILIES") == "long"

NEW = 10 if LONG else 6
STACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, dict(heads_per_stage=1, tile=16)),
    "ring": (2, dict(ring=2, shard_parameters=False)),
    "ulysses × ring": (4, dict(ulysses=2, ring=2, heads_per_stage=1, tile=8, store="host")),
    **({"ulysses, data parallel": (4, dict(ulysses=2, engine="composed"))} if LONG else {}),
}


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def theirs(preset: str, length: int, model: Any = None) -> list[int]:
    model = model or tiny(preset)
    ids = torch.tensor([prompt(length)])
    settings = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, length:].tolist()


def ours(preset: str, lengths: list[int], stack: dict[str, Any]) -> list[list[int]]:
    run = prepared(preset, **stack)
    return [generate(run, prompt(length), most=NEW) for length in lengths]


@pytest.mark.parametrize("name", STACKS)
def test_tokens_are_those_of_transformers(workers: Workers, name: str):
    """A prompt of one token, of fewer tokens than some ranks could have, and of a length nothing divides."""
    world, stack = STACKS[name]
    lengths = [1, 3, 61]
    wanted = [theirs("llama3", length) for length in lengths]
    assert workers.run(ours, "llama3", lengths, stack, world=world) == [wanted] * world
    assert len({tuple(each) for each in wanted}) == 3


@pytest.mark.parametrize(
    "preset",
    ["gemma3", "qwen3_moe", "gpt_oss", "granite", *(["phi3", "glm4", "smollm3", "ministral3"] if LONG else [])],
)
def test_families_with_quirks(workers: Workers, preset: str):
    wanted = theirs(preset, 70)
    for found in workers.run(ours, preset, [70], dict(ring=2), world=2):
        assert found == [wanted]


def test_it_stops_where_told_and_the_model_can_train_on():
    run = prepared()
    whole = generate(run, prompt(20), most=NEW)
    stop = whole[3]
    assert generate(run, prompt(20), most=NEW, stop={stop}) == whole[: whole.index(stop) + 1]
    run.loss(run.shard(torch.tensor([prompt(20)]))).backward()
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        generate(run, [], most=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("ask") / "tiny", byte_level(size=300))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320, max_position_embeddings=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat template"])
def test_ask_about_a_file(folder: Path, tmp_path: Path, capsys, monkeypatch, chat: bool):
    monkeypatch.chdir(tmp_path)
    asked = tmp_path / "model"
    shutil.copytree(folder, asked)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML if chat else None
    (asked / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(asked)
    book = tmp_path / "book.txt"
    book.write_text(words(150))
    arguments = ["ask", str(asked), "--file", str(book), "What is it about?", "--tokens", "8", "--cpu", "1"]
    assert main([*arguments, "--model.dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    text = f"{book.read_text()}\n\nQuestion: What is it about?\nAnswer:"
    if chat:
        text = f"<|start|>user\n{book.read_text()}\n\nWhat is it about?<|end|>\n<|start|>assistant\n"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    assert out.rpartition("\n(")[0].strip() == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    assert re.search(rf"\({ids.shape[1]:,} tokens read, \d+ written", out)


def test_an_answer_comes_without_a_stack_of_cpp(folder: Path, tmp_path: Path, monkeypatch, recwarn):
    """As on CPUs without bf16 instructions, on which torch gives a warning of twenty lines at the first product of matrices."""
    warning = "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs a cpu with bf16 support\n"
    linear, came = torch.nn.functional.linear, []

    def product(*given: torch.Tensor | None) -> torch.Tensor:
        warnings.warn(warning + "frame #0: c10::Error::Error", UserWarning, stacklevel=1)
        came.append(1)
        return linear(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ithaca.engine.model.linear.F.linear", product)
    assert main(["ask", str(folder), "What?", "--tokens", "1", "--cpu", "1"]) == 0
    assert came and not [each for each in recwarn if "mkldnn" in str(each.message)]


def test_mistakes_are_one_screen(folder: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "long.txt").write_text(words(2000))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    cases = [
        ([tmp_path / "bare", "why?"], ["asking takes a tokenizer", "--data.tokenizer"]),
        ([folder, "why?", "--file", tmp_path / "nowhere.txt"], ["nowhere.txt cannot be read"]),
        ([folder, "why?", "--file", tmp_path / "binary.txt"], ["is not UTF-8 text"]),
        ([folder, "why?", "--file", tmp_path / "long.txt"], ["1,024 positions", "ithaca docs extension"]),
        ([folder, "why?", "--tokens", "0"], ["at least one"]),
    ]
    for arguments, wanted in cases:
        assert main(["ask", *map(str, arguments), "--cpu", "1"]) == 2
        err = capsys.readouterr().err
        assert all(each in err for each in wanted) and "Traceback" not in err, err
