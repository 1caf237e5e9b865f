"""LoRA out: a folder PEFT loads, or weights with the adapters in them; from the run and from its checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.storage.checkpoint import CheckpointError, save
from ithaca.storage.export import export_checkpoint, export_model

from .runs import tiny, tokens
from .test_export import FP32, equal, loaded, tensors_in

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every linear and the head": ("llama3", dict(target_modules=[*LINEARS, "lm_head"])),
    "biases of adapters": ("qwen2", dict(target_modules=["q_proj", "k_proj"], lora_bias=True)),
    "biases of the base": ("qwen2", dict(target_modules=["v_proj"], bias="all")),
    "rank-stabilised, with a whole norm": (
        "llama3",
        dict(target_modules=["q_proj"], use_rslora=True, modules_to_save=["norm"]),
    ),
    "experts": (
        "mixtral",
        dict(target_modules=["v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
}


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def adapted(name: str, base: Any = None) -> Any:
    """A model with adapters that all do something."""
    from peft import LoraConfig, get_peft_model

    preset, settings = CASES[name]
    base = base or tiny(preset)
    torch.manual_seed(0)  # PEFT draws A
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(0)).logits


def exported(folder: str, base: str, name: str, stack: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(name, AutoModelForCausalLM.from_pretrained(base, dtype=FP32))
    run = ithaca.prepare(model, ithaca.Stack(**stack), device="cpu")
    where = Path(folder)
    save(where / "checkpoints", run, None, {}, step=1)
    export_model(run, where / "adapter", dtype=FP32)
    export_model(run, where / "merged", dtype=FP32, merge_lora=True)
    export_checkpoint(where, where / "adapter-offline", dtype=FP32)
    export_checkpoint(where, where / "merged-offline", dtype=FP32, merge_lora=True)


def check(folder: Path, base: Path, name: str) -> None:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = adapted(name, loaded(base))
        again = PeftModel.from_pretrained(loaded(base), folder / "adapter")
        assert torch.equal(logits(again), logits(expected))
        merged = expected.merge_and_unload()
    assert torch.equal(logits(loaded(folder / "merged")), logits(merged))
    for kind, stem in (("adapter", "adapter_model"), ("merged", "model")):
        online, offline = tensors_in(folder / kind, stem), tensors_in(folder / f"{kind}-offline", stem)
        assert equal(online, offline) and online
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert config["inference_mode"] and config["base_model_name_or_path"] == str(base)
    size = sum(value.numel() for value in tensors_in(folder / "adapter", "adapter_model").values())
    assert size < sum(p.numel() for p in loaded(base).parameters()) / 3, "adapters only"


@pytest.mark.parametrize("name", CASES)
def test_adapters_go_out_apart_or_merged(tmp_path: Path, name: str):
    tiny(CASES[name][0]).save_pretrained(tmp_path / "base")
    exported(str(tmp_path / "out"), str(tmp_path / "base"), name, dict(shard_parameters=False))
    check(tmp_path / "out", tmp_path / "base", name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_merged_export_states_its_dtype_and_adapters_have_it(tmp_path: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    tiny().save_pretrained(tmp_path / "base")
    run = ithaca.prepare(adapted("every linear and the head"), ithaca.Stack(shard_parameters=False), device="cpu")
    save(tmp_path / "checkpoints", run, None, {}, step=1)
    base = tmp_path / "base"
    for merged in (
        export_model(run, tmp_path / "merged", dtype=dtype, merge_lora=True),
        export_checkpoint(tmp_path, tmp_path / "offline", dtype=dtype, merge_lora=True, base_folder=base),
    ):
        model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto", local_files_only=True)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    apart = export_model(run, tmp_path / "adapter", dtype=dtype)
    assert {value.dtype for value in tensors_in(apart, "adapter_model").values()} == {dtype}


def test_and_from_shards(workers: Workers, tmp_path: Path):
    name = "experts"
    tiny(CASES[name][0]).save_pretrained(tmp_path / "base")
    workers.run(export_sharded, str(tmp_path / "out"), str(tmp_path / "base"), name, dict(ulysses=2), world=2)
    for kind in ("adapter", "merged"):
        export_checkpoint(tmp_path / "out", tmp_path / f"out/{kind}-offline", dtype=FP32, merge_lora=kind == "merged")
    check(tmp_path / "out", tmp_path / "base", name)


def export_sharded(folder: str, base: str, name: str, stack: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(name, AutoModelForCausalLM.from_pretrained(base, dtype=FP32))
    run = ithaca.prepare(model, ithaca.Stack(**stack), device="cpu")
    save(Path(folder) / "checkpoints", run, None, {}, step=1)
    export_model(run, Path(folder) / "adapter", dtype=FP32)
    export_model(run, Path(folder) / "merged", dtype=FP32, merge_lora=True)


def test_another_base_is_not_merged(tmp_path: Path):
    tiny().save_pretrained(tmp_path / "base")
    tiny(seed=3).save_pretrained(tmp_path / "other")
    run = ithaca.prepare(adapted("every linear and the head"), ithaca.Stack(shard_parameters=False), device="cpu")
    save(tmp_path, run, None, {}, step=1)
    with pytest.raises(CheckpointError, match=r"is not what the adapters were trained on; name the right base"):
        export_checkpoint(tmp_path, tmp_path / "out", merge_lora=True, base_folder=tmp_path / "other")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    export_checkpoint(tmp_path, tmp_path / "out", merge_lora=True, base_folder=tmp_path / "base")
    with pytest.raises(CheckpointError, match="is not a folder; name it with --base"):
        export_checkpoint(tmp_path, tmp_path / "more", merge_lora=True, base_folder=tmp_path / "nowhere")
