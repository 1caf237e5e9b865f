"""The sizes of a model: what a plan needs of its config, without torch or transformers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...base.hub import find_name, folder, short
from ...config.schema import LINEARS
from .config import read_settings
from .families import FAMILIES, Family
from .presets import PRESETS


@dataclass(frozen=True)
class ModelSizes:
    """A decoder in numbers."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    windows: tuple[int | None, ...]  # one a layer
    bias: int = 0  # elements of biases in a layer
    experts: int = 0  # 0 = a dense MLP
    active_experts: int = 0
    shared: int = 0  # width of the expert that sees every token
    dense: tuple[int, ...] = ()  # layers of a mixture that have a plain MLP
    dense_intermediate: int = 0
    longest: int | None = None  # positions the model was made for
    capped: bool = False  # the final logits have a soft cap, which the fused loss does not know
    divided: bool = False  # the final logits are divided by a number, and their gradient with them
    parameters: int = 0  # of a model without arithmetic here: as many as its parts have
    rotary: int = 0  # of a head's values so many are rotated; 0 = all
    silu: bool = True  # the activation of its MLPs, for which there is a kernel

    @property
    def pretrained(self) -> int | None:
        """Positions that an extension counts from."""
        return self.longest and pretrained_length(self.family, self.longest)

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @cached_property
    def mlp_weights(self) -> int:
        mlp = len(self.traits.mlp) * self.hidden * self.intermediate
        return mlp if not self.experts else mlp * self.experts + self.hidden * self.experts + self.shared_weights

    @property
    def shared_weights(self) -> int:
        """Of the shared expert, and of the gate it has."""
        return 3 * self.hidden * self.shared + self.hidden if self.shared else 0

    @cached_property  # a search asks thousands of times
    def norms(self) -> int:
        """Of whole vectors, in a layer."""
        t = self.traits
        return sum(name is not None for name in (t.before_attention, t.after_attention, t.before_mlp, t.after_mlp))

    @property
    def fused_norms(self) -> bool:
        """Whether torch's fused RMSNorm computes them; others keep what they have in fp32."""
        return self.traits.plain_norms

    @cached_property
    def norm_weights(self) -> int:
        own = self.norms * self.hidden * (2 if self.traits.layer_norms else 1)
        if self.traits.qk_norm == "head":
            own += 2 * self.head_dim
        elif self.traits.qk_norm == "whole":
            own += (self.heads + self.kv_heads) * self.head_dim
        return own

    @cached_property
    def layer_weights(self) -> int:
        return self.attention_weights + self.mlp_weights + self.norm_weights + self.bias

    @cached_property
    def layer_matrices(self) -> int:
        """Weights of the linears and experts of a layer, without a router."""
        return self.attention_weights + self.mlp_weights - self.hidden * self.experts

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linears of a layer, and of the head. Experts have none, but for the shared one."""
        hidden, wide = self.hidden, self.shared or self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        *inner, outer = self.traits.mlp
        linears = {
            "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
            **dict.fromkeys(inner, (wide, hidden)), outer: (hidden, wide), "lm_head": (self.vocabulary, hidden),
        }  # fmt: skip
        fused: dict[str, tuple[int, int]] = {}
        for name, (rows, columns) in linears.items():
            if self.experts and not self.shared and name in (*inner, outer):
                continue
            name = self.traits.fused.get(name, name)
            fused[name] = (fused.get(name, (0, 0))[0] + rows, columns)
        return fused

    @property
    def mlp_linears(self) -> set[str]:
        return {self.traits.fused.get(name, name) for name in self.traits.mlp}

    @property
    def layer_tensors(self) -> list[tuple[int, int]]:
        """Rows and columns of the parameters of a layer; norms and biases as one."""
        linears = {name: shape for name, shape in self.linears.items() if name != "lm_head"}
        if self.experts:  # gate and up of all experts are one tensor, and down is another
            wide = self.experts * self.intermediate
            return [*linears.values(), (2 * wide, self.hidden), (wide, self.hidden), (self.norm_weights + self.bias, 1)]
        return [*linears.values(), (self.norm_weights + self.bias, 1)]

    def named(self, targets: tuple[str, ...]) -> list[str]:
        """The linears that PEFT gives an adapter: those whose name is a target or ends with one. A target that names single
        layers counts for all of them."""
        if targets == LINEARS:  # nobody has named them: those are meant that the model has
            every = dict.fromkeys(self.traits.fused.get(name, name) for name in targets)
            targets = tuple(name for name in every if name in self.linears)
        mlp = "mlp.shared_expert" if self.shared else "mlp"
        where = {
            name: f".model.layers.*.{mlp if name in self.mlp_linears else 'self_attn'}.{name}" for name in self.linears
        }
        where["lm_head"] = ".lm_head"
        hits = {
            target: [
                name
                for name, full in where.items()
                if full.endswith("." + re.sub(r"layers\.\d+\.", "layers.*.", target))
            ]
            for target in targets
        }
        if unknown := [target for target, names in hits.items() if not names]:
            raise ValueError(
                f"{self.name} has no linear layer called {', '.join(unknown)} for an adapter; lora targets are among "
                f"{', '.join(self.linears)}"
            )
        return [name for name in self.linears if any(name in names for names in hits.values())]

    @property
    def weights(self) -> int:
        if self.parameters:
            return self.parameters
        fewer = len(self.dense) * (self.mlp_weights - 3 * self.hidden * self.dense_intermediate)
        tables = (1 if self.tied else 2) * self.embedding_weights
        last_norm = self.hidden * (2 if self.traits.layer_norms else 1)
        return self.layers * self.layer_weights - fewer + tables + last_norm

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "family": self.family, "parameters": self.weights, "layers": self.layers}


# what transformers takes where a config does not say it: whether head and embedding are tied
_TIED = ("gemma", "gemma3_text", "smollm3", "starcoder2")
# whether windows are used at all
_WINDOWS_ASKED_FOR = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
# whether q, k and v have biases
_BIASED = ("glm", "glm4", "gpt_oss", "qwen2", "qwen2_moe", "seed_oss")
# how much of a head is rotated
_PARTIAL = {"glm": 0.5, "glm4": 0.5}
_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip


def read_sizes(what: str) -> ModelSizes:
    """A preset's name, a folder with config.json, that file, or a model on the Hub."""
    return sizes_of(*said_of(what))


