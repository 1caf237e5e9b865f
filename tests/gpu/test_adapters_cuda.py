"""LoRA adapters inside of the products on a GPU: bf16 gradients no farther from the exact ones than the untouched PEFT model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ithaca import Stack, prepare
from ithaca.config.schema import LINEARS
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.weights import cast_parameters
from ithaca.verify.presets import build

pytestmark = pytest.mark.gpu

EXPERTS = dict(
    target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)
MODELS: dict[str, dict[str, Any]] = {
    "tiny_llama3": dict(target_modules=[*LINEARS]),
    "tiny_gemma3": dict(target_modules=[*LINEARS]),
    "tiny_phi3": dict(target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "tiny_qwen3_moe": EXPERTS,
}
STACKS = {
    "nothing again": Stack(recompute="none", tile=None, shard_parameters=False),
    "tiles, heads at a time": Stack(tile=64, heads_per_stage=2, shard_parameters=False),
    "FSDP2": Stack(recompute="layer", tile=128),
}


def adapted(preset: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(build(preset_config(preset), seed=5), LoraConfig(r=8, lora_alpha=12, **MODELS[preset]))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # B is zero at first
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.5 * parameter.shape[-1] ** -0.5)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name], parameter.grad = whole.float(), None
    return found


def compare(preset: str, stack: Stack, device: str) -> None:
    model = adapted(preset).to(device)
    ids = torch.randint(0, model.config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(2)).to(device)
    exact, usual, ours = model, cast_parameters(copy.deepcopy(model), torch.bfloat16), copy.deepcopy(model)
    found = []
    for each in (exact, usual):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(gradients(each))
    run = prepare(cast_parameters(ours, torch.bfloat16), stack, device=device, dtype=torch.bfloat16)
    run.loss(run.shard(ids)).backward()
    found.append(gradients(ours))
    right, theirs, mine = found
    assert mine.keys() == right.keys()
    far = [max(((each[n] - g).norm() / g.norm()).item() for n, g in right.items()) for each in (mine, theirs)]
    assert far[0] <= 1.2 * far[1]


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("preset", MODELS)
def test_gradients_of_adapters(preset: str, stack: Stack):
    compare(preset, stack, "cuda")
