"""Any decoder, run by its own code: the parts of it that techniques work on, and how a batch goes through.

transformers marks decoder layers (`GradientCheckpointingLayer`), names the embedding and the head, and calls attention through an
interface. That is all that is known of a model here. Its own forward runs on this rank's tokens with their positions: embedding,
multipliers, the loop over layers, final norm. Each layer is checkpointed (layer/module.py). The head is the model's own forward
too, on one tile of hidden states, with the part below it answering what it is told; so scales and caps come along.

Whether a model's code bears this, nobody can know by looking: it is proven (proof.py) before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.holding import CALLER, holds, module_holds
from ..stack import require
from .attention.choice import Need
from .attention.head_schedule import head_schedule
from .attention.interface import Asked, Unsupported, attending, configs_of, in_run, register
from .attention.stages import Shape, StagedAttention
from .batch import Batch
from .layer.mixer import Spread, doors_of, mixing
from .layer.mixer_tiles import run_mixer
from .layer.module import ModuleCall, run_module_layer, run_tiled, running_call
from .model.adapter import base_model, check_state, lora_violations
from .model.angles import FLOAT32_POSITIONS, Angles, rotary_modules
from .model.families import config_violations
from .model.guard import home_class, own_code_violations
from .model.norm import fused_norm
from .model.token_kernels import TokenKernels
from .model.tokenwise import HOOKS
from .request import Ranks

if TYPE_CHECKING:
    from .run import Run

module_holds(__name__, CALLER)
_DOCS = "ithaca docs own_code says what is asked of a model, ithaca docs families which ones run"


@dataclass
class OwnLayer:
    index: int
    module: nn.Module
    forward: Callable[..., Any]  # as it was before prepare
    configs: list[Any]
    parts: list[nn.Module]  # that are tiled: MLP, experts
    mixers: list[nn.Module]  # gated delta nets and the like

    @classmethod
    def of(cls, index: int, module: nn.Module) -> OwnLayer:
        mixers = [part for part in module.modules() if doors_of(part)]
        inside = {id(part) for part in mixers}
        parts = [m for m in module.children() if _is_mlp(m) and not any(id(part) in inside for part in m.modules())]
        return cls(index, module, module.forward, configs_of(module), parts, mixers)


@dataclass
class OwnDecoder:
    """The same names as `model.adapter.Decoder` has, as far as a run needs them."""

    model: nn.Module  # with the head, without PEFT around it
    config: Any  # of the text model
    base: nn.Module  # what is below the head
    embedding: nn.Module
    layers: list[OwnLayer]
    head: nn.Module
    head_name: str
    tied: bool
    configs: list[Any]
    tiles: bool = True  # layers have parts that treat tokens alike, as a proof has shown
    tile: int | None = None
    # stands for what those parts made when a layer runs again, where a proof has shown that nobody looks at it
    blank: float | None = None
    wide_angles: bool = True  # its rotary modules bear being computed in float64
    norms: dict[str, float] = field(
        default_factory=dict
    )  # classes of norms that one kernel can be (norm.py), by a proof
    running: Running | None = None
    tokenwise: list[OwnLayer] = field(
        default_factory=list
    )  # of the last forward: came to no attention, so look at no other token
    logit_cap: None = None  # the model's own code caps
    router_weight: float = 0.0
    family: None = None
    token_kernels: TokenKernels = field(default_factory=TokenKernels)

    @holds("residual")
    def hidden(self, run: Run, batch: Batch, running: Running | None = None) -> Tensor:
        """What the head sees, of this rank's tokens. running: what is done with each layer; default: it is trained."""
        rows, tokens = batch.input_ids.shape
        if not self.wide_angles and batch.longest > FLOAT32_POSITIONS:
            raise Unsupported(
                f"a document of {batch.longest:,} tokens is too long for {type(self.model).__name__}: its rotary module could not "
                f"be computed in float64, and in float32 angles of tokens beyond {FLOAT32_POSITIONS:,} are blurred by more than "
                "bf16 rounds them; use shorter documents, or a rotary module as transformers writes it (ithaca docs rope)"
            )
        if batch.parents is not None and (mixers := self.mixers()):
            raise Unsupported(
                f"the documents are trees, and {mixers[0]} carries a state from token to token, which would have to go on from "
                "several branches; give every path as a document of its own"
            )
        # transformers would take jumps of positions for packed documents, where no mask is given
        nothing_hidden = torch.ones(rows, tokens, dtype=torch.bool, device=batch.input_ids.device)
        running = running or Running(run, batch)
        with self._active(running, run.ranks):
            result = self.base(
                input_ids=batch.input_ids,
                position_ids=batch.positions.expand(rows, -1),
                attention_mask=nothing_hidden,
                use_cache=False,
            )
        unseen = [str(layer.index) for layer in self.layers if layer.index not in running.called]
        if unseen:  # so no proof says anything of them
            raise Unsupported(
                f"layers {', '.join(unseen)} of it never came to attention: text alone does not reach them; load its text "
                "model by itself, if it has one"
            )
        self.tokenwise = [layer for layer in self.layers if layer.index not in running.attended]
        return result[0] if isinstance(result, tuple) else result.last_hidden_state

    def mixers(self) -> list[str]:
        """Classes of its linear mixers."""
        return sorted({type(part).__name__ for layer in self.layers for part in layer.mixers})

    @contextmanager
    def _active(self, running: Running, ranks: Ranks) -> Iterator[None]:
        before, self.running, ranks.inside = (self.running, ranks.inside), running, True
        try:
            with attending(self.configs):
                yield
        finally:
            self.running, ranks.inside = before

    def head_function(self, ranks: Ranks) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
        """(hidden states of some tokens -> their logits, the parameters that takes). Inside of a call of the head."""
        below = {id(p) for p in self.base.parameters()}
        parameters: list[Tensor] = [p for p in self.model.parameters() if id(p) not in below]
        own = {id(p) for p in parameters}
        parameters += [p for p in self.head.parameters() if id(p) not in own]
        return (lambda t: self._head(t, ranks)), parameters

    def _head(self, t: Tensor, ranks: Ranks) -> Tensor:
        parent, key = self._head_place()
        model: Any = self.model
        ids = torch.zeros(t.shape[:2], dtype=torch.long, device=t.device)
        parent._modules[key] = _Bare(self.head)  # pyright: ignore[reportArgumentType]
        ranks.below = _Below(t)
        try:
            return model._forward_before_ithaca(input_ids=ids, use_cache=False).logits
        finally:
            ranks.below = None
            parent._modules[key] = self.head

    def _head_place(self) -> tuple[nn.Module, str]:
        parent, _, key = self.head_name.rpartition(".")
        return (self.model.get_submodule(parent) if parent else self.model), key


