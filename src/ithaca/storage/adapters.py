"""LoRA on the way out: which parameters an exported model is made of, with adapters added in or left apart.

An `ExportedParameter` is one of the plain Hugging Face model: its name, the parameters of the run it is computed from, and how. For
a model without adapters that is the parameter itself. Merged, a weight W with adapters A and B becomes W + scale · B A, formed in
float32 from whole matrices, one weight at a time, as PEFT's merge does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.model.weights import kept_buffers, saved_name
from .files import CheckpointError


@dataclass(frozen=True)
class ExportedParameter:
    """A parameter of the exported model."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # names in the run's model
    join: Callable[..., Tensor] | None = None  # of the parts, whole and in float32; None: the one part as it is
    dtype: torch.dtype | None = None  # that it keeps, whatever the model is exported in


def exported_parameters(model: nn.Module) -> list[ExportedParameter]:
    """What the plain model consists of, adapters merged."""
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    changes = _changes(model, names)
    exported = []
    replaced = {name.rsplit(".modules_to_save.", 1)[0] for name in named if ".modules_to_save." in name}
    for name, parameter in named.items():
        plain = saved_name(name.removeprefix("base_model.model."))
        if plain is None or (".original_module." in name and name.rsplit(".original_module.", 1)[0] in replaced):
            continue  # an adapter's own, or one that was trained as a copy
        parts, join = changes.get(name, ((), None))
        exported.append(ExportedParameter(plain, tuple(parameter.shape), (name, *parts), join))
    for name, buffer in kept_buffers(model).items():
        plain = name.removeprefix("base_model.model.")
        exported.append(ExportedParameter(plain, tuple(buffer.shape), (name,), dtype=buffer.dtype))
    return exported


def _changes(model: nn.Module, names: dict[int, str]) -> dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]:
    """Name of a weight or bias -> names of what is added to it, and how."""
    changes: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {}
    for module in model.modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "base_layer")):
            continue
        layer: Any = module
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if len(active) != 1:
            if active:
                raise CheckpointError(
                    f"adapters {', '.join(active)} are active together; export with one active adapter"
                )
            continue
        (adapter,) = active
        scale, a, b = layer.scaling[adapter], layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        experts = getattr(layer, "num_experts", 1)
        order = "e o i" if getattr(layer, "_did_swap_in_out_features", False) else "e i o"
        changes[names[id(weight)]] = (names[id(a)], names[id(b)]), _Sum(scale, experts, order)
        if layer.lora_bias.get(adapter):
            bias = layer.lora_B[adapter].bias
            changes[names[id(layer.get_base_layer().bias)]] = (names[id(bias)],), _Sum(scale, 0, "")
    return changes


@dataclass(frozen=True)
class _Sum:
    """W + scale · B A; for experts [e, ...] each with its own rows of A and columns of B; for a bias just bias + scale · b."""

    scale: float
    experts: int
    order: str

    def __call__(self, base: Tensor, *adapter: Tensor) -> Tensor:
        if self.experts == 0:
            return base + adapter[0] * self.scale
        a, b = adapter
        if self.experts == 1:
            return base + (b @ a).view(base.shape) * self.scale
        a, b = a.reshape(self.experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, self.experts)
        return base + torch.einsum(f"o r e, e r i -> {self.order}", b, a) * self.scale


def adapter_state(model: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """-> tensors under the names of a PEFT folder, and the PEFT config for it. tensors: all trainable ones, by the run's names"""
    from peft import get_peft_model_state_dict

    if len(model.peft_config) != 1:
        raise CheckpointError(f"the model has {len(model.peft_config)} adapters; export a model with one")
    ((name, config),) = model.peft_config.items()
    # without False, PEFT asks the network whether the vocabulary grew, and may add the whole embedding
    state = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=name, save_embedding_layers=False)
    return state, config
