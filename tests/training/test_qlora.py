"""A run on a base in NF4: trained, resumed on other ranks, exported apart and merged; and what is refused."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ithaca.base.exits import Failed
from ithaca.base.processes.pool import Workers
from ithaca.config import load
from ithaca.engine.build import model_config
from ithaca.engine.mesh import local_part
from ithaca.engine.model.nf4 import Nf4, pack, packable, unpack
from ithaca.engine.model.presets import preset_config
from ithaca.evaluation.generate.greedy import generate
from ithaca.evaluation.opening import find_model, load_model
from ithaca.observe.metrics import read_metrics
from ithaca.storage.export import export_checkpoint
from ithaca.training.preflight import check_run
from ithaca.training.trainer import train
from ithaca.verify.presets import build

SHORT = [
    "data.context=64", "train.rows=2", "train.schedule=constant", "train.warmup=0", "log.every=1", "model.random_init=false",
    "model.lora.rank=4", "model.lora.targets=[q_proj, down_proj]", "stack.ring=1",
    "model.quantize=nf4", "model.dtype=fp32", "checkpoint.every=2", "stack.heads_per_stage=1",
]  # fmt: skip

IDS = torch.arange(40)[None] * 7 % 128


def trained_for(folder: str, base: str, ranks: int, steps: int) -> list[float]:
    given = [f"model.folder={base}", f"run.folder={folder}", f"launch.cpu={ranks}", f"train.steps={steps}"]
    assert train(load(None, [*SHORT, *given, f"stack.ulysses={ranks}"], "tiny_cpu").config, quiet=True) == 0
    return [line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model: Any = build(preset_config("tiny_llama"), seed=3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(workers: Workers, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """Three steps on one rank; and the third once more, on two. -> the folder, and both losses"""
    folder = tmp_path_factory.mktemp("run")
    losses = workers.run(trained_for, str(folder), str(base), 1, 3, world=1)
    shutil.rmtree(folder / "checkpoints/step-3")
    losses += workers.run(trained_for, str(folder), str(base), 2, 3, world=2)
    return folder, losses


def test_it_goes_on_with_the_same_base_on_other_ranks(run: Any):
    whole, parts, _ = run[1]
    assert len(whole) == 3 and whole[:2] == parts[:2] and whole[2] == pytest.approx(parts[2], rel=1e-5)


def test_merged_it_is_the_model_that_was_trained(run: Any, base: Path):
    """The adapters that PEFT loads, on the numbers that come out of NF4: the same logits as the merged model's."""
    from peft import PeftModel

    folder = run[0]
    adapters = export_checkpoint(folder, folder / "adapters", dtype=torch.float32)
    merged = export_checkpoint(folder, folder / "merged", dtype=torch.float32, merge_lora=True)

    def logits(folder: Path, rounded: bool = False, adapted: bool = False) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if rounded:
            for _, parameter in packable(model.model.layers):
                unpack(pack(parameter), parameter)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (PeftModel.from_pretrained(model, adapters) if adapted else model)(IDS).logits

    found = logits(merged)
    torch.testing.assert_close(found, logits(base, rounded=True, adapted=True), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, logits(base, adapted=True), atol=1e-2), "four bits make a difference"


def opened(folder: str, ranks: int) -> tuple[list[int], float]:
    """As `ask` and `score` open it: what the run answers, and how likely it finds a text."""
    found = find_model(Path(folder), [f"launch.cpu={ranks}"])
    hf = model_config(found.config.model, found.config.data.context)
    run, _ = load_model(found, hf, torch.device("cpu"), length=48)
    assert any(isinstance(local_part(parameter), Nf4) for parameter in run.model.parameters()), "packed again"
    with torch.no_grad():
        loss = run.loss(run.shard(IDS)).item()
    return generate(run, IDS[0].tolist(), most=8), loss


def test_it_answers_and_scores_as_the_merged_model(run: Any, workers: Workers):
    folder = run[0]
    merged = export_checkpoint(folder, folder / "answering", dtype=torch.float32, merge_lora=True)
    model: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=IDS, labels=IDS).loss.item()
    more = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens = model.generate(IDS, attention_mask=torch.ones_like(IDS), **more)[0, IDS.shape[1] :].tolist()
    for ranks in (1, 2):
        for answer, loss in workers.run(opened, str(folder), ranks, world=ranks):
            assert answer == tokens and loss == pytest.approx(wanted, rel=1e-5)


def refused(base: Path, *more: str, folder: Path) -> str:
    given = [f"model.folder={base}", f"run.folder={folder}", "launch.cpu=1", "train.steps=4", "stack.ulysses=1"]
    loaded = load(None, [*SHORT, *given, *more], "tiny_cpu")
    with pytest.raises(Failed) as error:
        check_run(loaded.config, "", allow_change=True).require()
    return str(error.value)


def test_what_cannot_be_packed_is_named_before_anything_is_loaded(base: Path, tmp_path: Path):
    model: Any = build(preset_config("tiny_llama", intermediate_size=96), seed=3)
    model.save_pretrained(tmp_path / "narrow")
    text = refused(tmp_path / "narrow", folder=tmp_path / "run")
    assert "mlp.down_proj.base_layer.weight of layer 0 has rows of 96, which is no multiple of 64" in text
    assert "names embed_tokens, an embedding" in refused(
        base, "model.lora.targets=[embed_tokens]", folder=tmp_path / "run"
    )
    for setting, words in {
        "model.quantize=int4": "must be one of nf4",
        "model.lora=null": "give both",
        "train.offload_optimizer=true": "drop one of them",
    }.items():
        with pytest.raises(ValueError, match=words):
            load(None, [*SHORT, f"model.folder={base}", setting], "tiny_cpu")
