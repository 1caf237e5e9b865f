"""The examples of docs/guides/trainers.md run, and the page shows what they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ithaca.base.processes.pool import Workers

from .runs import launched, small, tokenizer

pytest.importorskip("trl")
ROOT = Path(__file__).parents[2]
WORDS = " ".join(f"w{2 + 7 * i % 250}" for i in range(96))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def run_example(name: str, *words: str) -> tuple[str, Any]:
    """As torchrun would, on a machine without a GPU. -> what it printed, what its main returned"""
    said = io.StringIO()
    argv, on_cpu = patch.object(sys, "argv", [name, *words]), patch.object(torch.cuda, "is_available", lambda: False)
    with launched(), argv, on_cpu, contextlib.redirect_stdout(said):
        os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": f"{words[2]}.cache"}
        result = runpy.run_path(str(ROOT / "examples" / name))["main"]()
    return said.getvalue(), result


def test_sft_trainer(workers: Workers, model: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": WORDS[:40], "completion": WORDS[40:]}) + "\n" for _ in range(6)))
    (first, _), (second, _) = workers.run(run_example, "sft_256k.py", model, str(data), str(out), world=2)
    assert "train_loss" in first and "train_loss" not in second, "one rank speaks"
    trained, before = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, model))
    assert {value.dtype for value in trained.values()} == {torch.float32}, "as it was loaded"
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())


def by_hand(model: str) -> list[float]:
    """The loop without a stack, on one process."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(tokenizer()(WORDS)["input_ids"]).view(2, 2, 1, 24)
    untouched = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(untouched.parameters(), lr=1e-3)
    losses = []
    for step in ids:
        loss = torch.stack([untouched(rows, labels=rows).loss for rows in step]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(untouched.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_accelerate_loop(workers: Workers, model: str, tmp_path: Path):
    (tmp_path / "text").write_text(WORDS)
    words = model, str(tmp_path / "text"), str(tmp_path / "out"), "24"
    theirs = by_hand(model)
    for _, ours in workers.run(run_example, "accelerate_loop.py", *words, world=2):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["sft_256k.py", "accelerate_loop.py"])
def test_the_page_shows_the_example(name: str):
    page = (ROOT / "docs/guides/trainers.md").read_text(encoding="utf-8")
    body = (ROOT / "examples" / name).read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert f"```python\n{body}```" in page


def test_a_model_that_accelerate_has_wrapped_is_recognised():
    from accelerate import Accelerator

    import ithaca

    with launched():
        run = ithaca.prepare(small(), ithaca.Stack(), device="cpu")
        Accelerator(cpu=True, mixed_precision="bf16").prepare_model(run.model)
        with pytest.raises(ValueError, match=r"do not give the model to accelerator.prepare"):
            run.loss(run.shard(torch.ones(1, 8, dtype=torch.long)))
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(small())
        with pytest.raises(ValueError, match=r"do not give the model to accelerator.prepare"):
            ithaca.prepare(model, ithaca.Stack(), device="cpu")
