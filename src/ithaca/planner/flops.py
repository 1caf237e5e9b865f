"""How much arithmetic a step is, with attention counted, and what share of the hardware's peak that makes (MFU).

Model FLOPs utilisation (PaLM, appendix B) counts the work that the model asks for, and not the work that a technique adds:
recomputing a layer in backward costs time and earns nothing. A multiplication and an addition are two operations.

    weights     forward 2 per weight and token; backward twice that (gradients of inputs and of weights). Counted are the weights
                that a token is multiplied with: projections, MLP, router, head, and of the experts those it is sent to. Looking
                up an embedding is no arithmetic; a head that shares the embedding's weights is.
    attention   forward 4·D per head and visible pair (scores and weighted sum, 2·D each); backward twice that. A causal document
                of L tokens has L(L+1)/2 visible pairs, with a sliding window fewer; packed documents do not see each other.

At a million tokens attention is most of the work: leaving it out, as 6·N per token does, would understate MFU by a factor of
ten and more. Whole numbers throughout: a step of 10M tokens is beyond 2⁶³ operations.

Norms, rotary embeddings, softmax and the optimizer are not counted, as is usual. Of a model without arithmetic of its own here, the
weights are those of its parts (built without numbers), and windows and head sizes those that its config names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..engine.model.families import FAMILIES, Family


def model_flops(
    config: Any, lengths: Iterable[int], *, adapters: int | None = None, places: Iterable[int] | None = None
) -> int:
    """Operations of forward and backward over documents of these lengths: those of all rows of a step, on all ranks.

    config: the model's Hugging Face config. places: in trees, how many tokens are before each document on the way from its root,
    which it sees. adapters: with LoRA, how many adapter weights are trained; the base is frozen then,
    and its weights need no gradient. None: all weights are trained.
    """
    lengths = [int(length) for length in lengths]  # int: numpy's would overflow without a word
    sizes = Counter(zip(lengths, [0] * len(lengths) if places is None else places, strict=True))
    tokens = sum(lengths)
    weights = matmul_weights(config)
    per_token = 6 * weights if adapters is None else 4 * weights + 6 * adapters
    pairs = 0
    for window, layers in Counter(layer_windows(config)).items():
        for (length, place), count in sizes.items():
            pairs += layers * count * (visible_pairs(place + length, window) - visible_pairs(place, window))
    return per_token * tokens + 3 * 2 * sum(head_sizes(config)) * config.num_attention_heads * pairs


def mfu(flops: int, seconds: float, devices: int, peak: float | None) -> float | None:
    """The share of the peak of all devices that `flops` in `seconds` make; None where the peak is not known."""
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)


def visible_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of one causal document. window: tokens a query looks back, itself included, as Hugging Face counts."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer; None where a layer sees everything."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    family = _family(config)
    where = (
        "none" if family is None and not getattr(config, "layer_types", None) else family.window if family else "layer"
    )
    if where == "none":
        return [None] * layers
    if where == "config":
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def head_sizes(config: Any) -> tuple[int, int]:
    """Of queries and keys, and of values: they differ where both are made from something smaller (MLA)."""
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if _family(config) is None and all(parts):
        return parts[0] + parts[1], parts[2]  # pyright: ignore[reportOptionalOperand, reportReturnType]
    return head_size(config), head_size(config)


def matmul_weights(config: Any) -> int:
    """Weights that every token is multiplied with: of the experts only those a token is sent to; biases and norms not."""
    if _family(config) is None:
        return _weights_of_parts(json.dumps(config.to_dict(), sort_keys=True, default=str), config.model_type)
    hidden, size = config.hidden_size, head_size(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size  # q and o, k and v
    mlps = sum(_mlp_weights(config, layer) for layer in range(config.num_hidden_layers))
    return config.num_hidden_layers * attention + mlps + hidden * config.vocab_size


def _mlp_weights(config: Any, layer: int) -> int:
    hidden, family = config.hidden_size, _family(config)
    linears = hidden * (3 if family is None else len(family.mlp))  # gate, up, down
    if family is None or not family.experts or not _is_sparse(config, layer):
        return linears * config.intermediate_size
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    gates = hidden * (experts + bool(shared))  # the router's, and that of a shared expert
    return linears * (width * config.num_experts_per_tok + shared) + gates


def _is_sparse(config: Any, layer: int) -> bool:
    """Whether a layer of a family with experts has them: Qwen3-MoE may keep some layers dense."""
    dense = getattr(config, "mlp_only_layers", None) or []
    return layer not in dense and (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0


@lru_cache(maxsize=8)
def _weights_of_parts(settings: str, model_type: str) -> int:
    """Matrices of the model, built without numbers; of stacked experts as many as a token is sent to."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type].from_dict(json.loads(settings))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 1
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    skipped = {id(embedding.weight)} - ({id(head.weight)} if head is not None else set())
    whole = 0
    for parameter in model.parameters():
        if id(parameter) in skipped:
            continue
        if parameter.dim() == 2:
            whole += parameter.numel()
        elif parameter.dim() == 3:
            whole += parameter.numel() // parameter.shape[0] * min(chosen, parameter.shape[0])
    return whole


def _family(config: Any) -> Family | None:
    return FAMILIES.get(getattr(config, "model_type", ""))
