"""A model built on the meta device is filled from safetensors, each rank with its own rows, and equals the saved one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ithaca
from ithaca.base.processes.pool import WorkerError, Workers
from ithaca.engine.model.presets import preset_config
from ithaca.verify.presets import build

PRESETS = ["llama3", "qwen3", "gemma3", "mixtral", "qwen3_moe"]
EXPERTS = ("mixtral", "qwen3_moe")  # the others are written alike either way
LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def tokens() -> torch.Tensor:
    return torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))


def tiny(preset: str) -> Any:
    return build(preset_config(preset), seed=0)


def meta(preset: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(preset_config(preset, **changes))


def filled(preset: str, folder: str | Path, stack: dict[str, Any], **changes: Any) -> ithaca.Run:
    return ithaca.prepare(meta(preset, **changes), ithaca.Stack(**stack), device="cpu", weights=folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each preset as save_pretrained writes it, and with the experts of a layer in one tensor, as the modules hold them."""
    found = {}
    for preset in PRESETS:
        for layout in ("published", "fused") if preset in EXPERTS else ("published",):
            folder = tmp_path_factory.mktemp(f"{preset}-{layout}")
            model = tiny(preset)
            model.save_pretrained(folder, max_shard_size="60KB", save_original_format=layout == "published")
            found[preset, layout] = folder
    return found


def names_in(folder: Path) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3, "several files, or the index is not put to the test"
    return set(index["weight_map"])


def test_what_transformers_writes_for_experts(folders):
    """The two layouts differ as expected; if transformers changes them, this says so first."""
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names_in(folders["mixtral", "published"])
    assert "model.layers.0.block_sparse_moe.gate.weight" in names_in(folders["mixtral", "published"])
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in names_in(folders["qwen3_moe", "published"])
    for preset in ("mixtral", "qwen3_moe"):
        assert "model.layers.0.mlp.experts.gate_up_proj" in names_in(folders[preset, "fused"])
    assert "lm_head.weight" not in names_in(folders["qwen3", "published"])


def fill(preset: str, folder: str, stack: dict[str, Any]) -> dict[str, Any]:
    """Everything there is to compare, from one rank."""
    saved = tiny(preset)
    run = filled(preset, folder, stack)
    state = {name: whole(value) for name, value in run.model.state_dict().items()}
    buffers = dict(run.model.named_buffers())
    parameters = list(run.model.parameters())
    loss = run.loss(run.shard(tokens()))
    loss.backward()
    return {
        "parameters": list(state) == list(saved.state_dict())
        and all(torch.equal(state[name], value) for name, value in saved.state_dict().items()),
        "buffers": buffers.keys() == dict(saved.named_buffers()).keys()
        and all(torch.equal(buffers[name], value) for name, value in saved.named_buffers()),
        "tied": run.decoder.tied == (run.model.lm_head.weight is run.model.model.embed_tokens.weight),  # pyright: ignore
        "held": sum(local(p).numel() for p in parameters),
        "total": sum(p.numel() for p in parameters),
        "loss": loss.item(),
        "gradients": all(p.grad is not None for p in parameters),
        "dtypes": {p.dtype for p in parameters},
    }


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def untouched_loss(preset: str) -> float:
    with torch.no_grad():
        return tiny(preset)(tokens(), labels=tokens(), use_cache=False).loss.item()


def check(answer: dict[str, Any], preset: str, loss: float, ranks: int) -> None:
    assert answer["parameters"] and answer["buffers"] and answer["tied"] and answer["gradients"]
    assert answer["loss"] == pytest.approx(loss, rel=1e-6)
    # a rank holds its share; FSDP2 rounds up what does not divide: 6 experts on 4 ranks are 2, 2, 2 and none
    least = 0.0 if preset == "qwen3_moe" and ranks == 4 else 0.8
    assert least <= answer["held"] / (answer["total"] / ranks) <= 1.25


@pytest.mark.parametrize(
    ("preset", "layout"), [*((preset, "published") for preset in PRESETS), *((preset, "fused") for preset in EXPERTS)]
)
def test_one_process_without_fsdp(folders, preset: str, layout: str):
    answer = fill(preset, folders[preset, layout], dict(shard_parameters=False))
    check(answer, preset, untouched_loss(preset), 1)


# Six experts on four ranks leave one without
SHARES = [("llama3", 1), ("llama3", 2), ("qwen3", 2), ("gemma3", 2), ("mixtral", 2), ("qwen3_moe", 4)]


@pytest.mark.parametrize(
    ("preset", "world"), [(preset, world) for preset in PRESETS for world in (1, 2, 4)] if LONG else SHARES
)
def test_each_rank_fills_its_share(workers: Workers, folders, preset: str, world: int):
    layouts = (
        ("published", "fused") if preset == "mixtral" or (preset == "qwen3_moe" and world == 4) else ("published",)
    )
    for layout in layouts:
        stack = dict(ulysses=min(world, 2))
        answers = workers.run(fill, preset, str(folders[preset, layout]), stack, world=world)
        for answer in answers:
            check(answer, preset, untouched_loss(preset), world)
        assert sum(answer["held"] for answer in answers) == answers[0]["total"], "nothing twice, nothing missing"


@pytest.mark.parametrize("preset", ["phi3", "gpt_oss"])
def test_fused_heads_and_sinks(workers: Workers, tmp_path: Path, preset: str):
    tiny(preset).save_pretrained(tmp_path, max_shard_size="60KB")
    for answer in workers.run(fill, preset, str(tmp_path), dict(ulysses=2), world=2):
        check(answer, preset, untouched_loss(preset), 2)


