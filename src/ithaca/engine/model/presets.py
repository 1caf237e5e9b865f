"""Models by name: their configs, without weights. One table for `plan`, `train` (with random weights) and `verify` (narrowed).

The real ones are what people train. The tiny ones have the quirks of the big ones and are a few thousand weights: exactness does
not depend on width, so a proof may use a narrow model; it does depend on heads, KV heads, windows, norms, biases, rotary
scaling and experts.
"""

from __future__ import annotations

from typing import Any


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


NO_SPECIAL = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)  # or ids beyond a small vocabulary
_LLAMA3 = dict(
    model_type="llama",
    vocab_size=128256,
    rope_parameters=_rope(500000.0),
    max_position_embeddings=131072,
)
_QWEN3 = dict(model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40960)
_REAL: dict[str, dict[str, Any]] = {
    "llama3_8b": dict(
        _LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    ),
    "llama31_8b": dict(
        _LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama31_70b": dict(
        _LLAMA3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "llama32_1b": dict(
        _LLAMA3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "llama32_3b": dict(
        _LLAMA3, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "qwen3_4b": dict(
        _QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3_8b": dict(_QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
    "qwen3_14b": dict(_QWEN3, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40),
    "qwen3_32b": dict(_QWEN3, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
    "mistral_7b": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32768, sliding_window=None, max_position_embeddings=32768,
    ),
    "qwen3_30b_a3b": dict(
        _QWEN3, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        rope_parameters=_rope(1000000.0),
    ),
    # Values are those of the published config.json; token ids are left out, which nothing here depends on.
    "gpt_oss_20b": dict(  # in bf16: the published weights of its experts are mxfp4
        NO_SPECIAL, model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(
            150000.0, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096,
        ),
    ),
    "glm4_9b": dict(  # GLM-4-9B-0414; sizes as transformers has them for Glm4Config, which names this model
        NO_SPECIAL, model_type="glm4", hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, vocab_size=151552, max_position_embeddings=32768, rms_norm_eps=1e-5,
        attention_bias=True, partial_rotary_factor=0.5, rope_parameters=_rope(10000.0, partial_rotary_factor=0.5),
    ),
    "phi4": dict(
        NO_SPECIAL, model_type="phi3", hidden_size=5120, intermediate_size=17920, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=10, vocab_size=100352, max_position_embeddings=16384, original_max_position_embeddings=16384,
        rms_norm_eps=1e-5, rope_parameters=_rope(250000.0, partial_rotary_factor=1.0),
    ),
    "granite33_8b": dict(
        NO_SPECIAL, model_type="granite", hidden_size=4096, intermediate_size=12800, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=49159, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
        rope_parameters=_rope(10000000.0),
    ),
    "smollm3_3b": dict(  # of four layers the fourth turns nothing
        NO_SPECIAL, model_type="smollm3", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=4, vocab_size=128256, max_position_embeddings=65536, rms_norm_eps=1e-6,
        tie_word_embeddings=True, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, rope_parameters=_rope(5000000.0),
    ),
    "olmo3_7b": dict(  # layers with a window are not stretched
        NO_SPECIAL, model_type="olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100278, max_position_embeddings=65536, rms_norm_eps=1e-6, sliding_window=4096,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_parameters={
            "sliding_attention": _rope(500000.0),
            "full_attention": _rope(
                500000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.2079441541679836,
                original_max_position_embeddings=8192,
            ),
        },
    ),
    "qwen3_next_80b_a3b": dict(  # of four layers three are gated delta nets
        NO_SPECIAL, model_type="qwen3_next", hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, vocab_size=151936, max_position_embeddings=262144,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, rope_parameters=_rope(10000000.0, partial_rotary_factor=0.25),
    ),
    "qwen35_9b": dict(  # sizes as transformers has them for Qwen3_5TextConfig, which names this model
        NO_SPECIAL, model_type="qwen3_5_text", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, vocab_size=248320, max_position_embeddings=262144,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, rope_parameters=_rope(10000000.0, partial_rotary_factor=0.25),
    ),
}  # fmt: skip

_SMALL = dict(
    NO_SPECIAL, vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=4096,
)  # fmt: skip
_LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=256,
)  # fmt: skip
_ROUTER = dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.05)
TINY: dict[str, dict[str, Any]] = {
    "tiny_llama2": dict(_SMALL, model_type="llama", num_key_value_heads=8),
    "tiny_llama3": dict(_SMALL, model_type="llama", rope_parameters=_LLAMA3_ROPE),
    "tiny_mistral": dict(_SMALL, model_type="mistral", head_dim=16, sliding_window=96),
    "tiny_qwen2": dict(_SMALL, model_type="qwen2", hidden_size=112, num_attention_heads=14, num_key_value_heads=2),
    "tiny_qwen2_28": dict(_SMALL, model_type="qwen2", hidden_size=224, num_attention_heads=28),
    "tiny_qwen3": dict(_SMALL, model_type="qwen3", head_dim=24, tie_word_embeddings=True),
    "tiny_qwen3_moe": dict(
        _SMALL, **_ROUTER, model_type="qwen3_moe", head_dim=16, num_experts=6, moe_intermediate_size=32,
        num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True,
    ),
    "tiny_mixtral": dict(_SMALL, **_ROUTER, model_type="mixtral", num_local_experts=4, sliding_window=160),
    "tiny_gemma3": dict(
        _SMALL, model_type="gemma3_text", head_dim=16, sliding_window=80, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=20.0,
    ),
    "tiny_olmo2": dict(_SMALL, model_type="olmo2"),
    "tiny_olmo3": dict(  # layers with a window are not stretched
        _SMALL, model_type="olmo3", sliding_window=72, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": _rope(500000.0),
            "full_attention": _rope(
                500000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.2,
                original_max_position_embeddings=512,
            ),
        },
    ),
    # The second layer turns nothing, the third has a window as well. Without rotation a bias of keys moves nothing: it is left out.
    "tiny_smollm3": dict(
        _SMALL, model_type="smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 0], sliding_window=88, use_sliding_window=True,
        layer_types=["full_attention", "full_attention", "sliding_attention"], mlp_bias=True,
    ),
    "tiny_granite": dict(
        _SMALL, model_type="granite", attention_multiplier=0.25, embedding_multiplier=12.0, logits_scaling=3.0,
        residual_multiplier=0.22, tie_word_embeddings=True,
    ),
    "tiny_ministral": dict(
        _SMALL, model_type="ministral", head_dim=16, sliding_window=64, layer_types=["full_attention", "sliding_attention"],
    ),
    "tiny_ministral3": dict(  # queries of later tokens are scaled
        _SMALL, model_type="ministral3", head_dim=16, rope_parameters=_rope(
            10000.0, "yarn", factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=64, llama_4_scaling_beta=0.3,
        ),
    ),
    "tiny_arcee": dict(_SMALL, model_type="arcee", mlp_bias=True),
    "tiny_seed_oss": dict(
        _SMALL, model_type="seed_oss", head_dim=16, attention_bias=True, attention_out_bias=True, attention_dropout=0.0,
        residual_dropout=0.0,
    ),
    "tiny_gemma": dict(_SMALL, model_type="gemma", head_dim=16, num_key_value_heads=1),
    "tiny_olmoe": dict(_SMALL, **_ROUTER, model_type="olmoe", num_experts=6),
    "tiny_qwen2_moe": dict(
        _SMALL, **_ROUTER, model_type="qwen2_moe", num_experts=6, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        num_hidden_layers=3, mlp_only_layers=[1], use_sliding_window=True, sliding_window=72,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "tiny_starcoder2": dict(_SMALL, model_type="starcoder2", sliding_window=88),
    "tiny_phi3": dict(  # a whole row is beyond the length at which the tables change, a packed document is not
        _SMALL, model_type="phi3", sliding_window=96, original_max_position_embeddings=128,
        rope_parameters=_rope(
            10000.0, "longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.3], long_factor=[1.0, 2.0, 4.0],
        ),
    ),
    "tiny_glm": dict(_SMALL, model_type="glm", head_dim=12, attention_bias=True),
    "tiny_gpt_oss": dict(
        _SMALL, **_ROUTER, model_type="gpt_oss", head_dim=16, num_local_experts=6, sliding_window=80,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_rope(
            10000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=128,
        ),
    ),
    "tiny_glm4": dict(_SMALL, model_type="glm4", head_dim=16, num_key_value_heads=2, attention_bias=True),
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    **_REAL,
    **TINY,
    # learns the recall task in two minutes on two CPU cores: wide initial weights, so that attention differs from the mean at
    # once, and slow rotations, so that content meets over thousands of tokens
    "tiny_llama": dict(
        model_type="llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.1,
        rope_parameters=_rope(1000000.0), **NO_SPECIAL,
    ),
}  # fmt: skip


PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": "llama3_8b", "meta-llama/Llama-3.1-8B": "llama31_8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama31_8b", "meta-llama/Llama-3.1-70B": "llama31_70b",
    "meta-llama/Llama-3.2-1B": "llama32_1b", "meta-llama/Llama-3.2-3B": "llama32_3b", "Qwen/Qwen3-4B": "qwen3_4b",
    "Qwen/Qwen3-8B": "qwen3_8b", "Qwen/Qwen3-14B": "qwen3_14b", "Qwen/Qwen3-32B": "qwen3_32b",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
}  # fmt: skip
"""Names on the Hub whose sizes a preset has: a run that names one is planned without a network, and without a licence."""


def find_preset(name: str) -> str | None:
    """The preset that is meant, for a proof: a tiny one may be called by its family alone (llama3, gemma3)."""
    return name if name in PRESETS else f"tiny_{name}" if f"tiny_{name}" in PRESETS else None


def preset_config(name: str, **changes: Any) -> Any:
    """As a config of Hugging Face."""
    from transformers import AutoConfig

    preset = find_preset(name)
    if preset is None:
        raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}, or pass a model folder")
    settings = {**PRESETS[preset], **changes}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)
