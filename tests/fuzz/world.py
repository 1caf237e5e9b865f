"""A small world for the fuzzer: a model with its tokenizer, packed data, a trained run, a LoRA run, a config. All real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaca.cli.main import main
from ithaca.data.pack import pack
from ithaca.data.source import Source

from ..data.make import byte_level, chat, save_tokenizer, words, write_jsonl
from ..observe.report import samples

CONFIG = {
    "model": {"folder": "model", "dtype": "fp32"},
    "data": {"context": 64, "packed": "packed"},
    "train": {"steps": 2, "warmup": 0, "rows": 1, "lr": 0.001},
    "checkpoint": {"every": 1, "keep_last": 1},
    "launch": {"cpu": 1},
    "eval": {"every": 2, "tasks": ["needle"], "lengths": [64], "depths": 1, "samples": 1, "language": "ids"},
    "run": {"folder": "run"},
}


def make_world(folder: Path) -> Path:
    """Everything under `folder`, which becomes the current one: names in it are relative."""
    os.chdir(folder)
    save_tokenizer(Path("model"), byte_level(size=400))
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = LlamaConfig(vocab_size=400, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model", max_shard_size="40KB")
    assert Path("model/model.safetensors.index.json").is_file()
    Path("text.txt").write_text(words(20))
    write_jsonl(Path("chats.jsonl"), [chat("hello", "well, hello", "bye", "bye")] * 3)
    write_jsonl(Path("texts.jsonl"), [{"text": words(90, seed)} for seed in range(6)])
    pack([Source("texts.jsonl")], Path("packed"), tokenizer="model", workers=1, quiet=True)
    pairs = [
        {"prompt": words(3, seed), "chosen": words(9, seed + 1), "rejected": words(7, seed + 2)} for seed in range(6)
    ]
    write_jsonl(Path("pairs.jsonl"), pairs)
    pack([Source("pairs.jsonl")], Path("pairs"), tokenizer="model", workers=1, quiet=True)
    Path("run.yaml").write_text(yaml.safe_dump(CONFIG))
    Path("lora.yaml").write_text(yaml.safe_dump({**CONFIG, "run": {"folder": "lora"}}))
    Path("plan.json").write_text(json.dumps(samples.plan()))
    Path("a_file").write_text("x")
    Path("a_folder").mkdir()
    os.mkfifo("a_pipe")
    assert main(["train", "run.yaml", "--quiet"]) == 0
    lora = ["--model.lora.rank", "2", "--eval.every", "null", "--quiet"]
    assert main(["train", "lora.yaml", *lora]) == 0
    return folder