class _Below:
    """What a part below the head answers: hidden states, and of whatever else is asked for nothing."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Bare:
    """The head without the hooks of FSDP2, which has gathered it for all tiles together."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._head, "_forward_before_ithaca", self._head.forward)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


@dataclass
class Running:
    """One forward of a model."""

    run: Run
    batch: Batch
    called: set[int] = field(default_factory=set)
    attended: set[int] = field(default_factory=set)

    def layer(self, layer: OwnLayer, args: Any, kwargs: Any) -> Any:
        run = self.run
        if layer.index in self.called:
            raise Unsupported(f"layer {layer.index} is used more than once in a forward, which is not supported")
        self.called.add(layer.index)
        if layer.index and run.stack.store_of(layer.index) != run.stack.store_of(layer.index - 1):
            run.store.flush()
        call = self.call_of(layer)
        result = run_module_layer(call, args, kwargs)
        run.check_stored(layer.index, call.learn and call.recompute != "none", call.stored)
        return result

    def call_of(self, layer: OwnLayer) -> ModuleCall:
        run = self.run

        def attention(shape: tuple[int, ...], kv_heads: int, asked: Asked) -> StagedAttention:
            self.attended.add(layer.index)
            return self._staged(shape, kv_heads, asked)

        def spread() -> Spread:
            self.attended.add(layer.index)
            return self.batch.spread(run.mesh, run.stack.heads_per_stage, run.kernels.mixers)

        return ModuleCall(
            layer.module,
            layer.forward,
            layer.configs,
            attention,
            spread,
            run.stack.recompute_of(layer.index),
            run.store_of(layer.index),
            self.batch.fold,
            run.decoder.blank,  # pyright: ignore[reportAttributeAccessIssue]
            partial(run.reserve_like, layer.index),
        )

    def _staged(self, shape: tuple[int, ...], kv_heads: int, asked: Asked) -> StagedAttention:
        run, (rows, heads, tokens, size) = self.run, shape
        windowed, softcapped = asked.rule.window is not None, asked.softcap is not None
        need = Need(run.mesh.device, run.dtype, size, windowed, softcapped=softcapped)
        return StagedAttention(
            _schedule(heads, kv_heads, run.stack.ulysses, run.stack.heads_per_stage),
            Shape(rows, tokens, heads, kv_heads, size),
            run.mesh.ulysses,
            run.mesh.ring,
            run.kernels.resolve(need),
            self.batch.plans_for(asked.rule.window, run.mesh, asked.rule.chunk),
            asked.scale,
            asked.softcap,
        )


