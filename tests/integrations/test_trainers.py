"""Real trainers with a stack on several ranks follow the same trainers on one process without: loss, norm, evaluation, weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.integrations import Trainer

from .runs import hf_trainer, launched, logged, padded, rows, settings, sft_trainer, small, train

pytest.importorskip("trl")
LONG = os.environ.get("ITHACA_LOSSES") == "long"  # make losses
STEPS = 8  # of the first case: more than an epoch
SAVING = dict(save_strategy="steps", save_steps=2, save_total_limit=2)
CASES: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    "trainer, ulysses": (hf_trainer, 2, dict(ulysses=2), dict(max_steps=STEPS)),
    "trainer, ulysses × data": (hf_trainer, 4, dict(ulysses=2), dict(max_steps=3)),
    "trainer, ring, smoothed": (hf_trainer, 2, dict(ring=2), dict(label_smoothing_factor=0.1, max_steps=3)),
    "sft, ring": (sft_trainer, 2, dict(ring=2, recompute="layer"), dict(max_steps=3)),
    "sft, ulysses, packed": (sft_trainer, 2, dict(ulysses=2), dict(packing=True, max_steps=5)),
    "sft, lora": (sft_trainer, 2, dict(ulysses=2), dict(lora=True, max_steps=3, optim="sgd")),
    **(
        {"sft, ulysses × data, packed": (sft_trainer, 4, dict(ulysses=2), dict(packing=True, max_steps=5))}
        if LONG
        else {}
    ),
    "sft, experts": (sft_trainer, 2, dict(ulysses=2), dict(preset="qwen3_moe", packing=True, max_steps=3)),
}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first case, which also saves."""
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("name", CASES)
def test_a_stack_changes_nothing(workers: Workers, references: dict[str, Any], folder: Path, tmp_path: Path, name: str):
    make, world, stack, changes = CASES[name]
    key = f"{make.__name__} {changes}"
    if key not in references:
        (references[key],) = workers.run(train, make, str(tmp_path / "without"), None, world=1, **changes)
    theirs = references[key]
    saves = name == "trainer, ulysses"
    where = folder if saves else tmp_path / "with"
    results = workers.run(train, make, str(where), stack, world=world, **changes, **(SAVING if saves else {}))
    assert len(theirs["loss"]) == changes["max_steps"] and theirs["loss"][-1] < theirs["loss"][0]
    for ours in results:
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-4)
        assert ours["eval"] == pytest.approx(theirs["eval"], abs=1e-4)
        assert ours["rate"] == theirs["rate"]
        assert ours["weights"].keys() == theirs["weights"].keys()
        furthest = max(float((ours["weights"][n] - v).norm() / v.norm()) for n, v in theirs["weights"].items())
        assert furthest < 1e-3
    if saves:
        references["saved"] = results[0]


# -- what was saved (by the first case above) -----------------------------------------------------------------------------


@pytest.fixture
def saved(references: dict[str, Any]) -> dict[str, Any]:
    if "saved" not in references:
        pytest.skip("needs the run of the first case of this file")
    return references["saved"]


def test_checkpoints_are_rotated_and_load_in_transformers(saved: dict[str, Any], folder: Path):
    from transformers import AutoModelForCausalLM

    assert saved["files"] == ["checkpoint-6", "checkpoint-8"]
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-8")
    assert model.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["weights"][name]), name


def test_a_resumed_run_is_the_unbroken_one(workers: Workers, saved: dict[str, Any], folder: Path, tmp_path: Path):
    """Weights, optimizer, schedule and the place in the data: bit for bit."""
    resume = str(folder / "checkpoint-6")
    for ours in workers.run(train, hf_trainer, str(tmp_path), dict(ulysses=2), resume, world=2, max_steps=STEPS):
        assert ours["loss"] == saved["loss"]  # those before are in the checkpoint
        assert ours["rate"] == saved["rate"]
        assert all(torch.equal(value, saved["weights"][name]) for name, value in ours["weights"].items())


