"""Every setting of a run that changes memory or time reaches the planner, and is counted there as the code does it."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.config.option import kinds
from ithaca.config.schema import Checkpoint, Config, Data, Lora, Model, Objective, Train
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import read_sizes, sizes_of
from ithaca.planner.config import hf_config, requested
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.memory import predict
from ithaca.planner.search import plan
from ithaca.planner.speed import BOTH_WAYS, HOST_RATE, REACHED
from ithaca.stack import Stack

K = 2**10
LONG = os.environ.get("ITHACA_PLANS") == "long"  # make plans
BASE = Config(
    model=Model(folder="llama32_1b"), data=Data(context=64 * K), train=Train(steps=100, rows=2),
    checkpoint=Checkpoint(every=10),
)  # fmt: skip
ADAPTED = replace(BASE, model=replace(BASE.model, lora=Lora()))

# Settings that `requested` hands on -> a value that must make another plan. Those of LoRA are tried on a run that has adapters.
REQUESTED: dict[str, Any] = {
    "model.lora": Lora(),
    "model.lora.rank": 64,
    "model.lora.targets": ("q_proj", "v_proj"),
    "model.quantize": "nf4",
    "data.context": 128 * K,
    "train.rows": 4,
    "train.accumulation": 2,
    "train.optimizer": "adamw8bit",
    "train.offload_optimizer": True,
    "train.deterministic": True,
    "train.steps": 5,  # before the first checkpoint that is not waited for
    "objective.kind": "dpo",
    "checkpoint.asynchronous": False,
    "checkpoint.every": None,
}
# Those that are a plan's model, stack and hardware (training/automatic.py: planned, hardware_here); phases are planned one by one.
ARGUMENTS = {
    "model.folder", "model.dtype", "stack", "phases", "launch.workers", "launch.cpu", "launch.nodes", "launch.gpu_memory",
    "launch.share_gpu",
}  # fmt: skip
# Why the others change neither.
OTHER = {
    "steps, once the data is counted": {"train.epochs"},
    "names and places": {"description", "run", "model.trust_remote_code"},
    "numbers of the same tensors": {"model.rope", "model.lora.alpha", "model.lora.dropout"},
    "at the start, before a step": {"model.random_init"},
    "rows are planned as full": {
        "data.sources", "data.packed", "data.tokenizer", "data.special_tokens", "data.long_documents", "data.eos", "data.seed",
        "data.chat_template", "data.validation",
    },
    "the same update with other numbers": {
        f"train.{name}"
        for name in ("lr", "min_lr", "schedule", "schedule_steps", "warmup", "decay", "decay_shape", "weight_decay", "betas", "eps",
                     "clip", "seed")
    },
    "the fused loss knows them": {"train.z_loss", "train.label_smoothing"},
    "arithmetic on the log-probabilities of tokens": {
        f"objective.{name}"
        for name in ("loss", "beta", "label_smoothing", "by_length", "clip_low", "clip_high", "unbiased_kl", "normalise", "longest",
                     "temperature")
    },
    "with adapters a forward more, see below": {"objective.reference", "objective.kl"},
    "of pairs and rollouts, see below": {"data.share_prefixes"},
    "files": {"checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.failures", "model.lora.merge_on_export"},
    "a forward that keeps nothing, beside the steps": {"eval"},
    "what is said": {"log"},
    "processes": {"launch.restarts", "launch.grace", "launch.timeouts"},
}  # fmt: skip


def walked(cls: Any, known: set[str], prefix: str = "") -> list[str]:
    """Paths of all settings; a section that is classified as a whole is not entered, unless it may be left out."""
    found = []
    for each in fields(cls):
        path, kind = prefix + each.name, kinds(cls)[each.name]
        if kind.section is None or path in known:
            found.append(path)
        if kind.section is not None and (path not in known or path in REQUESTED):
            found += walked(kind.section, known, f"{path}.")
    return found


def test_every_setting_is_classified():
    known = {*REQUESTED, *ARGUMENTS, *(path for paths in OTHER.values() for path in paths)}
    assert sum(map(len, (REQUESTED, ARGUMENTS, *OTHER.values()))) == len(known), "twice"
    assert sorted(walked(Config, known)) == sorted(known)
    assert {each.name for each in fields(Train)} <= {path.partition(".")[2] for path in known}


def changed(config: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


@pytest.mark.parametrize("path", REQUESTED)
def test_a_setting_that_is_handed_on_makes_another_plan(path: str):
    base = ADAPTED if path.startswith(("model.lora.", "model.quantize")) else BASE

    def looked(config: Config):
        found = plan(
            "llama32_1b", gpus="1xA100", stack=Stack(heads_per_stage=1, attention="flash"), **requested(config)
        )
        return found.memory, found.speed

    assert looked(changed(base, path, REQUESTED[path])) != looked(base)


# -- counted as the code does it -----------------------------------------------------------------------------------------

QV = ("q_proj", "v_proj")
CASES: list[tuple[str, int, int, Stack, dict[str, Any]]] = [
    ("llama32_1b", 16 * K, 2, Stack(ulysses=2, store="host"), dict(offload=True, accumulation=2, rows=2)),
    ("llama3_8b", 32 * K, 2, Stack(ulysses=2, tile=8192), dict(accumulation=4, rows=4)),
    ("llama3_8b", 64 * K, 2, Stack(ulysses=2, heads_per_stage=4, tile=32768, store="host"), dict(lora=16, targets=("up_proj",))),
    # whole weights on several ranks are FSDP2 all the same, with fp32 masters; a disk store has the last layer in host memory
    ("llama3_8b", 16 * K, 4, Stack(shard_parameters=False), dict(rows=4)),
    ("llama32_1b", 64 * K, 1, Stack(tile=16384), dict(kernel="flash", processors=132)),
    ("llama3_8b", 16 * K, 2, Stack(ulysses=2, tile=4096), dict(units=True)),
    ("llama32_1b", 16 * K, 1, Stack(), dict(units=True, reference=True, lora=16)),
    ("llama3_8b", 4 * K, 2, Stack(ulysses=2, tile=2048), dict(lora=16, quantize="nf4")),
]  # fmt: skip
if LONG:
    CASES += [
        ("llama3_8b", 8 * K, 1, Stack(tile=2048), dict(offload=True)),
        ("qwen3_4b", 16 * K, 1, Stack(recompute="none", tile=None), dict(lora=16, targets=QV)),
        # attention is the peak there, and is merged
        ("llama32_1b", 64 * K, 1, Stack(tile=2048, store="host"), dict(units=True, trees=True, lora=16)),
        ("llama32_1b", 64 * K, 1, Stack(tile=2048, store="host", heads_per_stage=16), dict(units=True, trees=True, lora=16)),
        ("llama32_1b", 64 * K, 2, Stack(ulysses=2, tile=2048, store="host"), dict(units=True, trees=True, lora=16)),
        ("qwen3_8b", 16 * K, 2, Stack(ulysses=2), dict(lora=16, targets=("q_proj", "lm_head"))),
        ("llama3_8b", 16 * K, 1, Stack(tile=8192), dict(offload=True, lora=16)),
        ("llama3_8b", 8 * K, 4, Stack(ulysses=4, tile=2048), dict(offload=True)),
        ("llama3_8b", 64 * K, 2, Stack(ulysses=2, heads_per_stage=4, tile=32768, store="host"),
         dict(lora=16, targets=("down_proj",))),
        ("llama3_8b", 64 * K, 4, Stack(ulysses=4, store="disk", hold=False), {}),
        ("qwen3_8b", 32 * K, 2, Stack(ulysses=2, tile=16384), dict(lora=64, targets=QV)),
        ("llama3_8b", 8 * K, 1, Stack(tile=2048), dict(lora=16, quantize="nf4")),
        ("qwen3_4b", 16 * K, 4, Stack(ulysses=2, replicate=2, store="host"), dict(lora=16, quantize="nf4", rows=2)),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "context", "world", "stack", "more"), CASES, ids=lambda each: str(each)[:60])
def test_settings_against_the_code(name: str, context: int, world: int, stack: Stack, more: dict[str, Any]):
    hf = hf_config(name)
    hf.num_hidden_layers = 3 if LONG else 2
    job = Job(sizes_of(hf.to_dict(), name), stack, context, world, **more)
    said, ran = predict(job), dry_run(job, hf)
    assert -0.02 <= said.peak / ran.peak - 1 <= 0.05
    for held in ("host", "disk", "offloaded"):
        assert getattr(said, held) == pytest.approx(getattr(ran, held), rel=0.02)
    assert bool(said.offloaded) == bool(more.get("offload"))


def test_a_cap_on_the_logits_takes_the_loss_apart():
    """Gemma's: the fused kernel does not know it, so that log-probabilities and their gradient exist in fp32."""
    sizes = dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=65536, max_position_embeddings=2**17,
    )  # fmt: skip
    peaks = []
    for cap in (None, 30.0):
        hf = AutoConfig.for_model("gemma3_text", **sizes, final_logit_softcapping=cap)
        job = Job(sizes_of(hf.to_dict(), "gemma"), Stack(tile=None), 8 * K)
        said, ran = predict(job), dry_run(job, hf)
        assert -0.02 <= said.peak / ran.peak - 1 <= 0.05
        peaks.append(ran.peak)
    assert peaks[1] > 1.5 * peaks[0]


