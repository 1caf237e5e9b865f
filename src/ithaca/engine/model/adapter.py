"""Whose model it is: finds the parts of a Hugging Face decoder that techniques work on, and refuses what it does not know.

`read_model` returns a `Decoder`: embedding, layers, final norm, head, and for each layer its two per-token halves, its head
projector, its window and its rotary settings. The modules stay where they are; the state dict keeps its Hugging Face names.
PEFT models are looked through to the model inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...base.holding import CALLER, holds
from ...stack import require
from .experts import unread_experts
from .families import FAMILIES, Family, config_violations
from .gated import gated
from .guard import first_of_each, model_violations, own_code_violations
from .linear import BoundLinear, adapter_violation, apply_linear, linear_violation
from .norm import add_and_norm, apply_norm
from .projection import Bound, Projector, project_all
from .rope import QueryScale, Rope, check_against, rope_for
from .token_kernels import TokenKernels
from .unread import UnreadSum

_WAY_OUT = (
    "Stack(engine='module') runs the model's own code, with what was changed in it, if that proves exact on a copy of the model, "
    "of up to 50M parameters (ithaca docs own_code)"
)


@dataclass
class Router:
    """Catches the router logits of one layer while its MLP runs, for the balance loss."""

    module: nn.Module
    experts: int
    top_k: int

    def watch(self, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        caught: list[Tensor] = []
        hook = self.module.register_forward_hook(lambda module, inputs, output: caught.append(output[0]))
        try:
            result = run()
        finally:
            hook.remove()
        return result, torch.cat(caught)


class Slots:
    """Where modules hold their parameters, looked up once: FSDP2 puts others there for each forward and each backward."""

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        found: dict[int, tuple[dict[str, Any], str]] = {}  # a tied one counts once
        for module in modules:
            for part in () if module is None else module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        found.setdefault(id(parameter), (part._parameters, name))
        self._slots = list(found.values())

    def trainable(self) -> list[Tensor]:
        return [parameter for held, name in self._slots if (parameter := held[name]).requires_grad]


@dataclass
class Layer:
    """One decoder layer: where its parts are, and the per-token functions around attention."""

    index: int
    module: nn.Module
    family: Family
    projector: Projector
    scale: float
    window: int | None
    rope_type: str | None
    router: Router | None
    rotates: bool = True
    residual: float = 1.0  # what the layer adds is multiplied by it
    query_scale: QueryScale | None = None

    def _part(self, name: str | None) -> nn.Module | None:
        return getattr(self.module, name) if name else None

    @property
    def sinks(self) -> Tensor | None:
        """[H], of layers that have them; FSDP2 gathers them for forward and again for backward, so ask inside of a layer's call."""
        attention: Any = self.module.self_attn
        return attention.sinks if self.family.sinks else None

    @property
    def before(self) -> nn.Module | None:
        return self._part(self.family.before_attention)

    @holds(CALLER)
    def normed(self, x: Tensor) -> Tensor:
        """What heads are projected from: x behind the norm before attention, where there is one."""
        return x if self.before is None else self._apply(self.before, x)

    @holds(CALLER)
    def normed_beside(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """x and `normed` of it, for a backward in which the gradients of both meet; None where no kernel does that."""
        return None if self.before is None else add_and_norm(self.before, x, None, self.projector.token_kernels)

    @holds(CALLER)
    def _apply(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        assert norm is not None
        return apply_norm(norm, x, self.projector.token_kernels)

    @holds("tile")
    def project(
        self, bounds: dict[str, Bound], h: Tensor, positions: Tensor, cos_sin: Callable[[], tuple[Tensor, Tensor]],
        unread: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Heads of tokens at these positions [B or 1, t], rotated where the layer does that: h [B, t, d] -> [B, t, heads, D].
        unread: they are only differentiated."""
        rope = cos_sin() if self.rotates else None
        heads = project_all(bounds, h, rope, unread)
        if self.query_scale is not None and "q" in heads:
            heads["q"] = heads["q"] * self.query_scale(positions)[..., None, None].to(h)
        return heads

    @cached_property
    def _slots(self) -> Slots:
        return Slots([self.module])

    @cached_property
    def _slots_after(self) -> Slots:
        parts = [self._part(n) for n in (self.family.after_attention, self.family.before_mlp, self.family.after_mlp)]
        module: Any = self.module
        return Slots([module.self_attn.o_proj, module.mlp, *parts])

    def parameters(self) -> list[Tensor]:
        """Those that are trained."""
        return self._slots.trainable()

    def after_parameters(self) -> list[Tensor]:
        """Of these, those of `after`."""
        return self._slots_after.trainable()

    @holds("tile")
    def after(
        self, x: Tensor, attended: Tensor, keep: bool = False, unread: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Everything behind attention for a tile: x [B, t, d], attended [B, t, H·D] -> y, router logits. keep: its graph is.
        unread: y is only differentiated."""
        module: Any = self.module
        update = apply_linear(module.self_attn.o_proj, attended)
        if self.family.after_attention:
            update = self._apply(self._part(self.family.after_attention), update)
        x, inner = self._joined(x, self._scaled(update))
        logits = None
        skipped = unread and not self.family.after_mlp  # a norm reads what it norms
        if self.router is None:
            update = gated(module.mlp, inner, self.projector.token_kernels, keep, skipped)
        else:
            with unread_experts(skipped):
                update, logits = self.router.watch(lambda: _states(module.mlp(inner)))
        if self.family.after_mlp:
            update = self._apply(self._part(self.family.after_mlp), update)
        update = self._scaled(update)
        return UnreadSum.apply(x, update) if unread else x + update, logits  # pyright: ignore[reportReturnType]

    @holds("tile")
    def _joined(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """x + update, and what the MLP sees of it."""
        norm = self._part(self.family.before_mlp)
        if norm is None:
            x = x + update
            return x, x
        both = add_and_norm(norm, x, update, self.projector.token_kernels)
        if both is not None:
            return both
        x = x + update
        return x, self._apply(norm, x)

    @holds("tile")
    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.residual == 1.0 else update * self.residual


def _states(result: Any) -> Tensor:
    """Of what an MLP returns: gpt-oss adds the router's scores."""
    return result[0] if isinstance(result, tuple) else result


@dataclass
class Decoder:
    """The parts of a model, in the order data meets them."""

    model: nn.Module  # the Hugging Face model with the head, without PEFT around it
    config: Any
    family: Family
    embedding: nn.Module
    layers: list[Layer]
    norm: nn.Module
    head: nn.Module
    tied: bool
    logit_cap: float | None
    router_weight: float  # coefficient of the balance loss; 0 = not part of the loss
    token_kernels: TokenKernels
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0

    @property
    def base(self) -> nn.Module:
        """What is below the head."""
        return self.model.model  # pyright: ignore[reportReturnType]

    @holds("residual")
    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer sees."""
        x = self.embedding(ids)
        return x if self.embedding_multiplier == 1.0 else x * self.embedding_multiplier

    @holds(CALLER)
    def normed(self, x: Tensor) -> Tensor:
        """What the head sees: x behind the final norm."""
        return apply_norm(self.norm, x, self.token_kernels)

    @holds(CALLER)
    def logits(self, head: BoundLinear, x: Tensor) -> Tensor:
        """Of what is behind the layers, without a cap. Divided in place: neither division nor head looks at them again."""
        logits = head(self.normed(x))
        return logits if self.logit_divisor == 1.0 else logits.div_(self.logit_divisor)

    def rope(self, layer_type: str | None, length: int) -> Rope:
        return rope_for(self.config, layer_type, length)


def base_model(model: Any) -> nn.Module:
    """The Hugging Face model inside of PEFT's wrapper. Where adapters were put into the model itself (`model.add_adapter`,
    `inject_adapter_in_model`) there is no wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_state(model: nn.Module, inner: Any) -> None:
    """Refuse what something was done to already, whatever class it is."""
    kind = type(inner).__name__
    if "_orig_mod" in model._modules:  # a wrapper that answers for what is inside
        kind = type(model._modules["_orig_mod"]).__name__
        raise ValueError(
            f"{kind} was compiled; prepare the model without torch.compile, which returned a wrapper of it"
        )
    if hasattr(inner, "_forward_before_ithaca"):
        raise ValueError("this model was prepared before; use the run that prepare returned, or build the model again")
    if isinstance(inner, FSDPModule):
        raise ValueError(f"{kind} is sharded already; pass the model before fully_shard, prepare does it")


def read_model(model: nn.Module, token_kernels: TokenKernels | None = None) -> Decoder:
    inner: Any = base_model(model)
    config: Any = getattr(inner, "config", None)
    kind = getattr(config, "model_type", None)
    family = FAMILIES.get(kind or "")
    check_state(model, inner)
    known_class = family is not None and type(inner).__name__ == family.model_class
    if family is None or not known_class or not type(inner).__module__.startswith("transformers.models."):
        known = ", ".join(sorted(f.model_class for f in FAMILIES.values()))
        name = f"{type(inner).__name__} (model_type {kind!r})"
        raise ValueError(
            f"{name} is not a model ithaca has been proven exact for, so it is refused rather than guessed at. "
            f"Supported: {known}, plain or with PEFT LoRA adapters; any other decoder runs by its own code (engine='module')."
        )
    base = inner.model
    changed = _structure_violations(base, family) or model_violations(model, inner, family)
    problems = first_of_each(
        changed
        + config_violations(config)
        + _adapter_violations(model, inner, family)
        + _window_violations(base, config, family)
    )
    if getattr(config, "attn_logit_softcapping", None):
        problems.append(
            f"config.attn_logit_softcapping={config.attn_logit_softcapping} changes the attention scores inside the kernel, which "
            "only engine='module' can; use it, or set it to None if the checkpoint was trained without it"
        )
    if getattr(config, "clip_qkv", None) is not None:
        problems.append(
            f"config.clip_qkv={config.clip_qkv} cuts off queries, keys and values, which only engine='module' does; use it, or set "
            "clip_qkv to None if the checkpoint was trained without it"
        )
    if inner.is_gradient_checkpointing:
        problems.append(
            "gradient checkpointing is on, and would run the recompute of the stack twice; call "
            "model.gradient_checkpointing_disable() and choose with Stack(recompute=...)"
        )
    try:
        require(problems, f"{type(inner).__name__} cannot be prepared")
    except ValueError as error:
        if not changed or own_code_violations(model, inner):
            raise
        raise ValueError(f"{error}{'. ' if len(problems) == 1 else chr(10)}{_WAY_OUT}") from None
    token_kernels = token_kernels or TokenKernels()
    layers = [_layer(i, module, base, config, family, token_kernels) for i, module in enumerate(base.layers)]
    _check_rope(base, config, layers)
    return Decoder(
        model=inner,
        config=config,
        family=family,
        embedding=base.embed_tokens,
        layers=layers,
        norm=base.norm,
        head=inner.lm_head,
        tied=getattr(inner.lm_head, "base_layer", inner.lm_head).weight is base.embed_tokens.weight,
        logit_cap=getattr(config, "final_logit_softcapping", None) if family.logit_cap else None,
        router_weight=float(config.router_aux_loss_coef) if family.experts and config.output_router_logits else 0.0,
        token_kernels=token_kernels,
        embedding_multiplier=float(base.embedding_multiplier) if family.multipliers else 1.0,
        logit_divisor=float(config.logits_scaling) if family.multipliers else 1.0,
    )


def _layer(index: int, module: Any, base: Any, config: Any, family: Family, token_kernels: TokenKernels) -> Layer:
    attention = module.self_attn
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projector = Projector(
        attention, heads, kv_heads, attention.head_dim, family.qk_norm, token_kernels, family.fused_qkv,
        family.interleaved_rope,
    )  # fmt: skip
    router = None
    if family.experts and hasattr(module.mlp, family.router) and hasattr(module.mlp, "experts"):
        gate = getattr(module.mlp, family.router)
        router = Router(gate, gate.num_experts, config.num_experts_per_tok)
    rope_type = config.layer_types[index] if family.rope_by_layer else None
    window = family.window_of(attention, config)
    return Layer(
        index, module, family, projector, float(attention.scaling), window, rope_type, router,
        rotates=bool(attention.use_rope) if family.nope else True,
        residual=float(module.residual_multiplier) if family.multipliers else 1.0,
        query_scale=QueryScale.of(config) if family.query_scale else None,
    )  # fmt: skip


def _structure_violations(base: Any, family: Family) -> list[str]:
    """Parts a layer has and the table does not know, or the other way round."""
    problems = []
    for index, layer in enumerate(base.layers):
        for module, expected in ((layer, family.layer_parts), (layer.self_attn, family.attention_parts)):
            parts = {name for name, _ in module.named_children()}
            if parts != expected:
                odd = sorted(parts ^ expected)
                name = type(module).__name__
                problems.append(f"{name} of layer {index} differs from the known structure in {', '.join(odd)}")
                return problems  # one layer tells enough
            direct = [name for name, _ in module.named_parameters(recurse=False)]
            if direct != (["sinks"] if family.sinks and module is layer.self_attn else []):
                problems.append(
                    f"{type(module).__name__} of layer {index} has parameters of its own: {', '.join(direct) or 'none'}"
                )
                return problems
    return problems


def _window_violations(base: Any, config: Any, family: Family) -> list[str]:
    """transformers' masks go by config.layer_types, its flash kernels by the attention module."""
    if family.window != "layer":
        return []
    for index, (layer, kind) in enumerate(zip(base.layers, config.layer_types, strict=False)):
        window = family.window_of(layer.self_attn, config)
        if (kind == "sliding_attention") != bool(window):
            return [
                f"config.layer_types makes layer {index} {kind}, but the window of its attention is {window}, and transformers' "
                "kernels differ on which of them counts; set config.sliding_window (and use_sliding_window, where the config has "
                "it) to what the model was trained with, and layer_types accordingly"
            ]
    return []


def lora_violations(model: Any, inner: Any) -> list[str]:
    """Adapters of a kind, or in a state, that no exact path exists for."""
    problems = []
    for config in getattr(model, "peft_config", {}).values():
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            problems.append(f"PEFT type {config.peft_type} is not supported; use LoRA")
    for name, module in inner.named_modules():
        if type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "base_layer"):
            problem = adapter_violation(module, name)
            if problem:
                problems.append(problem)
    return problems


def _adapter_violations(model: Any, inner: Any, family: Family) -> list[str]:
    problems = lora_violations(model, inner)
    for index, layer in enumerate(inner.model.layers):
        for part in family.projections:
            linear = getattr(layer.self_attn, part, None)
            problem = linear and linear_violation(linear, f"model.layers.{index}.self_attn.{part}")
            if problem and problem not in problems:
                problems.append(problem)
    problem = linear_violation(inner.lm_head, "lm_head")
    if problem and problem not in problems:
        problems.append(problem)
    if type(inner.model.embed_tokens).__module__.startswith("peft"):
        kind = type(inner.model.embed_tokens).__name__
        problems.append(f"embed_tokens is wrapped by PEFT ({kind}); leave it out of target_modules and modules_to_save")
    return problems


def _check_rope(base: Any, config: Any, layers: list[Layer]) -> None:
    for layer_type in {layer.rope_type for layer in layers}:
        # a model on the meta device has no numbers to compare with; they are compared once it is built
        check_against(base.rotary_emb, rope_for(config, layer_type, 1), layer_type)