def test_replicas_hold_a_copy_each(workers: Workers, folders):
    answers = workers.run(fill, "mixtral", str(folders["mixtral", "published"]), dict(replicate=2, ulysses=2), world=4)
    for answer in answers:
        check(answer, "mixtral", untouched_loss("mixtral"), 2)


def test_a_single_file_needs_no_index(tmp_path: Path):
    tiny("llama3").save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    check(fill("llama3", tmp_path, dict(shard_parameters=False)), "llama3", untouched_loss("llama3"), 1)


def half_precision(folder: str) -> tuple[set[torch.dtype], float]:
    run = ithaca.prepare(meta("llama3").to(torch.bfloat16), ithaca.Stack(ulysses=2), device="cpu", weights=folder)
    return {p.dtype for p in run.model.parameters()}, run.loss(run.shard(tokens())).item()


def test_a_half_precision_model_gets_float32_masters(workers: Workers, tmp_path: Path):
    tiny("llama3").to(torch.bfloat16).save_pretrained(tmp_path)
    for dtypes, loss in workers.run(half_precision, str(tmp_path), world=2):
        assert dtypes == {torch.float32} and loss == pytest.approx(untouched_loss("llama3"), rel=1e-2)


# What is refused, on every rank and before anything is filled.


def refusal(folder: Path, preset: str = "llama3", **changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        filled(preset, folder, dict(shard_parameters=False), **changes)
    return str(caught.value)


def edit(folder: Path, change) -> None:
    """Rewrite the tensors of a folder with a single file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_folder_without_safetensors_is_refused(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        text = refusal(folder)
        assert str(folder) in text and "neither model.safetensors nor" in text and "save_pretrained" in text


def test_a_missing_file_of_several_is_named(tmp_path: Path):
    tiny("llama3").save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    text = refusal(tmp_path)
    assert str(lost) in text and "does not exist (1 missing)" in text


def test_an_index_without_a_map_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map, a table of names and files" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("not json")
    refusal(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path):
    tiny("llama3").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    refusal(tmp_path)


def test_a_missing_parameter_is_named(tmp_path: Path):
    tiny("llama3").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    text = refusal(tmp_path)
    assert "lacks 1 of the model's parameters, for example model.layers.1.mlp.up_proj.weight" in text
    assert "pass the folder this model's config came from" in text


def test_a_missing_expert_is_named(tmp_path: Path):
    tiny("mixtral").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.2.w3.weight"))
    assert "for example model.layers.0.mlp.experts.gate_up_proj" in refusal(tmp_path, "mixtral")


def test_another_size_is_refused_with_both_shapes(tmp_path: Path):
    tiny("llama3").save_pretrained(tmp_path)
    text = refusal(tmp_path, intermediate_size=80)
    assert "has shape (96, 64)" in text and "needs (80, 64)" in text and "model.layers.0.mlp.gate_proj.weight" in text


@pytest.mark.parametrize("shape", [(32, 1), (1, 64), (31, 64)])
def test_an_expert_of_another_size_is_refused_and_not_broadcast(tmp_path: Path, shape: tuple[int, int]):
    tiny("qwen3_moe").save_pretrained(tmp_path)
    name = "model.layers.2.mlp.experts.3.gate_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(shape)}))
    text = refusal(tmp_path, "qwen3_moe")
    assert name in text and "needs (64, 64)" in text


def test_a_real_model_is_not_filled_again(tmp_path: Path):
    for shard in (True, False):
        with pytest.raises(ValueError, match=r"weights= is for a model on the meta device; .* drop it"):
            ithaca.prepare(tiny("llama3"), ithaca.Stack(shard_parameters=shard), device="cpu", weights=tmp_path)


def test_a_meta_model_needs_weights():
    for shard in (True, False):
        with pytest.raises(ValueError, match="on the meta device, so it has no weights yet; pass weights=FOLDER"):
            ithaca.prepare(meta("llama3"), ithaca.Stack(shard_parameters=shard), device="cpu")


def fill_from(rank: int, bad: str, good: str, changes: dict[str, Any]) -> None:
    filled("llama3", bad if dist.get_rank() == rank else good, {}, **changes)


@pytest.mark.parametrize(
    ("bad", "changes", "words"),
    [
        ("nowhere", {}, ["rank 1: ", "neither model.safetensors"]),
        ("short", {}, ["rank 1: ", "lacks 1 of the model's parameters", "model.norm.weight"]),
        ("narrow", {}, ["rank 1: ", "model.norm.weight has shape (1,)", "needs (64,)"]),
        ("good", {"vocab_size": 3}, ["model.embed_tokens.weight has shape (257, 64)", "needs (3, 64)", "4 of 4 ranks"]),
    ],
    ids=["missing folder", "missing parameter", "another shape", "another shape, fewer rows than ranks"],
)
def test_one_bad_folder_stops_all_ranks(workers: Workers, tmp_path: Path, bad: str, changes: dict, words: list[str]):
    """A rank that has no row of the wrong parameter must stop too."""
    for name in ("good", "short", "narrow"):
        tiny("llama3").save_pretrained(tmp_path / name)
    edit(tmp_path / "short", lambda tensors: tensors.pop("model.norm.weight"))
    edit(tmp_path / "narrow", lambda tensors: tensors.update({"model.norm.weight": torch.ones(1)}))
    with pytest.raises(WorkerError) as caught:
        workers.run(fill_from, 1, str(tmp_path / bad), str(tmp_path / "good"), changes, world=4)
    assert caught.value.kind == "ValueError" and caught.value.ranks == [0, 1, 2, 3]
    for word in words:
        assert word in str(caught.value).splitlines()[0]
