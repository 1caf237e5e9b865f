"""LoRA: the base stays frozen, the adapters learn exactly what they learn in the untouched model."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.base.processes.pool import Workers
from ithaca.engine.model.weights import cast_parameters

from .tiny import gradients, prepared, tiny, tokens, worst

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# name -> preset, LoraConfig
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every linear and the head": ("llama3", dict(target_modules=[*LINEARS, "lm_head"])),
    "the head alone": ("llama3", dict(target_modules=["lm_head"])),
    "queries alone": ("qwen3", dict(target_modules=["q_proj"])),
    "biases of adapters": ("qwen2", dict(target_modules=["q_proj", "k_proj", "v_proj"], lora_bias=True)),
    "biases of the base": ("qwen2", dict(target_modules=["v_proj"], bias="all")),
    "rank-stabilised": ("gemma3", dict(target_modules=["k_proj", "down_proj"], use_rslora=True)),
    "a whole norm beside": ("llama3", dict(target_modules=["q_proj"], modules_to_save=["norm"])),
    "norms of all heads": ("olmo2", dict(target_modules=["q_proj", "k_proj", "v_proj"])),
    "one layer": ("llama3", dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1])),
    "attention of experts": ("mixtral", dict(target_modules=["q_proj", "o_proj"])),
    "experts": (
        "mixtral",
        dict(target_modules=["v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
}


def adapted(name: str) -> Any:
    from peft import LoraConfig, get_peft_model

    preset, settings = CASES[name]
    model = get_peft_model(tiny(preset), LoraConfig(r=3, lora_alpha=5, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:  # B is zero at first, which would leave A without a gradient
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model


def reference(name: str, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    model = adapted(name)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def step(name: str, stack: dict[str, Any]) -> tuple[float, dict[str, Tensor], bool]:
    model = adapted(name)
    run = prepared(model, **stack)
    loss = run.loss(run.shard(tokens(2)))
    loss.backward()
    return loss.item(), gradients(run), all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", CASES)
def test_adapters_learn_as_in_the_untouched_model(name: str):
    expected, theirs = reference(name, tokens(2))
    loss, ours, frozen = step(name, dict(shard_parameters=False, tile=10, heads_per_stage=2))
    assert loss == pytest.approx(expected, rel=1e-6) and frozen
    assert worst(ours, theirs) <= 1e-5


# What is gathered, sliced or stored in another way; the others in `make families`
ON_RANKS = ["every linear and the head", "biases of the base", "a whole norm beside", "norms of all heads", "experts"]


@pytest.mark.parametrize("name", CASES if os.environ.get("ITHACA_FAMILIES") == "long" else ON_RANKS)
def test_and_on_two_ranks(workers: Workers, name: str):
    expected, theirs = reference(name, tokens(2))
    for loss, ours, frozen in workers.run(step, name, dict(ulysses=2, store="host", tile=10), world=2):
        assert loss == pytest.approx(expected, rel=1e-6) and frozen
        assert worst(ours, theirs) <= 1e-5


def test_only_what_is_trainable_has_gradients():
    model = adapted("every linear and the head")
    run = prepared(model)
    run.loss(run.shard(tokens())).backward()
    learned = {key for key, p in model.named_parameters() if p.grad is not None}
    assert learned == {key for key, p in model.named_parameters() if p.requires_grad}
    assert learned and all("lora_" in key for key in learned)


def test_adapters_that_are_switched_off_are_not_computed():
    model, ids = adapted("every linear and the head"), tokens()
    base = tiny()(ids, labels=ids).loss.item()
    run = prepared(model, shard_parameters=False)
    with torch.no_grad():
        on = run.loss(run.shard(ids)).item()
        with model.disable_adapter():
            off = run.loss(run.shard(ids)).item()
    assert off == pytest.approx(base, rel=1e-6) and abs(on - base) > 1e-3


def half_precision_step() -> tuple[float, set[torch.dtype], set[torch.dtype]]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        cast_parameters(tiny(), torch.bfloat16), LoraConfig(r=2, target_modules=[*LINEARS, "lm_head"])
    )
    run = prepared(model, ulysses=2)
    loss = run.loss(run.shard(tokens()))
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    return loss.item(), frozen, {t.dtype for p in trained for t in (p, p.grad)}


def test_a_half_precision_base_stays_small_under_fp32_adapters(workers: Workers):
    expected = tiny()(tokens(), labels=tokens()).loss.item()
    for loss, frozen, trained in workers.run(half_precision_step, world=2):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert frozen == {torch.bfloat16} and trained == {torch.float32}