def test_adapters_are_where_peft_puts_them():
    hf = hf_config("llama3_8b")
    hf.num_hidden_layers = 2
    sizes = replace(read_sizes("llama3_8b"), layers=2, windows=(None,) * 2)
    every = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    for targets in (QV, ("gate_proj", "o_proj"), ("self_attn.k_proj", "lm_head"), tuple(every)):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(hf)
            model = get_peft_model(model, LoraConfig(r=8, target_modules=list(targets), task_type="CAUSAL_LM"))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert Job(sizes, Stack(), 1024, lora=8, targets=targets).trained == trained
    with pytest.raises(ValueError, match=r"no linear layer called qkv_proj .* among q_proj, k_proj"):
        plan(sizes, gpus="1xH200", context="8K", lora=8, lora_targets=("q_proj", "qkv_proj"))


def test_states_on_the_host_take_its_time_and_its_memory():
    options = dict(gpus="1xH100-80GB", context="64K", host="2TB")
    here, away = (plan("qwen3_4b", stack=Stack(), offload_optimizer=away, **options) for away in (False, True))
    states = away.job.trained * (4 + 4 + 8)
    assert here.memory.offloaded == 0 and states <= away.memory.offloaded <= 2 * states
    assert away.peak < here.peak - 0.7 * states and away.host >= here.host + away.memory.offloaded
    link = away.hardware.gpu.pcie
    update = away.job.trained * (4 / link + 16 / (BOTH_WAYS * link))  # the norm, then what is updated
    assert away.speed.parts["optimizer"] == pytest.approx(update)
    four = plan("qwen3_4b", stack=Stack(), offload_optimizer=True, rows=4, accumulation=4, **options)
    sums = 3 * away.job.trained * 8 / (BOTH_WAYS * link)
    assert four.speed.parts["optimizer"] == pytest.approx(update + sums)
    assert four.memory.offloaded - away.memory.offloaded >= 4 * away.job.trained  # gradients, and their sum
    eight = plan("qwen3_4b", stack=Stack(ulysses=8), offload_optimizer=True, **{**options, "gpus": "8xH100"})
    assert eight.speed.parts["optimizer"] == pytest.approx(
        away.job.trained * (4 + 28) / HOST_RATE
    )  # one memory for all
    assert here.speed.parts["optimizer"] < update / 10 and away.speed.parts["pcie"] > here.speed.parts["pcie"]
    small = plan("qwen3_4b", stack=Stack(), offload_optimizer=True, **{**options, "host": "32GB"})
    assert not small.fits and small.shortages[0].startswith("host memory")
    with pytest.raises(ValueError, match="keeps weights whole on the GPU"):
        plan("qwen3_4b", offload_optimizer=True, shard_parameters=False, **options)