def said_of(what: str) -> tuple[dict[str, Any], str]:
    """What the config of such a model says, and what it is called."""
    if what in PRESETS:
        return PRESETS[what], what
    path = folder(what)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():  # what is there and no file is refused when it is read
        raise ValueError(
            f"{what} is no folder with a config.json, no model on the Hub (owner/name) and no preset; presets: {', '.join(PRESETS)}"
        )
    return read_settings(path), path.parent.name or str(path) if find_name(what) is None else short(what)


def sliced(sizes: ModelSizes, layers: int | None) -> ModelSizes:
    """The first so many layers of a model, with embedding and head."""
    if layers is None or layers >= sizes.layers:
        return sizes
    if layers < 1:
        raise ValueError(f"layers={layers} must be at least 1; the model has {sizes.layers}")
    return replace(
        sizes, layers=layers, windows=sizes.windows[:layers], dense=tuple(at for at in sizes.dense if at < layers)
    )


def pretrained_length(family: str, longest: int) -> int:
    """Tokens of the rows that a model was pretrained on, where its config leaves room for more: Qwen3 was pretrained at 32,768, has
    40,960 for an answer of that length behind a prompt, and its makers stretch from 32,768; gpt-oss was stretched from 4,096."""
    if family == "gpt_oss" and longest == 131072:
        return 4096
    return 32768 if family in ("qwen3", "qwen3_moe") and longest == 40960 else longest


