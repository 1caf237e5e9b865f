"""FSDP2: every parameter, gradient and optimizer state sharded over all ranks of a replica.

One group per decoder layer, one for the embedding and one for the head; the final norm, and an embedding tied to the head,
stay with the root. On CUDA the shards are fp32 masters, compute is bf16 and gradients are reduced in fp32. Gradients are summed,
not averaged: the loss is already divided by the global token count (DESIGN: one loss).

A model built on the meta device is sharded first and filled afterwards, shard by shard, so no rank ever holds it whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from ..base.holding import module_holds
from .mesh import Mesh
from .model.adapter import Decoder
from .model.nf4 import Nf4, packable

if TYPE_CHECKING:
    from .own import OwnDecoder

log = logging.getLogger("ithaca")
module_holds("torch.distributed.fsdp", "fsdp")


def apply_fsdp(decoder: Decoder | OwnDecoder, mesh: Mesh, *, compute: torch.dtype, reshard: bool = True) -> None:
    """Shard in place. `reshard`: free gathered parameters between forward and backward."""
    if mesh.parameters is None:
        return
    require_own_parameters([layer.module for layer in decoder.layers])
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=_wide(compute), cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.parameters, "mp_policy": policy}
    if mesh.offload:
        pinned = mesh.device.type == "cuda"  # a GPU copies from pinned memory while it computes
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
    groups: list[nn.Module] = [layer.module for layer in decoder.layers]
    if not decoder.tied:
        groups += [decoder.embedding, decoder.head]
    for module in groups:
        _fp32_masters(module, decoder.model)
        # the head is used last and first again in backward: freeing it in between would only gather it twice
        fully_shard(module, reshard_after_forward=reshard and module is not decoder.head, **options)
    _fp32_masters(decoder.model, decoder.model)
    fully_shard(decoder.model, reshard_after_forward=False, **options)
    for module in [*groups, decoder.model]:
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _free_what_stays(decoder.model, [decoder.model] if decoder.tied else [decoder.head, decoder.model])
    log.info("FSDP2: %d groups over %d ranks, compute in %s", len(groups) + 1, mesh.parameters.size(), compute)


def require_own_parameters(layers: Sequence[nn.Module]) -> None:
    """A parameter of two groups becomes two, which then learn apart (newer versions of torch say so in the first forward)."""
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            first = owner.setdefault(id(parameter), index)
            if first != index:
                raise ValueError(
                    f"layers {first} and {index} of this model share a parameter ({name}), and FSDP2 shards a layer at a time, so "
                    "they would part; train it on one GPU with stack.shard_parameters=False, where FSDP2 is not needed"
                )


@torch.no_grad()
def pack_shards(layers: Sequence[nn.Module], packing: type[Nf4]) -> None:
    """The frozen base in NF4 (model/nf4.py), in place. A parameter at a time: no more than one is there twice."""
    wanted = {id(parameter) for _, parameter in packable(layers)}
    for record in (record for layer in layers for record in _sharded(layer)):
        if id(record.sharded_param) in wanted:
            shard = packing.of(record.sharded_param._local_tensor)
            record.sharded_param._local_tensor, record._sharded_param_data = shard, shard.view(-1)


def _free_what_stays(root: nn.Module, kept: list[Any]) -> None:
    """Groups that stay gathered until backward are freed where none comes: after an evaluation, and before the next forward,
    which would otherwise miss an optimizer step. Where backward is still to come, `parameters()` are the shards all the same: they
    hold the gradients of the step before, which would otherwise seem to have none."""

    def free(*_: Any) -> None:
        for module in kept:
            module.reshard()

    def after(*_: Any) -> None:
        if not torch.is_grad_enabled():
            return free()
        for module in kept:
            _show_shards(module)

    root.register_forward_pre_hook(free, prepend=True)  # before FSDP2's own hook, which gathers
    root.register_forward_hook(after)


@contextmanager
def shown_whole(*modules: nn.Module) -> Iterator[None]:
    """Inside of a backward that computes by these modules again: what FSDP2 has gathered for them, instead of their shards."""
    for parameter in (parameter for module in modules for parameter in _sharded(module)):
        parameter._setattr_on_modules(parameter.unsharded_param)
    try:
        yield
    finally:
        for module in modules:
            _show_shards(module)


def _show_shards(module: nn.Module) -> None:
    """Let the module hold its shards as parameters, while what was gathered waits for backward."""
    for parameter in _sharded(module):
        parameter._setattr_on_modules(parameter.sharded_param)


def _sharded(module: Any) -> list[Any]:
    """FSDP2's own records of a module's parameters."""
    return [parameter for group in gathered_groups(module) for parameter in group.fsdp_params]


def gathered_groups(module: Any) -> list[Any]:
    """FSDP2's own records of what it gathers together for a module."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one at most: torch before 2.13
    return [group for group in groups if group is not None]


def recover(root: nn.Module) -> None:
    """After a forward or backward that ended in an exception FSDP2 still stands in its middle, and would leave some gradients of
    the next step unreduced without a word. Gradients it had not reduced are dropped with the step that failed."""
    if not isinstance(root, FSDPModule):
        return
    if not hasattr(root, "reset_iter_state"):  # torch before 2.13
        raise RuntimeError(
            "the last forward or backward failed, and this torch cannot bring FSDP2 back to a clean state; build and prepare "
            "the model again, or use torch 2.13"
        )
    root.reset_iter_state()
    for module in root.modules():
        for parameter in _sharded(module):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fp32_masters(group: nn.Module, model: nn.Module) -> None:
    """Trainable parameters become fp32 masters, a group at a time; frozen ones (a LoRA base) stay as small as they came."""
    for parameter in list(group.parameters()):
        if parameter.requires_grad and parameter.dtype != _wide(parameter.dtype):
            wide = nn.Parameter(parameter.detach().to(_wide(parameter.dtype)))
            for module in model.modules():  # a tied parameter sits in several modules and must stay one
                for name, held in module._parameters.items():
                    if held is parameter:
                        module._parameters[name] = wide
