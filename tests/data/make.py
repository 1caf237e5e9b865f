"""Texts, tokenizers and packed folders for the data tests; all real, all small."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.source import Source
from ithaca.engine.mesh import Group, Mesh

# The shape of most templates: a header per turn, an end token, a header to ask for the next one.
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
)
# Like Qwen3: what the last assistant turn looks like depends on its being the last.
CHANGING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>"]
_RANDOM = random.Random(0)
WORDS = ["".join(_RANDOM.choice("abcdefghijkl") for _ in range(_RANDOM.randint(2, 8))) for _ in range(300)]
ODD = ["é", "日本語", "😀", "naïve", "don't", "12345", "\n", "\n\n", "  ", "\t", "...", "--", "aaaaaa"]


def words(count: int, seed: int = 0, odd: bool = False) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS + ODD if odd else WORDS) for _ in range(count))


def byte_level(bos: bool = False, size: int = 400) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([words(400, seed) for seed in range(10)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save_tokenizer(
    folder: Path, tokenizer: Tokenizer | None = None, template: str | None = CHATML, **more: Any
) -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **more}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer or byte_level(), **names)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def chat(*turns: str) -> dict[str, Any]:
    """User and assistant take turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def pack_ids(
    folder: Path, documents: Sequence[Sequence[int]], labels: Sequence[Any] | None = None, vocabulary: int = 1000
) -> Packed:
    """A packed folder of the given ids; labels: per document None or a list with -100."""
    records = [{"input_ids": list(map(int, ids))} for ids in documents]
    for record, each in zip(records, labels or [None] * len(records), strict=True):
        if each is not None:
            record["labels"] = list(map(int, each))
    source = write_jsonl(folder.with_name(folder.name + ".jsonl"), records)
    return pack([Source(str(source))], folder, vocabulary=vocabulary, workers=1, quiet=True)


def pack_random(
    folder: Path, count: int, longest: int, *, masked: bool, seed: int = 0, vocabulary: int = 1000
) -> Packed:
    """Random documents of 2 to `longest` tokens; masked: about half of the tokens are not supervised."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocabulary, rng.integers(2, longest + 1)) for _ in range(count)]
    labels = [np.where(rng.random(len(ids)) < 0.5, -100, ids) for ids in documents] if masked else None
    return pack_ids(folder, documents, labels, vocabulary)


def mesh_of(ulysses: int, ring: int, data: int, rank: int) -> Mesh:
    """What a rank of a world without processes would have; the axes are laid out as in mesh.py."""
    world = ulysses * ring * data
    groups = [(ulysses, rank % ulysses), (ring, rank // ulysses % ring), (data, rank // (ulysses * ring))]
    axes = [Group(size, at, None) for size, at in groups]
    return Mesh(torch.device("cpu"), Group(world, rank, None), *axes, parameters=None)
