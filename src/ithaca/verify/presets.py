"""Small models with the quirks of the big ones, and a way to shrink a big one to that size.

Exactness does not depend on width, so a proof may use a narrow model; it does depend on heads, KV heads, windows, norms, biases,
rotary scaling and experts, so those stay. Weights are drawn anew at a useful scale: Hugging Face's initialisation makes
attention nearly uniform and norms all ones, which hides mistakes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..base.hub import local
from ..config.schema import LATENT
from ..engine.model.config import read_config
from ..engine.model.families import FAMILIES, config_violations
from ..engine.model.presets import NO_SPECIAL, PRESETS, TINY, find_preset, preset_config
from ..engine.model.shrink import shrink_config
from ..engine.model.weights import randomize
from ..stack import require


def config_of(what: str, full: bool, **changes: Any) -> Any:
    """Of a preset, a folder or a model that was fetched; narrowed, unless it is tiny already or the whole model is asked for."""
    folder = local(what)
    if not folder.is_dir():
        config = preset_config(what, **changes)
        return config if full or find_preset(what) in TINY else _narrowed(config)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; pass a preset ({', '.join(PRESETS)}) or a model folder")
    config = read_config(folder)
    if getattr(config, "quantization_config", None):  # which a shrunk one would not have
        require(config_violations(config), f"{folder} cannot be verified")
    if full:
        return config
    return _narrowed(config)


def _narrowed(config: Any) -> Any:
    return shrink(config) if config.model_type in FAMILIES else shrink_config(config)


def shrink(config: Any) -> Any:
    """The same family with the same heads, windows, rotary type and norms, but narrow and two layers deep."""
    heads = config.num_attention_heads
    changes: dict[str, Any] = {**NO_SPECIAL, "vocab_size": 257, "intermediate_size": 96, "dtype": "float32"}
    changes["hidden_size"] = heads * 8
    if getattr(config, "head_dim", None):
        # a head size that is not hidden_size / heads is a quirk to keep
        changes["head_dim"] = 8 if config.head_dim * heads == config.hidden_size else 16
    by_layer = {name: list(said) for name in ("layer_types", "no_rope_layers") if (said := getattr(config, name, None))}
    if by_layer:
        kinds = list(zip(*by_layer.values(), strict=True))
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        kept = sorted(first + [i for i in range(len(kinds)) if i not in first][: max(0, 2 - len(first))])
        changes |= {name: [said[i] for i in kept] for name, said in by_layer.items()}
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
    if getattr(config, "shared_expert_intermediate_size", None):
        changes["shared_expert_intermediate_size"] = 48
    if getattr(config, "mlp_only_layers", None):
        changes["mlp_only_layers"] = []
    fields = config.to_dict()
    if fields.get("rope_parameters") and "short_factor" in fields["rope_parameters"]:
        size = int(changes.get("head_dim", 8) * fields["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
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


def add_lora(model: nn.Module, seed: int) -> nn.Module:
    """Adapters on every linear of the layers, with B away from zero so that every gradient is alive."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs the package peft; install it with: pip install 'ithaca[peft]'") from None
    names = [
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "c_fc",
        "c_proj",
        *LATENT,
    ]
    linears = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    mixers = sorted(name for name in linears if name.startswith("in_proj"))
    names += [*mixers, "out_proj"] if mixers else []
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
