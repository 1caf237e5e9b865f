"""The config of a model folder, read as data.

A config.json comes with a model from somewhere, and transformers takes more from it than shapes: `auto_map` names Python files of
the folder, and `attn_implementation` may name a kernel on the Hub, which is downloaded and run while the model is built. The first
needs `trust_remote_code`; the second is dropped here, as attention is ours. Nothing is downloaded here.

It is also where sizes come from: a thousand million layers would be built, if only on the meta device, until memory is gone. So
every size has a limit, far above any model there is, and the product of them too, before anything is made of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.files import read_json
from ...base.versions import require_floors
from .families import FAMILIES

MOST_PARAMETERS = 10**14
_SIZES = {  # the most of each; the least is 1
    "num_hidden_layers": 2048,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "decoder_sparse_step": 2048,
    "max_position_embeddings": 1 << 40,
    "original_max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
    "sliding_window_pattern": 2048,
    "_sliding_window_pattern": 2048,
    "num_labels": 1 << 20,  # transformers makes a table of so many names
}
_MAY_BE_0 = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}  # a dense model
_POSITIVE = (
    "rms_norm_eps", "initializer_range", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
    "rope_theta", "rope_local_base_freq", "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip
_NOT_NEGATIVE = ("attention_dropout", "router_aux_loss_coef", "router_jitter_noise", "mscale", "mscale_all_dim")
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "output_router_logits",
    "use_cache", "use_bidirectional_attention", "truncate",
)  # fmt: skip
_WORDS = ("model_type", "rope_type", "type", "dtype", "torch_dtype")
_ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
_LAYERS = ("full_attention", "sliding_attention")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE = ("rope_parameters", "rope_scaling")
_ROTARY = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
)  # transformers' ROPE_INIT_FUNCTIONS
_LARGEST = 1e30


def read_config(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face config of a local folder."""
    from transformers import AutoConfig

    require_floors("transformers")
    path = Path(folder) / "config.json"
    _check_kind(path, read_settings(path), trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError):
        raise
    except Exception as error:  # transformers raises whatever its parts raise
        raise ValueError(f"{path} is refused by transformers: {_first_line(error)}") from None
    return harmless(config)


def _check_kind(path: Path, settings: Mapping[str, Any], trust_remote_code: bool) -> None:
    """ValueError where transformers has no decoder for it, in fewer words than its own."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, code = settings.get("model_type"), settings.get("auto_map")
    if kind in CONFIG_MAPPING and kind not in CONFIG_MAPPING_NAMES:
        return  # its owner has registered it
    if kind not in CONFIG_MAPPING_NAMES and code and not trust_remote_code:
        raise ValueError(
            f"{path}: model_type {_shown(kind)} comes with Python code of its own (auto_map), which is not run here, as only "
            "classes of transformers can be proven exact; take a checkpoint that transformers has a class for, if need be a newer "
            "transformers (ithaca docs families)"
        )
    if code and trust_remote_code:
        return  # what that code makes is looked at when it is there
    if kind not in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} knows no model_type {_shown(kind)}; if the model is newer than that, "
            "pip install -U transformers, else take the model's own config.json (ithaca docs families)"
        )
    if settings.get("is_encoder_decoder"):
        raise ValueError(
            f"{path}: a {kind} model with an encoder (is_encoder_decoder), and only decoders can be trained here; take a model "
            "that predicts the next token of one text (ithaca docs families)"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{path}: a {kind} model is no decoder that transformers can build (AutoModelForCausalLM); take one that predicts the "
            "next token of a text (ithaca docs families)"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """What a config.json says, with sizes that can be believed; ValueError says what cannot. Imports nothing heavy."""
    try:
        settings = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name the folder of a local model") from None
    check_settings(settings, str(path))
    return settings


def check_settings(settings: Any, where: str) -> None:
    """ValueError with everything in a model's config that no model has. where: the file, for messages."""
    if not isinstance(settings, dict):
        raise ValueError(f"{where} is not a model's config: it holds a {type(settings).__name__}")
    problems = list(_problems(settings))
    if problems:
        more = f"; {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{where}: {'; '.join(problems[:5])}{more}. Take the model's own config.json")


def harmless(config: Any) -> Any:
    """The same config, without what it says about kernels; transformers then takes its own defaults."""
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def _problems(settings: Mapping[str, Any]) -> Iterator[str]:
    known = settings.get("model_type") in FAMILIES if isinstance(settings.get("model_type"), str) else False
    for name, value in settings.items():
        if name in _ROPE:
            yield from _rope_problems(name, value)
        elif isinstance(value, dict) and name.endswith("_config"):  # a model inside a model
            yield from (f"{name}.{problem}" for problem in _problems(value))
        elif name == "sliding_window" and value == 0 and settings.get("use_sliding_window") is False:
            continue  # as Qwen2-MoE's class writes it where there is none
        elif known or isinstance(value, (int, float)):  # what other families mean by a list is theirs to say
            yield from _field_problems(name, value)
    if known:
        yield from _together(settings)


