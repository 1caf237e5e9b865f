"""What contradicts a stack is named, with its remedy, before a step is made."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import ithaca
import ithaca.integrations
from ithaca.integrations import LongContext, Trainer
from ithaca.integrations.options import (
    _ARGUMENTS,
    _GIVEN,
    _POLICY,
    _PREFERENCE,
    policy_violations,
    preference_violations,
    violations,
)

from .runs import dpo_trainer, hf_trainer, launched, padded, rows, settings, small


@pytest.fixture(autouse=True)
def as_one_process() -> Iterator[None]:
    with launched():
        yield


def arguments(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(**settings(str(folder), 1, {}, **changes))


WRONG = {
    "fp16": True, "fp16_full_eval": True, "bf16_full_eval": True, "torch_compile": True, "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0, "auto_find_batch_size": True, "deepspeed": "zero.json", "deepspeed_plugin": object(),
    "fsdp_plugin_args": {"fsdp_version": 2}, "parallelism_config": object(), "ddp_find_unused_parameters": False,
    "ddp_bucket_cap_mb": 25, "ddp_broadcast_buffers": True, "ddp_static_graph": True, "optim_target_modules": ["q_proj"],
    "save_on_each_node": True, "enable_jit_checkpoint": True, "train_sampling_strategy": "batch_rebalance",
    "activation_offloading": True, "loss_type": "dft", "optim": "galore_adamw",
}  # fmt: skip


def test_every_setting_that_contradicts_a_stack_is_named(tmp_path: Path):
    args = arguments(tmp_path)
    assert violations(args, {}, groups=2) == []
    assert WRONG.keys() == _ARGUMENTS.keys()
    for name, value in WRONG.items():
        args = arguments(tmp_path)
        setattr(args, name, value)
        (said,) = violations(args, {}, groups=1)
        assert said.startswith(f"{name}=") and _ARGUMENTS[name][1] in said
    for name in _GIVEN:
        (said,) = violations(arguments(tmp_path), {name: object()}, groups=1)
        assert said.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(debug=["underflow_overflow"]), "its hooks see a part of the tokens"),
        (dict(_n_gpu=4), "torchrun --nproc-per-node 4"),
        (dict(mixed_precision="fp8"), "use bf16 or none"),
        (dict(mixed_precision="fp16"), "underflow"),
        (dict(average_tokens_across_devices=False), "over the tokens of all 2 data-parallel groups"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_and_so_is_what_depends_on_more_than_one(tmp_path: Path, change: dict[str, Any], said: str):
    args = arguments(tmp_path)
    assert args.n_gpu == 0
    for name, value in change.items():
        setattr(args, name, value)
    (problem,) = violations(args, {}, groups=2)
    assert said in problem


def test_all_at_once_before_anything_is_done(tmp_path: Path):
    model = small()
    optimizer = torch.optim.SGD(model.parameters())
    args = arguments(tmp_path, neftune_noise_alpha=1.0, accelerator_config={"split_batches": True})
    with pytest.raises(ValueError) as error:
        Trainer(model, args, optimizers=(optimizer, None), stack=ithaca.Stack(ulysses=3))
    for word in ("4 problems", "neftune_noise_alpha", "split_batches", "would train nothing", "multiple of ulysses"):
        assert word in str(error.value)
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ValueError, match="lies on 2 devices"):
        Trainer(model, arguments(tmp_path), stack=ithaca.Stack())
    with pytest.raises(ValueError, match="args is missing"):
        Trainer(model, stack=ithaca.Stack())


def test_what_accelerate_launch_was_told_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ValueError, match=r"accelerate was configured with torch\.compile"):
        hf_trainer(str(tmp_path), 1, dict())


def test_a_trainer_that_would_lose_its_own_loss_is_no_base():
    class Other(transformers.Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return 0.0

    with pytest.raises(TypeError, match="Other has a compute_loss of its own, which LongContext would replace"):
        type("Mine", (LongContext, Other), {})
    with pytest.raises(TypeError, match="Seq2SeqTrainer has a prediction_step"):
        type("Mine", (LongContext, transformers.Seq2SeqTrainer), {})
    with pytest.raises(TypeError, match="put LongContext first"):
        type("Mine", (transformers.Trainer, LongContext), {})


def test_other_trainers_of_trl_are_no_bases():
    trl = pytest.importorskip("trl")
    for base in (trl.DPOTrainer, trl.GRPOTrainer, trl.RewardTrainer):
        with pytest.raises(TypeError, match=f"{base.__name__} has a compute_loss"):
            type("Mine", (LongContext, base), {})
    type("Mine", (ithaca.integrations.DPOTrainer,), {})


PREFERENCE = {
    "f_divergence_type": "forward_kl", "ld_alpha": 0.5, "use_weighting": True, "sync_ref_model": True, "loss_weights": [0.5],
    "label_smoothing_factor": 0.1,
}  # fmt: skip


def test_preferences_that_are_not_computed_are_named(tmp_path: Path):
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(**settings(str(tmp_path), 1, {}))
    assert preference_violations(args, {}, groups=2) == [] and PREFERENCE.keys() == _PREFERENCE.keys()
    more = {"loss_type": ["exo_pair"], "label_smoothing": 0.1, "beta": 0.0, "deepspeed": "zero.json"}
    for name, value in (PREFERENCE | more).items():
        changed = copy.copy(args)
        setattr(changed, name, value)
        (said,) = preference_violations(changed, {}, groups=1)
        assert said.startswith(f"{name}=")
    changed.loss_type = ["sigmoid", "sft"]
    assert "one of sigmoid, sigmoid_norm, robust, hinge, ipo" in preference_violations(changed, {}, groups=1)[-1]
    assert "merge them" in preference_violations(args, {"model": SimpleNamespace(peft_config={})}, groups=1)[0]
    args.precompute_ref_log_probs = True
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
    assert "on the meta device" in preference_violations(args, {"model": model}, groups=1)[0]


POLICY = {
    "use_vllm": True, "log_completions": True, "sync_ref_model": True, "use_adaptive_entropy": True, "cast_lm_head_to_fp32": True,
    "label_smoothing_factor": 0.1,
}  # fmt: skip


def test_policies_that_cannot_run_are_named(tmp_path: Path):
    trl = pytest.importorskip("trl")
    args = trl.GRPOConfig(**settings(str(tmp_path), 1, {}), num_generations=4)
    given = {"rollout_func": print}
    assert policy_violations(args, given, groups=2) == [] and POLICY.keys() == _POLICY.keys()
    for name, value in POLICY.items():
        changed = copy.copy(args)
        setattr(changed, name, value)
        (said,) = policy_violations(changed, given, groups=1)
        assert said.startswith(f"{name}=")
    assert "sample with the model that is trained" in policy_violations(args, {}, groups=1)[0]
    for name, value in {"tools": [print], "environment_factory": print, "reward_funcs": ["a/model"]}.items():
        (said,) = policy_violations(args, given | {name: value}, groups=1)
        assert said.startswith(f"{name}: ")
    args.num_generations, args.beta, args.eval_strategy, args.num_generations_eval = 3, 0.1, "steps", 5
    said = policy_violations(args, given | {"model": SimpleNamespace(peft_config={})}, groups=1)
    for word in ("8 completions", "no multiple of 3", "4 completions", "no multiple of 5", "merge them"):
        assert word in " ".join(said)


def test_a_balance_loss_is_no_part_of_a_preference(tmp_path: Path):
    pytest.importorskip("trl")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.0"):
        dpo_trainer(str(tmp_path), 1, dict(), preset="qwen3_moe")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "ithaca.integrations.sft", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"pip install 'ithaca\[trl\]'"):
        ithaca.integrations.SFTTrainer  # noqa: B018


class Mine(LongContext, transformers.Trainer):
    """Of a user, with a signature of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, data_collator=padded, train_dataset=rows(8), stack=ithaca.Stack())


def test_one_process_in_bf16(tmp_path: Path):
    """bf16=True is the compute dtype: no autocast, and Accelerate wraps nothing."""
    trainer = Mine(model=small(), args=arguments(tmp_path, max_steps=1, bf16=True, gradient_checkpointing=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Accelerate, about bf16 on a CPU
        trainer.train()
    assert trainer.run.dtype == torch.bfloat16 and trainer.accelerator.mixed_precision == "bf16"
    assert not trainer.args.gradient_checkpointing and not hasattr(trainer.model, "_original_forward")
    with pytest.raises(ValueError, match="predict needs logits"):
        trainer.predict(rows(2))
    with pytest.raises(ValueError, match="cannot return outputs"):
        trainer.compute_loss(trainer.model, padded(rows(2)), return_outputs=True)
    with pytest.raises(ValueError, match="has no folder 'state'"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    trainer.train_dataset = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 8
    with pytest.raises(ValueError, match="step 1: no token of its 2 micro-batches is supervised"):
        trainer.train()
