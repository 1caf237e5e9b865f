"""Arithmetic, counted against models that are really built, masks that are really drawn, and torch's own counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ithaca.engine.model.adapter import read_model
from ithaca.engine.model.presets import TINY, preset_config
from ithaca.engine.model.shrink import smallest
from ithaca.planner.flops import head_size, layer_windows, matmul_weights, mfu, model_flops, visible_pairs
from ithaca.planner.gpus import peak_flops
from ithaca.verify.presets import add_lora, build


def drawn_pairs(lengths: list[int], window: int | None) -> int:
    """Visible pairs of packed documents, one by one."""
    document = [index for index, length in enumerate(lengths) for _ in range(length)]
    tokens = range(len(document))
    return sum(
        document[q] == document[k] and k <= q and (window is None or q - k < window) for q in tokens for k in tokens
    )


def test_visible_pairs_are_those_of_the_mask():
    cases = [(length, window) for length in range(13) for window in (None, *range(1, 15))]
    for length, window in cases:
        assert visible_pairs(length, window) == drawn_pairs([length], window), (length, window)
    assert len(cases) == 13 * 15


@pytest.mark.parametrize("name", TINY)
def test_weights_and_windows_are_those_of_the_model(name: str):
    config = preset_config(name)
    decoder = read_model(build(config, 0))
    used = 0
    for module in decoder.model.modules():
        if isinstance(module, nn.Linear):
            used += module.weight.numel()
        elif type(module).__name__.endswith("Experts"):
            every = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 3)  # not biases
            used += every * config.num_experts_per_tok // module.num_experts
        elif type(module).__name__.endswith("Router"):
            used += module.weight.numel()
    assert matmul_weights(config) == used
    assert layer_windows(config) == [layer.window for layer in decoder.layers]
    assert head_size(config) == decoder.layers[0].projector.head_dim


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma3"])
def test_a_step_of_packed_documents(name: str):
    config = preset_config(name)
    lengths = [97, 3, 200, 1]
    pairs = sum(drawn_pairs(lengths, window) for window in layer_windows(config))
    attention = 4 * head_size(config) * config.num_attention_heads * pairs
    assert model_flops(config, lengths) == 3 * (2 * matmul_weights(config) * sum(lengths) + attention)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_are_counted_as_torch_counts_them(lora: bool):
    config = preset_config("llama3", attn_implementation="eager")
    model = build(config, 0)
    adapters = None
    if lora:
        model = add_lora(model, 0)
        adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    length = 24
    embedded = torch.randn(1, length, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    # the eager model computes whole squares of scores, and one small product for the rotary angles
    pairs = config.num_hidden_layers * (length * length - visible_pairs(length))
    masked = 12 * head_size(config) * config.num_attention_heads * pairs
    angles = length * head_size(config)
    assert counter.get_total_flops() - masked - angles == model_flops(config, [length], adapters=adapters)


def test_beyond_64_bits():
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    length = 10_000_000
    flops = model_flops(config, np.array([length], dtype=np.int64))
    assert matmul_weights(config) == 7_504_658_432  # 8.03B parameters, less the embedding and the norms
    assert flops == 6 * 7_504_658_432 * length + 12 * 128 * 32 * 32 * (length * (length + 1) // 2) > 2**63


@pytest.mark.parametrize("kind", ["helium", "glm4_moe", "deepseek_v3"])
def test_a_model_without_arithmetic_of_its_own(kind: str):
    """Its weights are those of its parts; here counted from the modules."""
    config = smallest(kind)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    used = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in name:
            continue
        chosen = config.num_experts_per_tok if parameter.dim() == 3 else 1
        used += parameter.numel() * chosen // (parameter.shape[0] if parameter.dim() == 3 else 1)
    assert matmul_weights(config) == used
    sizes = (head_size(config),) * 2
    if kind == "deepseek_v3":
        sizes = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        assert sizes[0] != sizes[1]
    pairs = sum(drawn_pairs([50], window) for window in layer_windows(config))
    attention = 2 * sum(sizes) * config.num_attention_heads * pairs
    assert model_flops(config, [50]) == 3 * (2 * used * 50 + attention)


def test_peaks_by_name():
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L40": 181e12,
        "NVIDIA L4": 121e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA A10": 125e12,
        # not these chips, or not all of one
        "NVIDIA A10G": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "Tesla V100-SXM2-32GB": None,
        "cpu": None,
        "": None,
    }
    assert {name: peak_flops(name) for name in names} == names


def test_mfu():
    assert mfu(989 * 10**12 * 16, 4.0, 8, 989e12) == pytest.approx(0.5)
    assert mfu(10**15, 4.0, 8, None) is None