def _field_problems(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if name in _SIZES:
        least, most = 0 if name in _MAY_BE_0 else 1, _SIZES[name]
        if type(value) is not int or not least <= value <= most:
            yield f"{name}={_shown(value)} must be a whole number from {least} to {most:,}"
    elif name in _POSITIVE or name in _NOT_NEGATIVE:
        good = _number(value) and (value > 0 or (value == 0 and name in _NOT_NEGATIVE)) and value < _LARGEST
        if not good:
            yield f"{name}={_shown(value)} must be a number {'above' if name in _POSITIVE else 'of at least'} 0"
    elif name in _FLAGS:
        if not isinstance(value, bool):
            yield f"{name}={_shown(value)} must be true or false"
    elif name in _WORDS:
        if not isinstance(value, str):
            yield f"{name}={_shown(value)} must be a text"
    elif name in ("hidden_act", "hidden_activation"):
        if value not in _ACTIVATIONS:
            yield f"{name}={_shown(value)} must be one of {', '.join(_ACTIVATIONS)}"
    elif name in _TOKENS:
        for token in value if isinstance(value, list) else [value]:
            if type(token) is not int or not -1 <= token <= _SIZES["vocab_size"]:
                yield f"{name}={_shown(value)} must be a token id"
                return
    elif isinstance(value, (int, float)) and not -_LARGEST < value < _LARGEST:
        yield f"{name}={_shown(value)} is too large a number"


def _rope_problems(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{name}={_shown(value)} must be an object"
        return
    for key, entry in value.items():
        if isinstance(entry, dict):  # a table for each kind of layer
            yield from _rope_problems(f"{name}.{key}", entry)
        elif key in ("short_factor", "long_factor"):
            most = _SIZES["head_dim"] // 2
            if not isinstance(entry, list) or len(entry) > most or not all(_number(one) and one > 0 for one in entry):
                yield f"{name}.{key}={_shown(entry)} must be a list of at most {most:,} numbers above 0"
        else:
            yield from (f"{name}.{problem}" for problem in _field_problems(key, entry))


def _together(settings: Mapping[str, Any]) -> Iterator[str]:
    """What fields of a family that is known say about each other, where each by itself is right."""
    sizes = {name: settings[name] for name in _SIZES if type(settings.get(name)) is int}
    layers, kinds = sizes.get("num_hidden_layers"), settings.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in _LAYERS for kind in kinds)):
        yield f"layer_types={_shown(kinds)} must be a list of {' and '.join(_LAYERS)}"
    elif kinds is not None and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries, and num_hidden_layers is {_shown(layers)}"
    for name in _ROPE:
        given = settings.get(name)
        tables = [given, *given.values()] if isinstance(given, dict) else []
        for table in (table for table in tables if isinstance(table, dict)):
            rotary = table.get("rope_type", table.get("type"))
            if isinstance(rotary, str) and rotary not in _ROTARY:
                yield f"{name}: rope_type={_shown(rotary)} must be one of {', '.join(_ROTARY)}"
    dense = settings.get("mlp_only_layers")
    if dense is not None and not (
        isinstance(dense, list) and all(type(layer) is int and layer >= 0 for layer in dense)
    ):
        yield f"mlp_only_layers={_shown(dense)} must be a list of layers"
    hidden, heads, groups = (sizes.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads and groups and heads > 0 and groups > 0 and heads % groups:
        yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}"
    if hidden and heads and heads > 0 and settings.get("head_dim") is None and hidden % heads:
        yield f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no head_dim"
    experts = max(sizes.get("num_experts", 0), sizes.get("num_local_experts", 0))
    if 0 < experts < sizes.get("num_experts_per_tok", 0):
        yield f"num_experts_per_tok={sizes['num_experts_per_tok']} is more than the {experts} experts there are"
    if hidden and heads and layers and all(size > 0 for size in (hidden, heads, layers)):
        wide = max(sizes.get("intermediate_size", 0), sizes.get("moe_intermediate_size", 0) * max(experts, 1))
        if experts and "moe_intermediate_size" not in sizes:
            wide *= experts
        attention = 4 * heads * sizes.get("head_dim", hidden // heads)
        count = hidden * (layers * (attention + 3 * wide) + 2 * sizes.get("vocab_size", 0))
        if count > MOST_PARAMETERS:
            yield f"its sizes make {count:.1e} parameters; no model has more than {MOST_PARAMETERS:.0e}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
