"""A LoRA model built on the meta device: base from the folder, adapters from a seed, the same on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.engine.model.presets import preset_config

from .runs import tiny, tokens, weights
from .test_export_lora import CASES


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def lora(name: str, model: Any, **more: Any) -> Any:
    import warnings

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about modules without numbers
        return get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **{**CASES[name][1], **more}))


def meta(name: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return lora(name, AutoModelForCausalLM.from_config(preset_config(CASES[name][0], **TIED.get(name, {}))), **more)


TIED: dict[str, Any] = {"every linear and the head": {"tie_word_embeddings": True}}


def filled(
    folder: str, name: str, stack: dict[str, Any], seed: int = 0, **more: Any
) -> tuple[dict[str, Tensor], float]:
    run = ithaca.prepare(meta(name, **more), ithaca.Stack(**stack), device="cpu", weights=folder, seed=seed)
    found = weights(run)
    loss = run.loss(run.shard(tokens(0)))
    loss.backward()
    assert all((p.grad is None) != p.requires_grad for p in run.model.parameters())
    return found, loss.item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in CASES:
        found[name] = tmp_path_factory.mktemp("base")
        tiny(CASES[name][0], **TIED.get(name, {})).save_pretrained(found[name])
    return found


@pytest.mark.parametrize("name", CASES)
def test_base_from_the_folder_and_adapters_as_peft_starts_them(folders: dict[str, Path], name: str):
    """The model is the untouched base, as B is zero; its adapters have PEFT's distribution."""
    found, loss = filled(str(folders[name]), name, dict(shard_parameters=False))
    base = tiny(CASES[name][0], **TIED.get(name, {}))
    reference = lora(name, base)
    assert list(found) == [key for key, _ in reference.named_parameters()]
    for key, value in reference.named_parameters():
        if ".lora_A." in key:
            bound = 1 / math.sqrt(value.shape[1])  # of a uniform distribution
            assert float(found[key].abs().max()) <= bound and float(found[key].std()) == pytest.approx(
                float(value.detach().std()), rel=0.35
            )
        else:
            assert torch.equal(found[key], value), key
    with torch.no_grad():
        assert loss == pytest.approx(reference(tokens(0), labels=tokens(0)).loss.item(), rel=1e-6)
    matrices = [value for key, value in found.items() if ".lora_A." in key]
    assert len({str(value) for value in matrices}) == len(matrices), "no two begin alike"


def test_ranks_do_not_matter_and_the_seed_does(workers: Workers, folders: dict[str, Path]):
    name = "experts"
    alone, _ = filled(str(folders[name]), name, dict(shard_parameters=False))
    for found, _ in workers.run(filled, str(folders[name]), name, dict(ulysses=2), world=4):
        assert all(torch.equal(found[key], value) for key, value in alone.items())
    other, _ = filled(str(folders[name]), name, dict(shard_parameters=False), seed=1)
    assert not any(torch.equal(other[key], value) for key, value in alone.items() if ".lora_A." in key)


def test_gaussian_adapters(folders: dict[str, Path]):
    name = "every linear and the head"
    found, _ = filled(str(folders[name]), name, dict(shard_parameters=False), init_lora_weights="gaussian")
    drawn = torch.cat([value.flatten() for key, value in found.items() if ".lora_A." in key])
    assert float(drawn.std()) == pytest.approx(1 / 3, rel=0.1) and float(drawn.abs().max()) > 0.8


def test_what_needs_the_base_first_is_refused(folders: dict[str, Path]):
    name = "biases of adapters"
    for kind in ("orthogonal", "eva"):
        model = meta(name)
        model.peft_config["default"].init_lora_weights = kind
        with pytest.raises(
            ValueError, match=rf"init_lora_weights=True or 'gaussian', not .*{kind}.* choose one of the two"
        ):
            ithaca.prepare(model, ithaca.Stack(shard_parameters=False), device="cpu", weights=folders[name])


def test_half_a_meta_model_is_refused(folders: dict[str, Path]):
    name = "biases of adapters"
    model = meta(name)
    for key, parameter in list(model.named_parameters()):
        if "lora_" in key:
            module, _, last = key.rpartition(".")
            setattr(model.get_submodule(module), last, torch.nn.Parameter(torch.zeros(parameter.shape)))
    with pytest.raises(
        ValueError, match="a part of the model is on the meta device and another is not; build all of it there"
    ):
        ithaca.prepare(model, ithaca.Stack(shard_parameters=False), device="cpu", weights=folders[name])
