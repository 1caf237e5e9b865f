"""The model stays the user's: Hugging Face names and shapes, the same bits, and its own forward as before."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ithaca.base.processes.pool import Workers
from ithaca.verify.presets import add_lora

from .tiny import prepared, tiny, tokens, whole

FAMILIES = ["llama3", "qwen3", "gemma3", "mixtral"]
RECOMPUTE = ["none", "layer", "keep_attention"]


def model_of(preset: str, lora: bool) -> nn.Module:
    return add_lora(tiny(preset), seed=1) if lora else tiny(preset)


def same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].shape == value.shape for name, value in before.items())
    return all(torch.equal(whole(after[name]), value) for name, value in before.items())


def state_through_a_step(preset: str, lora: bool, stack: dict[str, Any]) -> list[bool]:
    model = model_of(preset, lora)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = prepared(model, **stack)
    same = [same_state(model, before)]
    run.loss(run.shard(tokens(2))).backward()
    return [*same, same_state(model, before)]


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("preset", FAMILIES)
def test_state_dict_keeps_names_shapes_and_bits(preset: str, lora: bool):
    assert state_through_a_step(preset, lora, dict(shard_parameters=False, tile=10)) == [True, True]


SHARDED, WHOLE = dict(ulysses=2), dict(ulysses=2, shard_parameters=False)
RANKS: dict[str, tuple[dict[str, Any], bool]] = {"sharded, lora": (SHARDED, True), "whole": (WHOLE, False)}
if os.environ.get("ITHACA_FAMILIES") == "long":  # make families
    RANKS |= {"sharded": (SHARDED, False), "whole, lora": (WHOLE, True)}


@pytest.mark.parametrize(("stack", "lora"), RANKS.values(), ids=RANKS)
def test_state_dict_keeps_names_shapes_and_bits_on_two_ranks(workers: Workers, stack: dict[str, Any], lora: bool):
    for preset in ("qwen3", "mixtral"):
        assert workers.run(state_through_a_step, preset, lora, stack, world=2) == [[True, True]] * 2


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
def test_the_models_own_forward_gives_the_same_bits_as_before(fsdp: bool, recompute: str):
    model, ids = tiny("gemma3"), tokens(2)
    before = model(ids).logits.detach()
    run = prepared(model, shard_parameters=fsdp, recompute=recompute)
    assert torch.equal(model(ids).logits, before)
    run.loss(run.shard(ids)).backward()
    assert torch.equal(model(ids).logits, before)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_the_models_own_training_step_still_works_beside_ours():
    model, ids = tiny(), tokens(2)
    run = prepared(model)
    run.loss(run.shard(ids)).backward()
    ours = [whole(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for mine, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, whole(p.grad), rtol=1e-4, atol=1e-6)


def test_an_adapted_model_keeps_its_own_forward_too():
    model, ids = add_lora(tiny(), seed=1), tokens()
    before = model(ids).logits.detach()
    prepared(model)
    assert torch.equal(model(ids).logits, before)


def test_a_deep_copy_runs_on_its_own_weights():
    """An average of weights is kept in a copy: it must not run the original by way of a patched forward."""
    model, ids = tiny(), tokens()
    prepared(model, shard_parameters=False)
    twin = copy.deepcopy(model)
    before = model(ids).logits
    assert torch.equal(twin(ids).logits, before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(ids).logits, before) and not torch.equal(twin(ids).logits, before)


def test_a_prepared_model_saves_and_loads_as_it_came(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = tiny("mixtral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepared(model, shard_parameters=False)
    model.save_pretrained(tmp_path)
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path), before)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_our_logits_are_those_of_the_untouched_model(recompute: str):
    model, ids = tiny("mistral"), tokens(2, 150)
    with torch.no_grad():
        theirs = model(ids).logits
    run = prepared(model, shard_parameters=False, recompute=recompute, tile=40, heads_per_stage=2)
    with torch.no_grad():
        ours = run.logits(run.shard(ids))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
def test_training_mode_does_not_matter(fsdp: bool):
    run, losses = prepared(shard_parameters=fsdp), []
    for mode in (True, False):
        run.model.train(mode)
        losses.append(run.loss(run.shard(tokens())).detach())
    assert torch.equal(*losses)
