"""A shrunk config takes the paths of the whole one: the same modules, kinds of layers, ratios and settings; only sizes differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ithaca.engine.model.shrink import WINDOW, check, grouped, pick, shrink_config, smallest

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
FACTORS = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}

# Settings as released checkpoints have them, where the defaults leave the path out.
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "glm4_moe": {"head_dim": 128, "first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {},
    "gemma2": {},
    "gemma3_text": {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376},
    "gemma4_text": {"num_hidden_layers": 42, "num_kv_shared_layers": 18, "num_key_value_heads": 2},
    "phi3": {"rope_scaling": {"type": "longrope", **FACTORS}, "partial_rotary_factor": 0.75, "hidden_size": 4096},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "cohere2": {"num_key_value_heads": 8},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 12, "mlp_only_layers": [0, 15]},
    "minimax_m2": {},
    "smollm3": {},
    "olmo3": {},
    "granite": {"attention_multiplier": 0.0078, "logits_scaling": 16.0, "residual_multiplier": 0.22},
    "gpt2": {},
}


def before_and_after(model_type: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[model_type](**CASES[model_type])
    return config, shrink_config(config)


def parts(config: Any) -> set[tuple[str, str]]:
    """Modules and parameters by name, without the numbers of layers and experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = {(name, type(module).__name__) for name, module in model.named_modules()}
    named = modules | {(name, f"{parameter.dim()}") for name, parameter in model.named_parameters()}
    return {(re.sub(r"\d+", "#", name), kind) for name, kind in named}


@pytest.mark.parametrize("model_type", CASES)
def test_has_the_parts_of_the_whole_and_runs(model_type: str) -> None:
    config, small = before_and_after(model_type)
    parameters, loss = check(small)
    assert parameters < 1_000_000 and 4 < loss < 8
    assert type(small) is type(config)
    assert parts(small) == parts(config)


@pytest.mark.parametrize("model_type", CASES)
def test_only_sizes_change(model_type: str) -> None:
    config, small = before_and_after(model_type)
    before, after = config.to_dict(), small.to_dict()
    settings = {name for name, value in before.items() if isinstance(value, (str, bool, float)) or value is None}
    changed = {name for name in settings if after.get(name) != before[name]}
    assert changed <= {"dtype", "use_cache"}
    assert small.dtype == torch.float32
    ids = [small.bos_token_id, small.eos_token_id, small.pad_token_id]
    assert all(token is None or token < small.vocab_size for token in ids)
    assert small.num_hidden_layers == 4


@pytest.mark.parametrize("model_type", ["gemma4_text", "llama4_text", "qwen2_moe", "deepseek_v3", "phi3"])
def test_a_small_config_stays_and_a_big_one_is_not_touched(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**CASES[model_type])
    before = config.to_dict()
    small = shrink_config(config)
    assert config.to_dict() == before
    assert shrink_config(small).to_dict() == small.to_dict()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (32, 32, (4, 4)),
        (32, 16, (8, 4)),
        (24, 8, (6, 2)),
        (32, 8, (8, 2)),
        (28, 4, (6, 2)),  # 7 to a group: odd stays odd
        (96, 8, (8, 2)),  # 12 to a group: more than fit
        (71, 1, (4, 1)),
        (8, 1, (8, 1)),
        (4, 2, (4, 2)),
    ],
)
def test_groups_of_heads(heads: int, kv_heads: int, expected: tuple[int, int]) -> None:
    new_heads, new_kv_heads = grouped({heads}, {kv_heads})
    assert (new_heads[heads], new_kv_heads[kv_heads]) == expected


def test_layers_with_their_own_numbers_of_heads_keep_them_apart() -> None:
    assert grouped({32}, {16, 4}) == ({32: 8}, {16: 4, 4: 2})
    assert grouped({48, 64}, {8}) == ({64: 8, 48: 6}, {8: 2})