_schedule = lru_cache(maxsize=64)(head_schedule)


def read_own(model: nn.Module) -> OwnDecoder:
    """The parts of any decoder of transformers'; what has none is refused."""
    from transformers import PreTrainedModel

    layer_class = _layer_class()
    inner: Any = base_model(model)
    kind = type(inner).__name__
    check_state(model, inner)
    if not isinstance(inner, PreTrainedModel):
        told = getattr(getattr(inner, "config", None), "model_type", None)
        raise ValueError(
            f"{kind} (model_type {told!r}) is not a model of transformers; pass one that AutoModelForCausalLM builds"
        )
    if home_class(inner) is None:
        raise ValueError(
            f"{kind} is code of its own ({type(inner).__module__}), not a class of transformers, so nobody knows by which doors it "
            f"attends; take the class that transformers has for this model, if need be a newer transformers. {_DOCS}"
        )
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind} has an encoder, and only decoders can be trained here: pass a model that predicts the next token of one text "
            f"(AutoModelForCausalLM). {_DOCS}"
        )
    config = inner.config.get_text_config()
    problems = config_violations(config) + own_code_violations(model, inner) + lora_violations(model, inner)
    if config is not inner.config and getattr(inner.config, "quantization_config", None):
        problems += config_violations(inner.config)
    base, head, embedding = _below(inner), inner.get_output_embeddings(), inner.get_input_embeddings()
    if head is None or embedding is None or base is None:
        problems.append(
            "it names no head (get_output_embeddings), no embedding or no part below the head (get_decoder); pass a model that "
            "predicts the next token (AutoModelForCausalLM)"
        )
    if inner.is_gradient_checkpointing:
        problems.append(
            "gradient checkpointing is on, and would run the recompute of the stack twice; call "
            "model.gradient_checkpointing_disable() and choose with Stack(recompute=...)"
        )
    layers: list[nn.Module] = []
    inside: set[int] = set()
    for module in (base or inner).modules():
        if isinstance(module, layer_class) and id(module) not in inside:
            layers.append(module)
            inside |= {id(part) for part in module.modules()}
    if not layers:
        problems.append(
            "transformers marks no layers in it (GradientCheckpointingLayer), so nothing could be recomputed; choose another model"
        )
    if getattr(config, "output_router_logits", False):
        problems.append(
            "config.output_router_logits=True adds a balance loss that is not supported for it; set it to False"
        )
    require(problems, f"{kind} cannot be prepared")
    assert base is not None and head is not None and embedding is not None
    names = {id(module): name for name, module in inner.named_modules()}
    weight = getattr(getattr(head, "base_layer", head), "weight", None)
    return OwnDecoder(
        model=inner,
        config=config,
        base=base,
        embedding=embedding,
        layers=[OwnLayer.of(i, module) for i, module in enumerate(layers)],
        head=head,
        head_name=names[id(head)],
        tied=weight is not None and weight is getattr(embedding, "weight", None),
        configs=configs_of(base),
    )


