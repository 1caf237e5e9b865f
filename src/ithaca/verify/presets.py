"""Small models with the quirks of the big ones, and a way to shrink a big one to that size.

Exactness does not depend on width, so a proof may use a narrow model; it does depend on heads, KV heads, windows, norms, biases,
rotary scaling and experts, so those stay. Weights are drawn anew at a useful scale: Hugging Face's initialisation makes
attention nearly uniform and norms all ones, which hides mistakes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.config import read_config
from ..model.families import FAMILIES

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_SMALL = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=4096)
_NO_SPECIAL = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)  # ids beyond the small vocabulary
_HEADS = dict(num_attention_heads=8, num_key_value_heads=4)

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "llama3": ("llama", {**_SMALL, **_HEADS, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", {**_SMALL, **_HEADS, "head_dim": 16, "sliding_window": 96}),
    "qwen2": ("qwen2", {**_SMALL, "hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "qwen2_28": ("qwen2", {**_SMALL, "hidden_size": 224, "num_attention_heads": 28, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {**_SMALL, **_HEADS, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_SMALL,
            **_HEADS,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            **_SMALL,
            **_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
            "sliding_window": 160,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_SMALL,
            **_HEADS,
            "head_dim": 16,
            "sliding_window": 80,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 20.0,
        },
    ),
    "olmo2": ("olmo2", {**_SMALL, **_HEADS}),
}


def preset_config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}, or pass a model folder")
    kind, settings = PRESETS[name]
    return AutoConfig.for_model(kind, **{**settings, **_NO_SPECIAL, **changes})


def folder_config(folder: Path, full: bool) -> Any:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; pass a preset ({', '.join(PRESETS)}) or a model folder")
    config = read_config(folder)
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{folder} holds a {config.model_type!r} model, which is not supported; supported are {known}")
    return config if full else shrink(config)


def shrink(config: Any) -> Any:
    """The same family with the same heads, windows, rotary type and norms, but narrow and two layers deep."""
    heads = config.num_attention_heads
    changes: dict[str, Any] = {**_NO_SPECIAL, "vocab_size": 257, "intermediate_size": 96, "dtype": "float32"}
    changes["hidden_size"] = heads * 8
    if getattr(config, "head_dim", None):
        # a head size that is not hidden_size / heads is a quirk to keep
        changes["head_dim"] = 8 if config.head_dim * heads == config.hidden_size else 16
    kinds = getattr(config, "layer_types", None)
    if kinds:
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        kept = sorted(first + [i for i in range(len(kinds)) if i not in first][: max(0, 2 - len(first))])
        changes["layer_types"] = [kinds[i] for i in kept]
        changes["num_hidden_layers"] = len(kept)
    else:
        changes["num_hidden_layers"] = min(2, config.num_hidden_layers)
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = 96
    for name in ("num_experts", "num_local_experts"):
        if getattr(config, name, None):
            changes[name] = min(getattr(config, name), 8)
            changes["num_experts_per_tok"] = min(config.num_experts_per_tok, 2)
    if getattr(config, "moe_intermediate_size", None):
        changes["moe_intermediate_size"] = 32
    if getattr(config, "mlp_only_layers", None):
        changes["mlp_only_layers"] = []
    fields = config.to_dict()
    if fields.get("rope_parameters") and "short_factor" in fields["rope_parameters"]:
        size = changes.get("head_dim", 8) // 2
        rope = dict(fields["rope_parameters"])
        rope["short_factor"], rope["long_factor"] = rope["short_factor"][:size], rope["long_factor"][:size]
        changes["rope_parameters"] = rope
    return type(config).from_dict({**fields, **changes})


def build(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with random weights of a useful scale; the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    randomize(model, seed)
    return model


def randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                value = 0.2 * noise if "bias" in name else parameter.cpu() + 0.2 * noise
            else:
                value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value)


def add_lora(model: nn.Module, seed: int) -> nn.Module:
    """Adapters on every linear of the layers, with B away from zero so that every gradient is alive."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs the package peft; install it with: pip install 'ithaca[peft]'") from None
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    linears = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=[n for n in names if n in linears])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about patterns for experts that a model does not have
        adapted = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return adapted