def test_pick_keeps_the_ends_and_every_kind() -> None:
    assert pick(list("aaaaab" * 5), 4) == [0, 1, 5, 29]
    assert pick(list("dddmmmmmmm"), 4) == [0, 1, 3, 9]
    assert pick(list("aaabaaacaaadaaaeaaa"), 4) == [0, 3, 7, 11, 15, 18]
    assert pick(list("ab"), 4) == [0, 1]


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gpt_oss", [SLIDING, FULL, SLIDING, FULL]),
        ("gemma2", [SLIDING, FULL, SLIDING, FULL]),
        ("gemma3_text", [SLIDING, FULL, FULL, SLIDING]),
        ("gemma4_text", [SLIDING, FULL, SLIDING, FULL]),
        ("cohere2", [SLIDING, SLIDING, FULL, FULL]),
        ("olmo3", [SLIDING, SLIDING, FULL, FULL]),
        ("llama4_text", [CHUNKED, CHUNKED, CHUNKED, FULL]),
    ],
)
def test_kinds_of_layers_and_their_windows(model_type: str, kinds: list[str]) -> None:
    _, small = before_and_after(model_type)
    assert WINDOW < 96 / 2
    assert small.layer_types == kinds
    assert getattr(small, "attention_chunk_size" if CHUNKED in kinds else "sliding_window") == WINDOW


def test_deepseek_v3_keeps_its_sizes_apart_and_its_groups_of_experts() -> None:
    _, small = before_and_after("deepseek_v3")
    sizes = [small.qk_rope_head_dim, small.qk_nope_head_dim, small.kv_lora_rank, small.q_lora_rank]
    assert sizes == sorted(set(sizes))
    assert small.v_head_dim == small.qk_nope_head_dim  # as in the whole model
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    assert (small.n_routed_experts, small.n_group, small.topk_group, small.num_experts_per_tok) == (8, 4, 2, 2)
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (2, 4)


def test_glm4_moe_has_dense_layers_and_experts() -> None:
    _, small = before_and_after("glm4_moe")
    assert 0 < small.first_k_dense_replace < small.num_hidden_layers
    assert small.rope_parameters["partial_rotary_factor"] == 0.5
    assert small.num_attention_heads * small.head_dim > small.hidden_size  # as in the whole model
    assert len({small.intermediate_size, small.moe_intermediate_size}) == 2


def test_gemma4_keeps_shared_keys_and_wider_heads_of_global_layers() -> None:
    _, small = before_and_after("gemma4_text")
    assert small.num_kv_shared_layers == 2  # one of each kind shares, one of each kind does not
    widths = [small.per_layer_config[i].head_dim for i in range(4)]
    assert widths[0] == widths[2] < widths[1] == widths[3]


def test_llama4_keeps_rotary_and_experts_where_they_were() -> None:
    _, small = before_and_after("llama4_text")
    assert small.no_rope_layers == [1, 1, 1, 0]
    assert small.moe_layers == [1, 3]
    assert small.floor_scale == WINDOW  # the temperature of positions past it


def test_smollm3_keeps_layers_without_rotary() -> None:
    _, small = before_and_after("smollm3")
    assert small.no_rope_layers == [1, 1, 0, 0]


def test_qwen2_moe_crosses_windows_and_dense_layers() -> None:
    _, small = before_and_after("qwen2_moe")
    dense = [i in small.mlp_only_layers for i in range(4)]
    kinds = [(FULL, False), (FULL, True), (SLIDING, False), (SLIDING, True)]
    assert sorted(zip(small.layer_types, dense, strict=True)) == kinds
    assert small.shared_expert_intermediate_size == small.intermediate_size  # as in the whole model
    assert small.sliding_window == WINDOW


def test_phi3_longrope_has_a_factor_per_frequency() -> None:
    config, small = before_and_after("phi3")
    rotated = small.hidden_size // small.num_attention_heads * 3 // 4
    for name in FACTORS:
        factors = small.rope_parameters[name]
        assert len(factors) == rotated // 2
        assert set(factors) <= set(config.rope_parameters[name])
        assert factors[-1] > FACTORS[name][24]  # from the whole list
    assert small.original_max_position_embeddings == config.original_max_position_embeddings


def test_minimax_m2_and_gpt2() -> None:
    minimax, gpt2 = smallest("minimax_m2"), smallest("gpt2")
    assert (minimax.num_local_experts, minimax.num_experts_per_tok) == (8, 2)
    assert (minimax.num_attention_heads, minimax.num_key_value_heads) == (8, 2)
    assert gpt2.n_embd == gpt2.n_head * 16 and gpt2.n_layer == 4
    assert gpt2.bos_token_id == gpt2.eos_token_id < gpt2.vocab_size


def test_nested_text_config_is_shrunk_too() -> None:
    small = smallest("qwen3_5_moe")
    text = small.get_text_config()
    assert text is not small and text.num_hidden_layers == 4 and text.num_experts == 8
    assert (text.linear_num_value_heads, text.linear_num_key_heads) == (8, 4)
    check(small)


def test_encoders_become_decoders() -> None:
    assert smallest("bert").is_decoder
