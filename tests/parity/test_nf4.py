"""A base in NF4 under every technique: loss and every gradient are those of the same adapters on the unpacked base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.engine.model.nf4 import LEVELS, Nf4, pack, packable, unpack
from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.verify.presets import add_lora

from ..contract.test_one_loss import DOCUMENTS, LENGTH, ROWS, labelled
from ..contract.tiny import gradients, tiny, tokens, worst


def model_of(kind: str) -> Any:
    """Rows of 64 and 128, as NF4 wants them."""
    if kind == "own":
        from transformers import AutoModelForCausalLM

        config = smallest("glm4")
        config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomize(model, 1)
    else:
        wide: dict[str, Any] = dict(intermediate_size=128)
        if kind in ("qwen2_moe", "qwen3_moe", "gpt_oss"):  # the reference has no loss of the router
            wide |= dict(moe_intermediate_size=64, output_router_logits=False)
            wide |= dict(shared_expert_intermediate_size=64) if kind == "qwen2_moe" else {}
        model = tiny(kind, **wide)
    return add_lora(model, 2)


def batch_of(packed: bool) -> dict[str, Any]:
    ids = tokens(ROWS, LENGTH) % TEXT
    return dict(input_ids=ids, labels=labelled(ids), documents=DOCUMENTS if packed else None)


def on_one_gpu(quantize: Any) -> tuple[float, dict[str, Tensor]]:
    """A step on one GPU, on a base that is packed there or was rounded before; for tests/gpu."""
    model, batch = model_of("llama3"), batch_of(True)
    with torch.no_grad():
        for _, parameter in packable(layers_of(model)):
            unpack(pack(parameter), parameter)  # of which packing makes the same numbers again
    run = ithaca.prepare(model, ithaca.Stack(heads_per_stage=1), device="cuda", quantize=quantize)
    loss = run.loss(run.shard(**batch))
    loss.backward()
    return float(loss.detach()), gradients(run)


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def reference(kind: str, packed: bool) -> tuple[float, dict[str, Tensor], int]:
    """In one process, with the untouched model: a document at a time."""
    model, batch = model_of(kind), batch_of(packed)
    count = 0
    with torch.no_grad():
        for _, parameter in packable(layers_of(model)):
            unpack(pack(parameter), parameter)
            count += 1
    ids, labels, documents = batch.values()
    total, supervised = torch.zeros(()), 0
    for row in range(ROWS):
        start = 0
        for length in documents[row] if documents else [LENGTH]:
            part = slice(start, start + length)
            start += length
            logits = model(ids[row : row + 1, part], use_cache=False).logits[0, :-1]
            target = labels[row, part][1:]
            supervised += int((target != -100).sum())
            total = total + torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    loss = total / supervised
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, count


def step(kind: str, stack: dict[str, Any], packed: bool) -> tuple[list[float], dict[str, Tensor], int]:
    run = ithaca.prepare(model_of(kind), ithaca.Stack(**stack), device="cpu", quantize="nf4")
    losses, found = [], {}
    for _ in range(2):  # what was gathered is freed, and unpacked again into the same memory
        run.model.zero_grad()
        loss = run.loss(run.shard(**batch_of(packed)))
        loss.backward()
        losses.append(float(loss.detach()))
        found = gradients(run)
    shards = [parameter for _, parameter in packable(layers_of(run.model))]
    assert all(isinstance(shard, DTensor) and isinstance(shard.to_local(), Nf4) for shard in shards)
    if run.mesh.world.size == 1:
        with pytest.raises(NotImplementedError, match="nothing is merged into four bits"):
            wrapped: Any = run.model
            wrapped.merge_adapter()
    return losses, found if run.mesh.world.rank == 0 else {}, len(shards)


LONG = os.environ.get("ITHACA_LOSSES") == "long"
CASES: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "1, composed": ("llama3", 1, dict(engine="composed", recompute="none", tile=None), False),
    "2 ring, stages": ("llama3", 2, dict(ring=2, recompute="layer", heads_per_stage=1), True),
    "own code": ("own", 2, dict(ulysses=2, store="host", engine="module"), True),
    "fused": ("phi3", 2, dict(ulysses=2, heads_per_stage=2, store="host"), True),
}
MORE: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "1": ("llama3", 1, dict(), True),
    "4 = 2 ulysses × 2 ring, stages": (
        "llama3",
        4,
        dict(ulysses=2, ring=2, recompute="layer", heads_per_stage=1),
        True,
    ),
    "2 ulysses, store, stages": ("qwen3", 2, dict(ulysses=2, heads_per_stage=1, store="host", tile=7), True),
    "experts": ("qwen3_moe", 2, dict(ulysses=2, tile=7), True),
    "scaled": ("granite", 2, dict(ulysses=2, heads_per_stage=1), True),
    "two linears, biases": ("starcoder2", 2, dict(ring=2, tile=9), True),
    "a shared expert": ("qwen2_moe", 1, dict(tile=9), True),
    "sinks and experts": ("gpt_oss", 2, dict(ulysses=2, tile=7), True),
    "fused, rotated in part": ("glm4", 2, dict(ring=2, tile=7), True),
    "4 = 2 replicas × 2 ring": ("gemma3", 4, dict(replicate=2, ring=2), False),
    "whole on each of 2": ("llama3", 2, dict(shard_parameters=False, ulysses=2), False),
}
CASES |= MORE if LONG else {}


def test_as_bitsandbytes_has_it():
    """Codes and scales of quantize_4bit (0.50.2, nf4, blocks of 64), and its dequantize_4bit."""
    n = torch.arange(256).view(2, 128)
    weight = ((n**3 % 61) - 30) / 8 * (1 + n // 64)
    weight[0, :64] = 0
    again = "6008a5f5e40f418a61e96a11beea5114ee5861e956eb0fb1a0a56ff9ef001"  # 61 of them, and from the beginning
    packed = pack(weight)
    codes, scales = packed[:, :64], packed[:, 64:].contiguous().view(torch.float32)
    assert bytes(codes.flatten().tolist()).hex() == "7" * 64 + (4 * again)[:192]
    assert scales.tolist() == [[0.0, 7.5], [11.25, 15.0]]
    made = unpack(packed, torch.empty(2, 128))
    assert made[0, :64].tolist() == [0.0] * 64 and float((made - weight).abs().max()) < 0.15 * 15
    assert sorted({*(made[1, 64:] / 15).tolist()}) == sorted(
        {float(torch.tensor(LEVELS[int(c, 16)])) for c in (4 * again)[128:192]}
    )


@pytest.mark.parametrize("name", CASES)
def test_parity(workers: Workers, name: str):
    kind, world, stack, packed = CASES[name]
    loss, theirs, count = reference(kind, packed)
    answers = workers.run(step, kind, stack, packed, world=world)
    for losses, _, packed_here in answers:
        assert losses[0] == losses[1] == pytest.approx(loss, rel=1e-5)
        assert packed_here == count > 6
    assert len(theirs) > 8 and worst(answers[0][1], theirs) <= 1e-5


def saved(folder: str) -> None:
    run = ithaca.prepare(model_of("llama3"), ithaca.Stack(ulysses=2), device="cpu", quantize="nf4")
    wrapped: Any = run.model
    wrapped.save_pretrained(f"{folder}/adapters")
    wrapped.get_base_model().save_pretrained(f"{folder}/base")


@pytest.mark.skipif(not LONG, reason="make losses")
def test_a_base_is_saved_as_it_computes(workers: Workers, tmp_path: Path):
    """The numbers that come out of NF4; with adapters, these alone."""
    workers.run(saved, str(tmp_path), world=2)
    assert all(".lora_" in name for name in load_file(tmp_path / "adapters/adapter_model.safetensors"))
    model, found = model_of("llama3"), load_file(tmp_path / "base/model.safetensors")
    rounded = {id(parameter) for _, parameter in packable(layers_of(model))}
    for name, parameter in model.get_base_model().named_parameters():
        whole = unpack(pack(parameter), torch.empty_like(parameter)) if id(parameter) in rounded else parameter
        assert torch.equal(found[name], whole), name