def test_a_reference_is_a_forward_more():
    """Of the base in every step; what was scored before the first step costs none."""
    adapters = replace(ADAPTED, objective=Objective(kind="dpo"))
    start = replace(ADAPTED, objective=Objective(kind="dpo", reference="start"))
    policy = replace(ADAPTED, objective=Objective(kind="policy"))
    seconds = [
        plan("llama32_1b", gpus="1xA100", stack=Stack(), **requested(config)).speed.seconds
        for config in (ADAPTED, start, policy, adapters, replace(policy, objective=Objective(kind="policy", kl=0.1)))
    ]
    plain, scored, without, forward, with_kl = seconds
    assert plain < scored == without < 1.1 * plain and 1.15 * plain < forward == with_kl < 1.6 * plain


def test_answers_that_share_their_prompt_are_merged_in_fp32():
    config = replace(ADAPTED, objective=Objective(kind="dpo"))
    shared, apart = (
        plan("llama32_1b", gpus="1xA100", stack=Stack(tile=2048, store="host"), **requested(each))
        for each in (config, replace(config, data=replace(config.data, share_prefixes="off")))
    )
    assert shared.peak > apart.peak and shared.speed.seconds == apart.speed.seconds


def test_what_did_not_fit_fits_with_its_states_on_the_host():
    """And `stack: auto` is not refused for it."""
    options = dict(gpus="1xA100-80GB", context="32K", host="512GB")
    without = plan("qwen3_8b", offload_optimizer=False, **options)
    assert not without.fits and any("train.offload_optimizer: true" in each for each in without.advice)
    moved, asked = plan("qwen3_8b", **options), plan("qwen3_8b", offload_optimizer=True, **options)
    assert moved.fits and moved.job == asked.job and moved.memory == asked.memory
    assert moved.reasons[:-1] == asked.reasons and moved.reasons[-1][:2] == ("train.offload_optimizer", True)
    assert moved.peak < without.budget < without.peak
    for kept in (
        dict(shard_parameters=False),
        dict(optimizer="muon"),
        dict(stack=without.stack),
    ):  # nothing to move, or all said
        assert not plan("qwen3_8b", **kept, **options).job.offload
    with pytest.raises(ValueError, match="adamw8bit' makes states small on the GPU"):
        plan("qwen3_8b", optimizer="adamw8bit", offload_optimizer=True, **options)
    few, all_of_them = (
        plan("llama31_8b", gpus="1xRTX4090", context="32K", lora=256, lora_targets=targets, stack=Stack(store="host"))
        for targets in (QV, requested(ADAPTED)["lora_targets"])
    )
    assert few.job.trained < 0.3 * all_of_them.job.trained and few.peak < all_of_them.peak