def _layer_class() -> type[nn.Module]:
    """The class by which transformers marks layers; its attention is ours from here on. ValueError where it has neither."""
    import transformers

    try:
        from transformers.modeling_layers import GradientCheckpointingLayer

        register()
    except ImportError as error:
        raise ValueError(
            f"transformers {transformers.__version__} has no interface by which attention of a model's own code can be replaced "
            f"({error}); pip install -U 'transformers>=5.17'. {_DOCS}"
        ) from None
    return GradientCheckpointingLayer


def _below(inner: Any) -> Any:
    """What a model calls to get from tokens to what its head sees."""
    named = inner.get_decoder()
    if named is not inner:
        return named
    prefix = getattr(inner, inner.base_model_prefix, None)
    if isinstance(prefix, nn.Module):
        return prefix
    children = [child for child in inner.children() if len(list(child.modules())) > 3 and hasattr(child, "config")]
    return children[0] if len(children) == 1 else None


def route_own(decoder: OwnDecoder) -> None:
    """Let layers and rotary modules ask the decoder whether a run is on; otherwise they are what they were."""
    for layer in decoder.layers:
        layer.module._layer_of_ithaca = (decoder, layer)  # pyright: ignore[reportArgumentType]
        layer.module.forward = MethodType(_layer_forward, layer.module)
        for part in layer.mixers:
            own = doors_of(part)
            part._mixer_of_ithaca = (decoder, part.forward, mixing(part, own, running_call))  # pyright: ignore
            part.forward = MethodType(_mixer_forward, part)
        for part in layer.parts if decoder.tiles else ():
            part._part_of_ithaca = (decoder, part.forward)  # pyright: ignore[reportArgumentType]
            part.forward = MethodType(_part_forward, part)
    for module in decoder.base.modules():
        if type(module).__name__ in decoder.norms and not any(getattr(module, hooks) for hooks in HOOKS):
            module._norm_of_ithaca = (decoder, module.forward)  # pyright: ignore[reportArgumentType]
            module.forward = MethodType(_norm_forward, module)
    for module in rotary_modules(decoder.base):
        module._angles_of_ithaca = (decoder, Angles(module, decoder.config))  # pyright: ignore[reportArgumentType]
        module.forward = MethodType(_rotary_forward, module)


def _layer_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    decoder, layer = module._layer_of_ithaca
    if decoder.running is None:
        return layer.forward(*args, **kwargs)
    return decoder.running.layer(layer, args, kwargs)


def _mixer_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    decoder, forward, ours = module._mixer_of_ithaca
    if not in_run():
        return forward(*args, **kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:  # of tokens, as `hidden` gave it: it hides none
        kwargs = kwargs | {"attention_mask": None}
    return run_mixer(module, ours, decoder.tile if decoder.tiles else None, args, kwargs)


def _part_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    decoder, forward = module._part_of_ithaca
    return run_tiled(module, forward, decoder.tile if in_run() else None, args, kwargs)


def _norm_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """In half precision on a GPU by one kernel, where the model's own code takes eight."""
    decoder, forward = module._norm_of_ithaca
    found = None
    if args and not kwargs and (in_run() or decoder.running is not None):
        found = fused_norm(module, args, decoder.norms[type(module).__name__], decoder.token_kernels)
    return forward(*args, **kwargs) if found is None else found


def _is_mlp(module: nn.Module) -> bool:
    """By the look of it: weights, more than one part, no attention inside. The proof says whether it treats tokens alike."""
    kinds = [type(part).__name__ for part in module.modules()]
    return (
        len(kinds) > 1
        and any(p.dim() > 1 for p in module.parameters())
        and not any("ttention" in kind for kind in kinds)
    )


def _rotary_forward(module: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    decoder, angles = module._angles_of_ithaca
    if decoder.running is None:
        return angles.forward(x, position_ids, *args, **kwargs)
    return angles(x, position_ids, decoder.running.batch.longest, decoder.wide_angles, *args, **kwargs)
