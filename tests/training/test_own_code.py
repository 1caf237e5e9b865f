"""A model that no table knows, through all of it: loaded, trained, gone on with on other ranks, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ithaca.config import load
from ithaca.engine.model.shrink import smallest
from ithaca.observe.metrics import read_metrics
from ithaca.storage.export import export_checkpoint
from ithaca.training.trainer import train

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
SHORT = [
    "model.random_init=false", "data.context=128", "train.rows=2", "train.warmup=1", "log.every=1", "checkpoint.every=1",
    "stack.tile=16", "train.lr=1e-3", "train.schedule=constant",
]  # fmt: skip


def run_once(overrides: list[str]) -> int:
    return train(load(None, [*SHORT, *overrides], "tiny_cpu").config, quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4.5: experts that lie apart in its files, and a buffer by which they are balanced."""
    path = tmp_path_factory.mktemp("model") / "glm"
    config: Any = smallest("glm4_moe")
    config.vocab_size = 320
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors[BIAS] = torch.linspace(-0.5, 0.5, len(tensors[BIAS]))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_train_go_on_and_export(workers, folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    given = [f"model.folder={folder}", f"run.folder={run}"]
    two = [*given, "launch.cpu=2", "stack.ulysses=2", "stack.ring=1", "train.steps=2"]
    assert workers.run(run_once, two, world=2) == [0, 0]
    three = [*given, "launch.cpu=3", "stack.ulysses=1", "stack.ring=3", "train.steps=3"]
    assert workers.run(run_once, three, world=3) == [0] * 3
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    out = export_checkpoint(run, tmp_path / "out", dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.get_buffer(BIAS), torch.linspace(-0.5, 0.5, len(model.get_buffer(BIAS))))
    assert torch.equal(before.get_buffer(BIAS), model.get_buffer(BIAS)), "nobody trains it"
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert len(changed) > 0.9 * len(list(model.parameters()))
