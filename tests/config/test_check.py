"""Settings that contradict each other, each with the values and a remedy; and what is not on the disk."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ithaca import Stack
from ithaca.config import Config, StackOptions, load, missing, split_overrides, violations
from ithaca.config.schema import (
    Checkpoint,
    Data,
    Evaluate,
    Launch,
    Log,
    Lora,
    Model,
    Objective,
    Results,
    Rope,
    Source,
    Train,
)

GOOD = Config(
    model=Model(folder="x"),
    data=Data(context=2048, sources=(Source(path="a.jsonl"),)),
    train=Train(steps=100),
)


def with_(section: str, **changes: Any) -> Config:
    return replace(GOOD, **{section: replace(getattr(GOOD, section), **changes)})


def test_a_good_one():
    assert violations(GOOD) == []
    edge = dict(lr=3.4e38, eps=1.2e-38, weight_decay=0.0, min_lr=0.0, betas=(0.0, 0.9999999), clip=None)
    assert violations(with_("train", **edge)) == []


def test_objectives():
    for given in (
        dict(kind="dpo", loss="robust", label_smoothing=0.2, reference="scores"),
        dict(kind="policy", loss="dr_grpo", longest=100, kl=0.1, reference="start", clip_high=0.3),
    ):
        assert violations(with_("objective", **given)) == []
    whole = ["model.folder=x", "train.steps=1", "data.context=8", "data.sources=[a]"]
    rest, overrides = split_overrides(["run.yaml", "--objective", "dpo", "--objective.beta", "0.2"])
    assert rest == ["run.yaml"]
    assert load(None, [*whole, *overrides]).config.objective == Objective(kind="dpo", beta=0.2)
    names = {
        (lora, kl): Objective(kind="policy", kl=kl).reference_of(lora) for lora in (True, False) for kl in (0.0, 0.1)
    }
    assert names == {(True, 0.0): None, (True, 0.1): "adapters", (False, 0.0): None, (False, 0.1): "start"}


EIGHT = dict(launch=Launch(workers=4, nodes=2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_("objective", beta=0.2), "objective.beta=0.2 is for objective.kind=dpo, and this run has sft; drop it"),
        (with_("objective", kind="dpo", kl=0.1), "objective.kl=0.1 is for objective.kind=policy, and this run has dpo"),
        (with_("objective", kind="dpo", loss="grpo"), "objective.loss=grpo is no loss of objective.kind=dpo: it has sigmoid"),
        (with_("objective", loss="ipo"), "objective.loss=ipo is no loss of objective.kind=sft: sft has one loss; drop it"),
        (with_("objective", kind="dpo", label_smoothing=0.5), "objective.label_smoothing=0.5 must be below 0.5"),
        (with_("objective", kind="dpo", loss="ipo", label_smoothing=0.1), "label_smoothing=0.1 has no meaning for ipo"),
        (with_("objective", kind="dpo", beta=1e-40), "objective.beta=1e-40 is 0 or nearly 0 in float32"),
        (with_("objective", kind="policy", loss="dr_grpo"), "divides by objective.longest, which is missing"),
        (with_("objective", kind="policy", reference="start"), "objective.reference=start would not be used: objective.kl is 0"),
        (with_("objective", kind="dpo", reference="adapters"), "the model without its adapters, and model.lora is not given"),
        (
            replace(with_("objective", kind="dpo"), train=Train(steps=100, label_smoothing=0.1)),
            "train.label_smoothing=0.1 is a term of cross-entropy, and objective.kind=dpo has none; use objective.label_smoothing",
        ),
        (
            replace(with_("objective", kind="policy"), data=Data(context=64, sources=(Source(synthetic="recall"),))),
            "data.sources[0]: synthetic rows are texts, and objective.kind=policy learns from rollouts; name files of those",
        ),
        (with_("train", warmup=100), "train.warmup=100 must be less than train.steps=100"),
        (with_("train", warmup=1.0), "train.warmup=1.0 is neither a number of steps (10) nor a share of them"),
        (with_("train", warmup=-1), "train.warmup=-1 must be at least 0"),
        (with_("train", steps=0, warmup=0.0), "train.steps is missing or 0"),
        (with_("train", rows=4, accumulation=3), "train.accumulation=3 does not divide train.rows=4"),
        (with_("train", accumulation=0), "train.accumulation=0 must be at least 1"),
        (with_("train", lr=0.0), "train.lr=0.0 must be above 0"),
        (with_("train", lr=1e-6, min_lr=1e-5), "train.min_lr=1e-05 is above train.lr=1e-06"),
        (with_("train", betas=(0.9, 1.0)), "train.betas=[0.9, 1.0] must both be at least 0 and below 1"),
        (with_("train", betas=(0.9, 1 - 1e-12)), "must both be at least 0 and below 1, in float32 too"),
        (with_("train", betas=(math.nan, 0.95)), "train.betas=(nan, 0.95) must be finite"),
        (with_("train", lr=math.inf), "train.lr=inf must be finite"),
        (with_("train", lr=math.nan), "train.lr=nan must be finite"),
        (with_("train", lr=1e39), "train.lr=1e+39 is infinite in float32, which training computes in; give a number"),
        (with_("train", lr=1e-46), "train.lr=1e-46 is 0 or nearly 0 in float32"),
        (with_("train", eps=1e-46), "train.eps=1e-46 is 0 or nearly 0 in float32"),
        (with_("train", eps=1e-40), "train.eps=1e-40 is 0 or nearly 0 in float32"),
        (with_("train", weight_decay=1e39), "train.weight_decay=1e+39 is infinite in float32"),
        (with_("train", weight_decay=math.inf), "train.weight_decay=inf must be finite"),
        (with_("train", clip=1e-50), "train.clip=1e-50 is 0 or nearly 0 in float32"),
        (with_("train", clip=math.inf), "train.clip=inf must be finite"),
        (with_("train", z_loss=1e39), "train.z_loss=1e+39 is infinite in float32"),
        (with_("model", lora=Lora(alpha=1e39)), "model.lora.alpha=1e+39 is infinite in float32"),
        (with_("model", lora=Lora(alpha=math.inf)), "model.lora.alpha=inf must be finite"),
        (replace(GOOD, launch=Launch(grace=math.nan)), "launch.grace=nan must be finite"),
        (with_("train", label_smoothing=1.0), "train.label_smoothing=1.0 must be below 1"),
        (with_("train", z_loss=-1.0), "train.z_loss=-1.0 must be at least 0"),
        (with_("train", clip=0.0), "train.clip=0.0 must be above 0"),
        (with_("train", schedule="cosin"), "train.schedule='cosin' must be one of cosine, linear, constant"),
        (with_("data", context=1), "data.context=1 must be at least 2"),
        (with_("data", sources=()), "there is nothing to train on"),
        (with_("data", sources=(Source(),)), "data.sources[0] has neither path nor synthetic"),
        (with_("data", sources=(Source(path="a", synthetic="recall"),)), "data.sources[0] has both path and synthetic"),
        (with_("data", sources=(Source(path="a", weight=0.0),)), "data.sources[0].weight=0.0 must be above 0"),
        (with_("model", folder=""), "model.folder is empty"),
        (with_("model", lora=Lora(), random_init=True), "model.random_init makes that base noise"),
        (with_("model", lora=Lora(dropout=0.1)), "model.lora.dropout=0.1 must be 0"),
        (with_("model", lora=Lora(targets=())), "model.lora.targets is empty"),
        (with_("model", lora=Lora(rank=0)), "model.lora.rank=0 must be at least 1"),
        (with_("model", rope=Rope(rope_type="yarn")), "also needs model.rope.factor and model.rope.original_max_position"),
        (with_("model", rope=Rope(factor=-2.0)), "model.rope.factor=-2.0 must be above 0"),
        (replace(GOOD, checkpoint=Checkpoint(keep_last=0)), "checkpoint.keep_last=0 must be at least 1"),
        (replace(GOOD, checkpoint=Checkpoint(every=10, keep_every=15)), "make it a multiple of checkpoint.every=10"),
        (replace(GOOD, checkpoint=Checkpoint(every=None, keep_every=15)), "give checkpoint.every too"),
        (replace(GOOD, eval=Evaluate(every=5)), "eval.every=5 has no data"),
        (replace(GOOD, log=Log(every=0)), "log.every=0 must be at least 1"),
        (replace(GOOD, run=Results(name="a/b")), "run.name='a/b' must be a plain name"),
        (replace(GOOD, run=Results(folder="")), "run.folder is empty"),
        (replace(GOOD, launch=Launch(cpu=2, workers=2)), "launch.cpu and launch.workers are both given"),
        (replace(GOOD, stack=StackOptions(ulysses=2)), "stack.ulysses cannot be given with auto: true"),
        (replace(GOOD, stack=StackOptions.of(Stack(ring=0))), "stack.ring=0 must be at least 1"),
        (replace(GOOD, stack=StackOptions.of(Stack(ulysses=3)), **EIGHT), "stack: the world size 8 is not a multiple of"),
        (replace(GOOD, stack=StackOptions.of(Stack(ulysses=4)), **EIGHT), "8 processes with ulysses × ring = 4 make 2 data"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_work(config: Config, words: str):
    (only,) = violations(config)
    assert words in only


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_("train", steps="5"), "train.steps='5' must be a whole number"),
        (with_("train", steps=True), "train.steps=True must be a whole number"),
        (with_("train", lr=None), "train.lr=None must be a number"),
        (with_("train", betas=[0.9, 0.95]), "train.betas=[0.9, 0.95] must be a list of 2 numbers"),
        (with_("data", sources=("a",)), "data.sources=('a',) must be a list of sections"),
        (with_("data", sources=(Source(chat=1),)), "data.sources[0].chat=1 must be true or false"),  # pyright: ignore
        (replace(GOOD, log=None), "log=None must be a section"),  # pyright: ignore
        (replace(GOOD, stack=StackOptions.of(Stack(tile="x"))), "stack.tile='x' must be a whole number or None"),  # pyright: ignore
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_made_in_python_with_wrong_types(config: Config, words: str):
    (only,) = violations(config)
    assert words in only


def test_what_is_not_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "model"
    config = Config(
        model=Model(folder=str(model)),
        data=Data(
            context=64, packed=str(tmp_path / "packed"), tokenizer=str(tmp_path / "tok"),
            sources=(Source(path=str(tmp_path / "*.jsonl")), Source(synthetic="recall"), Source(path="hub/x", format="datasets")),
        ),
        train=Train(steps=10),
        stack=StackOptions(scratch=str(tmp_path / "scratch")),
    )  # fmt: skip
    found = missing(config, presets=["tiny_llama"])
    assert len(found) == 5
    for words, line in zip(
        ("is not a folder; name a Hugging Face folder, or one of tiny_llama", "data.tokenizer", "ithaca data pack",
         "data.sources[0].path", "stack.scratch"),
        found, strict=True,
    ):  # fmt: skip
        assert words in line
    for name in ("model", "packed", "tok", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert missing(config) == [
        f"model.folder={str(model)!r} has no config.json; name a Hugging Face folder, or a model on the Hub (owner/name)"
    ]
    (model / "config.json").write_text("{}")
    assert missing(config) == []
    assert missing(replace(config, model=Model(folder="tiny_llama")), presets=["tiny_llama"]) == []
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = missing(replace(config, log=Log(tensorboard=True, wandb="project")))
    assert len(found) == 2 and "pip install wandb" in found[1]


def test_the_stack_of_the_config_is_the_stack_of_the_library():
    stack = Stack(ulysses=4, ring=2, recompute=("layer", "keep_attention"), store="disk")
    assert StackOptions.of(stack, scratch="/x").chosen == stack
    assert {each.name for each in fields(StackOptions)} == {each.name for each in fields(Stack)} | {"auto", "scratch"}


def test_rotary_settings_lie_over_the_models():
    theirs = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    assert Rope(factor=16.0).over(theirs) == {**theirs, "factor": 16.0}
    yarn = Rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192).over(theirs)
    assert yarn == {
        "rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192
    }  # fmt: skip
    assert Rope(long_factor=(1.0, 2.0)).over({})["long_factor"] == [1.0, 2.0]