def extension(context: int, pretrained: int, family: str) -> str:
    """What trains a model beyond the positions it was made for."""
    if family == "phi3":  # whose config takes no yarn
        return "a larger --model.rope.rope_theta, or a longrope with its factors in the config"
    return (
        f"--model.rope.rope_type yarn --model.rope.factor {-(-context // pretrained)} "
        f"--model.rope.original_max_position_embeddings {pretrained}, or a larger --model.rope.rope_theta"
    )


def sizes_of(config: dict[str, Any], name: str) -> ModelSizes:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ValueError(
            f"{name}: there is no arithmetic for model_type {config.get('model_type')!r}, only for {', '.join(FAMILIES)}; "
            "`ithaca plan` and `stack: auto` count what it takes by a dry run of its own code instead"
        )
    missing = [key for key in _NEEDED if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"{name}: the config does not say {', '.join(missing)} (whole numbers)")
    kind, layers = str(config["model_type"]), config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    sparse = (family.experts and (config.get("num_local_experts") or config.get("num_experts"))) or 0
    intermediate = wide = config["intermediate_size"]
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    dense = tuple(at for at in range(layers) if sparse and (at in plain or (at + 1) % step))
    if sparse:
        intermediate = config.get("moe_intermediate_size") or intermediate
    return ModelSizes(
        name=name,
        family=kind,
        layers=layers,
        hidden=config["hidden_size"],
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        windows=_windows(config, family, layers),
        bias=_biases(config, kind, (heads + 2 * kv_heads) * width, intermediate, sparse),
        experts=sparse,
        active_experts=config.get("num_experts_per_tok") or 0 if sparse else 0,
        shared=config.get("shared_expert_intermediate_size") or 0 if sparse else 0,
        dense=dense,
        dense_intermediate=wide if dense else 0,
        longest=config.get("max_position_embeddings"),
        capped=family.logit_cap and bool(config.get("final_logit_softcapping")),
        divided=family.multipliers and config.get("logits_scaling", 1) != 1,
        rotary=_rotary(config, family, width),
        silu=_activation(config) in ("silu", "swish"),
    )


def _activation(config: dict[str, Any]) -> str:
    usual = "gelu" if str(config["model_type"]).startswith("gemma") else "silu"
    return str(config.get("hidden_activation") or config.get("hidden_act") or usual)


def _windows(config: dict[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window, kind = config.get("sliding_window"), config["model_type"]
    used = config.get("use_sliding_window", kind not in _WINDOWS_ASKED_FOR)
    if family.window == "none" or not window or not used:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kind == "olmo3" and not kinds:
        kinds = ["full_attention" if at % 4 == 3 else "sliding_attention" for at in range(layers)]
    if family.window == "config" or not kinds:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _biases(config: dict[str, Any], kind: str, heads: int, intermediate: int, experts: int) -> int:
    """Elements of the biases of a layer, and of gpt-oss its sinks. heads: of q, k and v together."""
    hidden, inner = config["hidden_size"], len(FAMILIES[kind].mlp) - 1
    if kind == "starcoder2":
        return heads + inner * intermediate + 2 * hidden if config.get("use_bias", True) else 0
    said = "qkv_bias" if kind == "qwen2_moe" else "attention_bias"
    biased = kind == "qwen2" or config.get(said, kind in _BIASED)
    outward = biased and kind not in ("glm", "glm4", "qwen2", "qwen2_moe")  # of o_proj
    if kind == "seed_oss":
        outward = config.get("attention_out_bias", False)
    attention = (heads if biased else 0) + (hidden if outward else 0)
    if kind == "gpt_oss":  # the router's, and two for each expert
        return attention + experts * (1 + 2 * intermediate + hidden) + config["num_attention_heads"]
    return attention + (inner * intermediate + hidden if config.get("mlp_bias") else 0)


def _rotary(config: dict[str, Any], family: Family, width: int) -> int:
    said = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("partial_rotary_factor")
    part = said if said is not None else config.get("partial_rotary_factor", _PARTIAL.get(str(config["model_type"])))
    return 0 if part is None or not family.partial_rope else int(width * part)