def test_micro_batches():
    whole = dict(gpus="2xH100", context="32K", stack=Stack(ulysses=2))
    one, four = (plan("llama3_8b", rows=rows, accumulation=rows, **whole) for rows in (1, 4))
    update = one.speed.parts["optimizer"]
    assert four.speed.seconds == pytest.approx(4 * one.speed.seconds - 3 * update)
    # a gradient for its norm (with a copy in float64), clipped and used; weights and both averages
    moved = one.job.trained / 2 * ((4 + 16 + 8 + 4) + 3 * 8)
    assert update == pytest.approx(moved / (REACHED * one.hardware.gpu.bandwidth))
    gradients = 4 * one.job.trained // 2
    assert four.memory.phases["forward"]["gradients"] == pytest.approx(gradients, rel=0.01)
    assert "gradients" not in one.memory.phases["forward"]
    with pytest.raises(ValueError, match="rows=3 cannot be split into 2 micro-batches"):
        plan("llama3_8b", rows=3, accumulation=2, **whole)


def test_a_checkpoint_that_is_written_meanwhile_is_a_copy_in_host_memory():
    """As large as weights and states, and only of what is trained."""
    options = dict(gpus="8xH100", context="8K", stack=Stack(ulysses=8))
    found = plan("llama3_8b", **options)
    assert found.memory.snapshot == pytest.approx(12 * found.model.weights / 8, rel=0.01)
    assert found.host == 8 * (found.memory.host + found.memory.snapshot)
    assert plan("llama3_8b", asynchronous=False, **options).host == 0
    assert plan("llama3_8b", lora=16, **options).memory.snapshot < 0.02 * found.memory.snapshot