def test_and_goes_on_with_other_ranks(workers: Workers, saved: dict[str, Any], folder: Path, tmp_path: Path):
    resume = str(folder / "checkpoint-6")
    ours, *_ = workers.run(train, hf_trainer, str(tmp_path), dict(ulysses=2), resume, world=4, max_steps=STEPS)
    assert ours["loss"] == pytest.approx(saved["loss"], abs=1e-5)


def other_rows(folder: str, resume: str) -> str:
    with launched() as world, pytest.raises(ValueError) as error:
        trainer = hf_trainer(folder, world, dict(ulysses=2), gradient_accumulation_steps=4)
        trainer.train(resume_from_checkpoint=resume)
    return str(error.value)


def test_resuming_with_other_batches_is_refused(workers: Workers, saved: dict[str, Any], folder: Path, tmp_path: Path):
    for said in workers.run(other_rows, str(tmp_path), str(folder / "checkpoint-8"), world=2):
        assert "was saved with 8 rows a step" in said and "they are 16" in said


# -- saving by hand, adapters, the best model -------------------------------------------------------------------------------


def adapters(folder: str) -> dict[str, Any]:
    """Trains with evaluation, keeps the one with the largest loss, saves by every way there is."""
    with launched() as world:
        trainer = sft_trainer(
            folder, world, dict(ulysses=2), lora=True, max_steps=4, eval_strategy="steps", eval_steps=2, save_steps=2,
            save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
            optim="sgd",
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        trainer.save_model()  # over the older ones
        trainer.model.save_pretrained(f"{folder}/by_hand")
        best = f"checkpoint-{trainer.state.best_global_step}"
        weights = {name: value.full_tensor() for name, value in trainer.model.named_parameters() if "lora_" in name}
        return {"best": best, "weights": weights}


def test_adapters_are_saved_and_the_best_comes_back(workers: Workers, tmp_path: Path):
    from peft import PeftModel
    from safetensors.torch import load_file

    ours, *_ = workers.run(adapters, str(tmp_path), world=2)
    assert ours["best"] == "checkpoint-2", "the last would be there anyway"
    for folder in (tmp_path, tmp_path / "by_hand", tmp_path / ours["best"]):
        tensors = load_file(folder / "adapter_model.safetensors")
        assert len(tensors) == len(ours["weights"])
        for name, value in ours["weights"].items():
            assert torch.equal(tensors[name.replace(".default", "")], value), (folder, name)
    PeftModel.from_pretrained(small(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "training_args.bin", "adapter_config.json"} <= names and ".weights" not in names


def from_meta(folder: str) -> tuple[list[float], list[float]]:
    """Losses of a model that no rank has held whole, and of the same one built whole."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    stack = dict(ulysses=2)
    with launched() as world:
        plain = hf_trainer(folder, world, stack, max_steps=2)
        plain.model.save_pretrained(folder)
        plain.train()
        config = small().config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        args = TrainingArguments(**settings(folder, world, stack, max_steps=2))
        data = dict(data_collator=padded, train_dataset=rows(38))
        trainer = Trainer(model, args, **data, stack=ithaca.Stack(**stack), weights=folder)
        trainer.train()
        return logged(trainer, "loss"), logged(plain, "loss")


def test_a_model_on_the_meta_device(workers: Workers, tmp_path: Path):
    for ours, whole in workers.run(from_meta, str(tmp_path), world=2):
        assert ours == whole and len(ours) == 2


# -- ranks that would not agree ---------------------------------------------------------------------------------------------


def unlike(folder: str) -> str:
    import torch.distributed as dist

    with launched() as world, pytest.raises(RuntimeError) as error:
        trainer = hf_trainer(folder, world, dict(ulysses=2), max_steps=1)
        trainer.train_dataset = rows(8, seed=dist.get_rank())
        trainer.train()
    return str(error.value)


def test_ranks_that_read_other_batches_say_so(workers: Workers, tmp_path: Path):
    for said in workers.run(unlike, str(tmp_path), world=2):
        assert "rank 1 has read another batch than rank 0" in said
