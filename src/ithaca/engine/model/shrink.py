"""A config of the same class, narrow and shallow, for proofs on a CPU.

Whether an engine computes what a model's own code computes does not depend on width but on the paths that the code takes: kinds of
layers, grouped heads, windows, partial rotary, experts, biases, scales. So sizes shrink and every other setting stays as it is.

Sizes are known by the names of their fields, which repeat across models, and shrink together: head sizes that were equal stay
equal, different ones stay different, heads and KV heads keep their ratio, a width of twice the hidden size stays twice. Layers are
*picked*: the first, the last and some of each kind, where a kind is what all settings say of one layer (attention type, dense or
experts, rotary or not, shared keys). Lists, indices and counts of leading layers follow the picked ones. Windows and chunks
become so small that 96 tokens reach past them.

Limits: a model gets at most 8 query heads, so groups of more than 4 heads become groups of 4 (3 where they were odd). A period
("every n-th layer") that no list spells out counts the picked layers anew: of its crossings with other kinds some may be missing.
Dropout stays. Special tokens outside of the small vocabulary move to its end: draw text from ids below `TEXT`.

`python -m ithaca.engine.model.shrink [TYPE ...]` builds and runs the smallest model of every decoder type of transformers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

VOCABULARY = 257
TEXT = 224
WINDOW = 24

# Sizes that relate to each other, by the whole name of the field.
HIDDEN = ("hidden_size", "d_model", "n_embd", "emb_dim", "embed_dim")
QUERY = re.compile(r"(.*?)(num_attention_heads|n_heads?|num_heads|attention_heads|num_value_heads)(_per_layer)?")
KEY = re.compile(r"(.*?)(num_(global_)?key_value_heads|(num_)?kv_heads|kv_n_heads|num_key_heads|num_query_groups)")
HEAD = re.compile(r"(?!mamba)(.*_)?head_(dim|size)|d_head|dim_head|d_kv|kv_channels|(q|kv|o)_lora_rank")
INNER = re.compile(
    r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|(d|n)_inner|d_?ff|dim_ff|mlp_dim|feed_forward_size"
)
WIDTH = re.compile(r".*(hidden_size(_global)?|hidden_dim|embed_dim|embedding_size|embedding_dim|proj_dim)|lru_width")
TOKEN = re.compile(r".*_token_(ids?|index)|(begin_)?suppress_tokens")

MAMBA = [("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("n_mamba_heads", "mamba_headdim")]
EXPERTS = r"(moe_)?num_(local_)?experts|n_routed_experts"

# Sizes that stand alone, and the most that is left of them.
CAPS = [
    (r"hidden_size_per_layer_input|router_hidden_size|(?!.*lora).*_rank|d_rel|hc_lowrank|prompt_mid_dim", 16),
    (r"(mamba_d_|ssm_)?state(_size)?|.*_channels?", 16),
    (r"(.*_)?sliding_window(_size)?|(.*_)?window_size|attention_chunk_size|(mamba_)?chunk_size", WINDOW),
    (r".*attn_chunk_length|index_topk|indexer_budget|floor_scale|rel_extent|log_scaling_n_floor", WINDOW),
    (r"local_attention", 2 * WINDOW),  # both sides
    (r"(.*_)?block_size|indexer_compress_ratio", 8),
    (r"index_topk_blocks", 4),
    (EXPERTS, 8),
    (r"zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k", 2),
    (r"(mamba_)?n_?groups", 2),
]

# Settings per layer.
DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|(num_)?(de|en)coder_layers|num_blocks|depth")
STACK = ("num_layers", "num_layers_per_stack")  # layers that run several times, or hold several attentions
INDICES = re.compile(r"(mlp_only|moe|cross_attention)_layers|.*_layer_(ids|indices|idxs)|full_attn_idxs")
LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
TRAILING = ("num_kv_shared_layers",)
PERIOD = re.compile(r"(.*)(period|interval|every_n_layers|_step|_freq|window_pattern)")
NOT_LAYERS = re.compile(r"mtp_.*|.*(multipliers|limit|factor|tokens?|_ids?)")  # lists whose length is not the depth

# Of the checkpoint or the call; some classes refuse them.
NOT_ARCHITECTURE = ("quantization_config", "_name_or_path", "output_attentions")


def shrink_config(config: Any, layers: int = 4) -> Any:
    """A config of the same class that builds a narrow, shallow model with the same code paths."""
    from transformers import PreTrainedConfig

    fields = narrow(config.to_dict())
    fields = shallow(fields, depth_of(config), layers)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            part = shrink_config(value, layers).to_dict()
            fields[name] = {n: v for n, v in part.items() if n not in NOT_ARCHITECTURE}
    fields["dtype"] = "float32"
    if "use_cache" in fields:
        fields["use_cache"] = False
    if config.model_type in EXCEPTIONS:
        EXCEPTIONS[config.model_type](fields)
    return type(config).from_dict({name: value for name, value in fields.items() if name not in NOT_ARCHITECTURE})


def smallest(model_type: str) -> Any:
    """shrink_config of the type's default config."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**deepcopy(OPEN.get(model_type, {})))  # configs change what they are given
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True  # BERT and its kin are encoders by default
    return shrink_config(config)


