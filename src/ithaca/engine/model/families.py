"""The table of model families, with the quirks of each.

A row says where a family keeps its parts and in which order a layer applies them. Everything else (activation, biases,
experts, norms) is the family's own Hugging Face module, called as it is. A decoder layer is

    h = norm_before_attention(x);  a = o_proj(attention(h));  x = x + norm_after_attention(a)
    m = mlp(norm_before_mlp(x));   x = x + norm_after_mlp(m)

with any of the norms absent. A model whose class is not in the table, or whose layers have parts the row does not name, is
refused: an unknown part may be an unknown quirk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Family:
    model_class: str
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qk_norm: str | None = None  # "head": each head by itself; "whole": all heads of a token together
    fused_qkv: str | None = None  # the one linear that makes q, k and v, its rows in this order
    fused_mlp: bool = False  # gate and up are one linear, gate_up_proj
    dropouts: tuple[str, ...] = ()  # of a layer: at zero, or refused, so they are not called
    window: str = "none"  # where the sliding window stands: "none", "config" (all layers), "layer" (attention module)
    rope_by_layer: bool = False  # rotary settings differ by config.layer_types
    wide_rope: bool = False  # q and k are rotated in float32 and rounded afterwards
    nope: bool = False  # layers whose attention says use_rope=0 turn nothing
    query_scale: bool = False  # queries grow with the logarithm of their position (Llama 4's way)
    multipliers: bool = False  # embedding, what a layer adds, and logits are scaled by numbers of the config
    partial_rope: bool = False  # of a head the first part may be rotated (partial_rotary_factor)
    interleaved_rope: bool = False  # a pair are neighbours, not values of the two halves
    logit_cap: bool = False  # config.final_logit_softcapping is obeyed
    plain_norms: bool = True  # weight · x / rms(x), the mean square in float32: torch has one kernel for it
    layer_norms: bool = False  # norms take off the mean and have a bias
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # linears of a dense MLP, inner ones first
    experts: bool = False  # some layers have a router, whose balance loss belongs to the loss
    router: str = "gate"  # what the MLP calls it
    clamped_experts: bool = False  # they have biases, and gate and up are clamped: more is kept of them
    masks_documents: bool = True  # transformers makes a mask of positions that restart
    sinks: bool = False  # a score of each head that every query sees beside its keys: attention's parameter `sinks`

    @property
    def name(self) -> str:
        """What its classes begin with."""
        return self.model_class.removesuffix("ForCausalLM")

    @property
    def layer_parts(self) -> set[str]:
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return {"self_attn", "mlp", *self.dropouts} | {name for name in norms if name}

    @property
    def projections(self) -> tuple[str, ...]:
        """The linears that make q, k and v."""
        return (self.fused_qkv,) if self.fused_qkv else ("q_proj", "k_proj", "v_proj")

    @cached_property  # a search for a plan asks thousands of times
    def fused(self) -> dict[str, str]:
        """What of the usual linears is a part of which."""
        parts: dict[str, str] = {}
        if self.fused_qkv:
            parts |= {name: self.fused_qkv for name in ("q_proj", "k_proj", "v_proj")}
        if self.fused_mlp:
            parts |= {name: "gate_up_proj" for name in ("gate_proj", "up_proj")}
        return parts

    @property
    def attention_parts(self) -> set[str]:
        return {*self.projections, "o_proj"} | ({"q_norm", "k_norm"} if self.qk_norm else set())

    def window_of(self, attention: Any, config: Any) -> int | None:
        if self.window == "none":
            return None
        if self.window == "config":
            return getattr(config, "sliding_window", None)
        return getattr(attention, "sliding_window", None)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window="config"),
    "qwen2": Family("Qwen2ForCausalLM", window="layer"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", window="layer"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm="head", window="config", experts=True),
    "mixtral": Family("MixtralForCausalLM", window="config", experts=True),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        qk_norm="head",
        window="layer",
        rope_by_layer=True,
        logit_cap=True,
        plain_norms=False,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        qk_norm="whole",
        wide_rope=True,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        qk_norm="whole",
        window="layer",
        rope_by_layer=True,
        wide_rope=True,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", window="layer", nope=True),
    "granite": Family("GraniteForCausalLM", multipliers=True),
    "ministral": Family("MinistralForCausalLM", window="layer"),
    "ministral3": Family("Ministral3ForCausalLM", window="config", query_scale=True),
    "arcee": Family("ArceeForCausalLM", mlp=("up_proj", "down_proj")),
    "seed_oss": Family("SeedOssForCausalLM"),
    "gemma": Family("GemmaForCausalLM", plain_norms=False),
    "olmoe": Family("OlmoeForCausalLM", qk_norm="whole", experts=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", window="layer", experts=True),
    "starcoder2": Family("Starcoder2ForCausalLM", window="config", layer_norms=True, mlp=("c_fc", "c_proj")),
    "phi3": Family(
        "Phi3ForCausalLM",
        fused_qkv="qkv_proj",
        fused_mlp=True,
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        window="config",
        partial_rope=True,
    ),
    "glm": Family("GlmForCausalLM", fused_mlp=True, partial_rope=True, interleaved_rope=True),
    "glm4": Family(
        "Glm4ForCausalLM",
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        fused_mlp=True,
        partial_rope=True,
        interleaved_rope=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        window="layer",
        experts=True,
        router="router",
        clamped_experts=True,
        masks_documents=False,
        sinks=True,
    ),
}


def config_violations(config: Any) -> list[str]:
    """Settings of a config that no exact path exists for, each with its remedy."""
    problems = []
    for name, value in vars(config).items():
        if name.startswith(("classifier", "summary")):
            continue  # of heads that a decoder does not have: GPT-2's and GPT-NeoX's configs name them all the same
        if ("dropout" in name or "pdrop" in name or "layerdrop" in name) and isinstance(value, int | float) and value:
            problems.append(f"config.{name}={value} makes results random; set it to 0.0")
    if getattr(config, "use_bidirectional_attention", None):
        problems.append("config.use_bidirectional_attention is set, but only causal attention is supported; unset it")
    if not getattr(config, "is_causal", True):
        problems.append(
            "config.is_causal=False makes attention see the future, but only causal attention is supported; unset it"
        )
    if getattr(config, "router_jitter_noise", 0.0):
        problems.append(f"config.router_jitter_noise={config.router_jitter_noise} makes routing random; set it to 0.0")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            problems.append(f"config.{name}=True would keep tensors that are never whole here; set it to False")
    if getattr(config, "quantization_config", None):
        problems.append(
            "the model is quantised (config.quantization_config), and quantised weights have no exact path here; load it in bf16 "
            "or float32, or take the folder of the weights it was made from; for QLoRA quantise it here: prepare(quantize='nf4'), "
            "or model.quantize: nf4"
        )
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        problems.append(f"config.pretraining_tp={config.pretraining_tp} splits projections differently; set it to 1")
    return problems
