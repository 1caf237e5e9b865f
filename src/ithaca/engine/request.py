"""How our code runs inside a Hugging Face module: by calls that carry a request.

FSDP2 gathers and frees parameters in hooks around a module's forward. So a layer, the head and the model itself are called as
modules, with a `Request` as last argument, and their forward hands such calls to us. Every other call runs the forward
the module had before, so the model object stays usable as it was: to generate, to look at logits, and on one rank to train.

On several ranks it is not to train. There gradients are summed, each rank's loss being its part of one number, while the model's
own loss is whole on every rank: its gradients would be too large by the number of ranks. So backward through a forward of
the model's own raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass
class Request:
    """Marks a call as ours and says what is wanted."""

    do: Callable[..., Any]


@dataclass
class Ranks:
    """What routed modules know of their run."""

    count: int
    sharded: bool = False  # FSDP2 gathers parameters where the whole model is called
    inside: bool = False  # a call of the whole model
    interrupted: bool = False  # a backward was refused, and FSDP2 stands in its middle
    below: Any = None  # what the part below the head is to answer, while a head runs by itself


def route(module: nn.Module, ranks: Ranks) -> None:
    """Let calls that end with a request run our code inside this module's own hooks (FSDP's), all others as before."""
    module._forward_before_ithaca = module.forward  # pyright: ignore[reportArgumentType]
    module._ranks_of_ithaca = ranks  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_routed_forward, module)  # a method, so that a deep copy runs on its own weights


def _routed_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], Request):
        return args[-1].do(*args[:-1])
    result = module._forward_before_ithaca(*args, **kwargs)
    ranks: Ranks = module._ranks_of_ithaca
    if ranks.count == 1 or not torch.is_grad_enabled():
        return result
    return tree_map_only(Tensor, lambda t: _OwnForward.apply(t, ranks) if t.requires_grad else t, result)


def route_whole(model: nn.Module, base: nn.Module, ranks: Ranks) -> None:
    """The same for the model as a whole, and for the part of it below the head, which FSDP2 cannot run alone: the embedding would
    take itself for the root, and the last norm would be a shard."""
    for module, forward in ((model, _whole_forward), (base, _base_forward)):
        module._forward_before_ithaca = module.forward  # pyright: ignore[reportArgumentType]
        module._ranks_of_ithaca = ranks  # pyright: ignore[reportArgumentType]
        module.forward = MethodType(forward, module)


def _whole_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], Request):
        return args[-1].do(*args[:-1])
    module._ranks_of_ithaca.inside = True
    try:
        return module._forward_before_ithaca(*args, **kwargs)
    finally:
        module._ranks_of_ithaca.inside = False


def _base_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    ranks: Ranks = module._ranks_of_ithaca
    if ranks.below is not None:
        return ranks.below
    if ranks.sharded and not ranks.inside:
        raise RuntimeError(
            f"{type(module).__name__} was called without the model around it, but FSDP2 gathers parameters where the whole model "
            "is called; call the model itself, with output_hidden_states=True for hidden states"
        )
    return module._forward_before_ithaca(*args, **kwargs)


class _OwnForward(torch.autograd.Function):
    """Marks what came out of a forward of the model's own."""

    @staticmethod
    def forward(ctx, value: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return value.detach()  # not a view to autograd: FSDP2 warns of those

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks.interrupted = True
        raise RuntimeError(
            f"backward through the model's own forward: on {ctx.ranks.count} ranks its gradients would be summed though every "
            f"rank has the whole loss, {ctx.ranks.count} times too large where all pass the same batch. Use the run that prepare "
            "returned: run.loss(run.shard(input_ids, labels=labels)).backward()"
        )