def narrow(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with small sizes."""
    heads = head_counts(fields)
    hidden = next((fields[name] for name in HIDDEN if fields.get(name)), 0)
    prefix, count = own_heads(fields)
    explicit = own_head_size(fields)
    size = explicit or (hidden // count if count else 0)
    head_size = head_sizes(fields, size)
    if hidden and count and size and "qk_nope_head_dim" not in fields:
        whole = heads[prefix][0][count] * head_size[size]
        new_hidden = min(hidden, related(hidden, count * size, whole) if explicit else whole)
    else:
        new_hidden = min(hidden, 64)
    inner = ranked((v for n, v in numbers(fields) if INNER.fullmatch(n)), range(40, 1024, 16))
    vocabulary = fields.get("vocab_size") or VOCABULARY
    new_vocabulary = vocabulary if vocabulary < 2 * VOCABULARY else VOCABULARY
    moved: dict[int, int] = {}

    def resized(name: str, value: int) -> int:
        if TOKEN.fullmatch(name):
            return value if value < new_vocabulary else moved.setdefault(value, new_vocabulary - 1 - len(moved))
        if value <= 0:
            return value
        if name in HIDDEN and value == hidden:
            return new_hidden
        if name == "rotary_dim":
            return value * head_size[size] // size
        if "vocab" in name:
            # some tables hold fewer rows than the vocabulary, some more; both are paths of their own
            return new_vocabulary if value == vocabulary else min(value, 240 if value < vocabulary else 264)
        for pattern, cap in CAPS:
            if re.fullmatch(pattern, name):
                return min(value, cap)
        if found := KEY.fullmatch(name):
            return heads[found[1]][1][value]
        if found := QUERY.fullmatch(name):
            return heads[found[1]][0][value]
        if name == "qk_head_dim" and "qk_nope_head_dim" in fields:
            return head_size[fields["qk_nope_head_dim"]] + head_size[fields["qk_rope_head_dim"]]
        if HEAD.fullmatch(name):
            return head_size[value]
        if INNER.fullmatch(name):
            return inner[value]
        if WIDTH.fullmatch(name) and hidden:
            return min(value, related(value, hidden, new_hidden))
        return value

    narrowed = {name: over_numbers(name, value, resized) for name, value in fields.items()}
    narrowed.update(expert_groups(fields, narrowed))
    narrowed.update(state_space(fields, narrowed, hidden, new_hidden))
    for name in ("rope_parameters", "rope_scaling"):
        if size and isinstance(fields.get(name), dict):
            narrowed[name] = rotary_lists(fields[name], head_size[size], fields.get("partial_rotary_factor") or 1.0)
    return narrowed


def numbers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Every positive integer, those of lists and of layers that differ from the rest included."""
    for name, value in fields.items():
        if name == "per_layer_config":
            for layer in (value or {}).values():
                yield from numbers(layer)
        elif isinstance(value, list):
            yield from ((name, v) for v in value if isinstance(v, int) and not isinstance(v, bool) and v > 0)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield name, value


def over_numbers(name: str, value: Any, change: Callable[[str, int], int]) -> Any:
    if name == "per_layer_config" and value:
        return {i: {n: over_numbers(n, v, change) for n, v in layer.items()} for i, layer in value.items()}
    if isinstance(value, list) and not INDICES.fullmatch(name):
        return [over_numbers(name, v, change) for v in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return change(name, value)
    return value


def ranked(values: Iterable[int], sizes: Iterable[int]) -> dict[int, int]:
    """Small sizes in the order of the old ones, so that equal stays equal and different stays different."""
    return {old: min(old, new) for old, new in zip(sorted(set(values)), sizes, strict=False)}


def related(value: int, base: int, new_base: int) -> int:
    """As large beside the new base as `value` was beside the old one: the exact ratio if it is simple."""
    for ratio in (1, 2, 3, 4):
        if value == base * ratio:
            return new_base * ratio
        if value * ratio == base and new_base % ratio == 0:
            return new_base // ratio
    return new_base * 3 // 2 if value > base else new_base * 3 // 4


def head_counts(fields: dict[str, Any]) -> dict[str, tuple[dict[int, int], dict[int, int]]]:
    """Per prefix of the names (none, swa_, linear_ ...): new numbers of query heads and of KV heads by old ones."""
    queries: dict[str, set[int]] = {}
    keys: dict[str, set[int]] = {}
    for name, value in numbers(fields):
        if found := KEY.fullmatch(name):
            keys.setdefault(found[1], set()).add(value)
        elif found := QUERY.fullmatch(name):
            queries.setdefault(found[1], set()).add(value)
    return {p: grouped(queries.get(p, set()), keys.get(p, set())) for p in {*queries, *keys}}


def grouped(queries: set[int], keys: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    most = max(queries | keys)
    if most <= 8:
        return {h: h for h in queries}, {k: k for k in keys}
    ratios = {h // k for h in queries for k in keys if 1 < k < h}
    if len(queries) > 1:
        # layers with different numbers of heads
        new = {h: max(2, 8 - 2 * i) for i, h in enumerate(sorted(queries, reverse=True))}
        return new, {k: new[k] if keys == queries else min(k, 2) for k in keys}
    if not ratios:
        return {h: 4 for h in queries}, {k: 1 if k == 1 else 4 for k in keys}
    heads = 6 if any(ratio % 2 for ratio in ratios) else 8
    shared = {k: heads // 2 if most // k == 2 else 2 for k in keys if 1 < k < most}
    if len(shared) > 1:
        shared[max(shared)] = heads // 2  # layers with different numbers of KV heads
    return {h: heads for h in queries}, {k: shared.get(k, 1 if k == 1 else heads) for k in keys}


def own_heads(fields: dict[str, Any]) -> tuple[str, int]:
    """The prefix of the name and the number of the attention's heads: of several numbers, that of the plainest name."""
    found = [(match[1], fields[name]) for name in fields if (match := QUERY.fullmatch(name))]
    return min(((prefix, n) for prefix, n in found if isinstance(n, int)), key=lambda f: len(f[0]), default=("", 0))


def own_head_size(fields: dict[str, Any]) -> int:
    """The size of a head, or of its rotated part in latent attention; 0 where the config does not say it."""
    names = ("head_dim", "attention_head_dim", "attention_head_size", "d_head", "dim_head", "d_kv", "kv_channels")
    if "qk_nope_head_dim" in fields:
        names = ("qk_rope_head_dim",)
    return next((fields[name] for name in names if fields.get(name)), 0)


def head_sizes(fields: dict[str, Any], own: int) -> dict[int, int]:
    """New head sizes by old ones; ranks of latent attention are of the same order, and among them."""
    values = [value for name, value in numbers(fields) if HEAD.fullmatch(name)] + [own] * bool(own)
    factors, sections = {1.0}, 1
    for rope in ropes(fields.get("rope_parameters")) + [fields]:
        factors.add(rope.get("partial_rotary_factor") or 1.0)
        sections = max(sections, len(rope.get("mrope_section") or ()))
    if own and fields.get("rotary_dim"):
        factors.add(fields["rotary_dim"] / own)

    def fits(size: int) -> bool:
        """Whether the rotated part is even, and wide enough for each of its sections."""
        return all(int(size * f) % 2 == 0 and int(size * f) >= 2 * sections for f in factors)

    least = 8 if "qk_nope_head_dim" in fields else 16
    return ranked(values, filter(fits, range(least, 1024, 8)))


def ropes(parameters: Any) -> list[dict[str, Any]]:
    """One for the model or one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    inner = [value for value in parameters.values() if isinstance(value, dict)]
    return inner or [parameters]


def rotary_lists(rope: dict[str, Any], head_size: int, factor: float) -> dict[str, Any]:
    """Factors and sections over the frequencies, cut to the frequencies that are left."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {n: rotary_lists(v, head_size, factor) if isinstance(v, dict) else v for n, v in rope.items()}
    rope = dict(rope)
    half = int(head_size * (rope.get("partial_rotary_factor") or factor)) // 2
    for name in ("short_factor", "long_factor"):
        if rope.get(name):
            # spread over the whole list: the first factors are often all 1
            rope[name] = [rope[name][i * len(rope[name]) // half] for i in range(half)]
    if rope.get("mrope_section"):
        count = len(rope["mrope_section"])
        rope["mrope_section"] = [half - (count - 1) * (half // count)] + [half // count] * (count - 1)
    return rope


def expert_groups(fields: dict[str, Any], narrowed: dict[str, Any]) -> dict[str, int]:
    """Groups of at least two experts, of which the same share is chosen."""
    name = next((n for n in ("n_group", "num_expert_group") if (fields.get(n) or 0) > 1), None)
    experts = next((v for n, v in narrowed.items() if v and re.fullmatch(EXPERTS, n)), 0)
    if name is None or not experts:
        return {}
    groups = max(g for g in range(1, 5) if experts % g == 0 and experts // g >= min(2, experts))
    share = -(-(fields.get("topk_group") or 1) * groups // fields[name])
    return {name: groups, "topk_group": min(share, max(1, groups - 1))}


def state_space(fields: dict[str, Any], narrowed: dict[str, Any], hidden: int, new_hidden: int) -> dict[str, int]:
    """Heads of Mamba-2 fill an inner width that follows from the hidden size, or is a field of its own."""
    for heads, size in MAMBA:
        if fields.get(heads) and fields.get(size) and hidden:
            expand = fields.get("mamba_expand") or fields.get("expand") or 2
            follows = fields[heads] * fields[size] == expand * hidden
            count = narrowed[heads] if int(expand * new_hidden) % narrowed[heads] == 0 else 4
            changes = {heads: count, size: int(expand * new_hidden) // count if follows else 8}
            return changes | ({"mamba_d_ssm": count * changes[size]} if "mamba_d_ssm" in fields else {})
    return {}


def depth_of(config: Any) -> int:
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int):
        return depth
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return len(kinds) if kinds else next((v for n, v in config.to_dict().items() if DEPTH.fullmatch(n) and v), 0)


def shallow(fields: dict[str, Any], depth: int, layers: int) -> dict[str, Any]:
    """The fields of a model of the picked layers."""
    lists = {name for name, value in fields.items() if per_layer(name, value, depth)}
    kept = pick([layer_kind(fields, lists, i, depth) for i in range(depth)], layers)
    return cut(fields, depth, kept, layers)


def cut(fields: dict[str, Any], depth: int, kept: list[int], layers: int | None = None) -> dict[str, Any]:
    """The fields of a model of some of its layers. layers: as long as a period may be; None: the first layers are kept, and periods
    are what they were."""
    lists = {name for name, value in fields.items() if per_layer(name, value, depth)}
    most = len(kept) if layers is None else layers
    cut = dict(fields)
    for name, value in fields.items():
        if name in lists:
            cut[name] = [value[i] for i in kept]
        elif INDICES.fullmatch(name) and value:
            cut[name] = [new for new, old in enumerate(kept) if old in value]
        elif name == "per_layer_config" and value:
            by_layer = {int(i): layer for i, layer in value.items()}
            cut[name] = {new: by_layer[old] for new, old in enumerate(kept) if old in by_layer}
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in LEADING:
            cut[name] = sum(i < value for i in kept)
        elif name in TRAILING:
            cut[name] = sum(i >= depth - value for i in kept)
        elif name == "moe_layer_end_index" and value >= 0:
            cut[name] = sum(i <= value for i in kept) - 1  # counts itself
        elif layers is not None and depth > layers and (found := PERIOD.fullmatch(name)):
            cut[name] = min(value, layers)
            offset = found[1] + "offset"
            if fields.get(offset):
                cut[offset] = min(fields[offset], cut[name] - 1)
        elif DEPTH.fullmatch(name):
            cut[name] = len(kept) if value == depth else min(value, most)
    for name in STACK:
        if (stack := fields.get(name)) and "num_hidden_layers" in fields and stack < depth:
            cut[name] = max(1, len(kept) * stack // depth)
            cut["num_hidden_layers"] = cut[name] * depth // stack
    return cut


def per_layer(name: str, value: Any, depth: int) -> bool:
    other = INDICES.fullmatch(name) or NOT_LAYERS.fullmatch(name)
    return isinstance(value, list) and len(value) == depth and not other


def layer_kind(fields: dict[str, Any], lists: set[str], i: int, depth: int) -> str:
    """All that the settings say of layer i."""
    kind: list[Any] = []
    for name, value in fields.items():
        if name in lists:
            if len({str(v) for v in value}) <= 4:  # more are sizes or scales, not kinds
                kind.append(value[i])
        elif INDICES.fullmatch(name) and value:
            kind.append(i in value)
        elif name == "max_window_layers" and "layer_types" in lists:
            continue  # the list spells it out
        elif name in LEADING and value:
            kind.append(i < value)
        elif name in TRAILING and value:
            kind.append(i >= depth - value)
        elif name == "per_layer_config" and value:
            kind.append(next((layer for j, layer in value.items() if int(j) == i), None))
    return json.dumps(kind, default=str)


def pick(kinds: list[str], layers: int) -> list[int]:
    """The first and the last layer and one of each kind, then in turns of each kind up to `layers`."""
    if len(kinds) <= layers:
        return list(range(len(kinds)))
    kept = {0, len(kinds) - 1}
    while True:
        rest = [i for i in range(len(kinds)) if i not in kept]
        having = [kinds[i] for i in kept]
        rarest = min(rest, key=lambda i: (having.count(kinds[i]), i), default=None)
        if rarest is None or (len(kept) >= layers and kinds[rarest] in having):
            return sorted(kept)
        kept.add(rarest)


def dbrx(fields: dict[str, Any]) -> None:
    # its parts repeat sizes of the whole
    fields["attn_config"]["kv_n_heads"] = fields["num_key_value_heads"]
    fields["ffn_config"]["hidden_size"] = fields["d_model"]


def blt(fields: dict[str, Any]) -> None:
    # the hidden size of one part is a multiple of another's
    whole = fields["global_config"]
    whole["hidden_size"] = fields["encoder_config"]["hidden_size"] * fields["cross_attn_k"]
    whole["head_dim"] = whole["hidden_size"] // whole["num_attention_heads"]


def deepseek_v4(fields: dict[str, Any]) -> None:
    # tokens per compressed key: 128 would be more than the sequence
    fields["compress_rates"] = {kind: min(rate, WINDOW) for kind, rate in fields["compress_rates"].items()}


def cohere_compass(fields: dict[str, Any]) -> None:
    # sections of the rotary that the config does not say are sizes in the code
    half = fields["head_dim"] // 2
    for rope in ropes(fields["rope_parameters"]):
        rope.setdefault("mrope_section", [half // 4, half // 4, half // 2])


def gpt_neo(fields: dict[str, Any]) -> None:
    # the pattern is stored twice
    fields["attention_types"] = [[fields["attention_layers"], 1]]


def minimax_m3(fields: dict[str, Any]) -> None:
    # the indexer has one head per KV head
    fields["index_n_heads"] = fields["num_key_value_heads"]


def reformer(fields: dict[str, Any]) -> None:
    # positions are a table of rows and columns whose product is the length of every sequence in training
    fields["axial_pos_shape"] = [8, 12]
    fields["axial_pos_embds_dim"] = [fields["hidden_size"] // 4, fields["hidden_size"] * 3 // 4]


EXCEPTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "blt": blt,
    "cohere_compass_text": cohere_compass,
    "dbrx": dbrx,
    "deepseek_v4": deepseek_v4,
    "gpt_neo": gpt_neo,
    "minimax_m3_vl_text": minimax_m3,
    "reformer": reformer,
}

# What some classes leave open and every checkpoint says.
SPARSE = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 128, "budget": 2048, "compress_ratio": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4 = {f"indexer_{name}": value for name, value in INDEXER.items()} | {
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
}
OPEN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 10,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {"d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000.0}},
    "deepseek_v2": {**SPARSE, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": SPARSE,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "xmod": {"default_language": "en_XX"},
}


# Why the smallest model of a type does not run alone.
CANNOT = {
    "gemma3n": "its vision part needs the package timm",
    "gemma4_assistant": "drafts for another model, with that model's keys and values",
    "gemma4_unified_assistant": "drafts for another model, with that model's keys and values",
    "git": "its loss starts after the tokens of an image",
    "musicgen": "has no default config: needs those of a text and an audio encoder",
    "musicgen_melody": "has no default config: needs those of a text and an audio encoder",
}


def check(config: Any) -> tuple[int, float]:
    """Parameters and loss of a shrunk model; raises where it cannot be built or run."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False).train()
    rows = min(TEXT, config.get_text_config().vocab_size)
    ids = torch.randint(0, rows, (2, 96), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}")
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            raise ValueError(f"the gradient of {name} is not finite")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count >= 3_000_000:
        raise ValueError(f"{count} parameters are not small")
    return count, loss.item()


def main(types: list[str]) -> int:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    types = types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    begin, failed = time.monotonic(), []
    print(f"{'type':<28}{'parameters':>12}{'loss':>8}{'seconds':>9}")
    for model_type in types:
        start = time.monotonic()
        try:
            count, loss = check(smallest(model_type))
        except Exception as error:
            failed.append(model_type)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            print(f"{model_type:<28}  cannot: {CANNOT.get(model_type, reason)}", flush=True)
        else:
            print(f"{model_type:<28}{count:>12,}{loss:>8.3f}{time.monotonic() - start:>9.2f}", flush=True)
    print(f"{len(types) - len(failed)} of {len(types)} in {time.monotonic() - begin:.0f} s")
    return 0 if set(failed) <= set(CANNOT) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
