"""Where numbers of a run leave it, and where their backward comes in: what autograd must know at that border."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comm import total
from .mesh import Group


class Frozen(torch.autograd.Function):
    """A loss that nothing can be learned from: it may be looked at, and backward says why it cannot be."""

    @staticmethod
    def forward(ctx, local_loss: Tensor, anything: Tensor) -> Tensor:
        return local_loss.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "every parameter of the model is frozen (requires_grad=False), so this loss has no gradient; set requires_grad on "
            "what is to be trained before prepare, or add adapters"
        )


class Leaving(torch.autograd.Function):
    """The end of a forward, and the beginning of its backward: gradients are summed over ranks by FSDP, once.

    The shards are inputs so that autograd knows of them: FSDP2 computes on gathered copies and puts gradients into `.grad` by
    itself, in a whole backward. torch.autograd.grad would return nothing for them."""

    @staticmethod
    def forward(ctx, run: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.spent, ctx.shards = run, False, len(tensors) - count
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.spent:  # here, before FSDP2's first hook
            raise RuntimeError(
                "this loss was already differentiated; call run.loss (or run.logprobs) again for another backward"
            )
        below = ctx.next_functions[0][0]
        if below is not None and not torch._C._will_engine_execute_node(below):
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) do not reach sharded parameters: FSDP2 computes on gathered copies "
                "and puts gradients into .grad in a whole backward; call loss.backward() and read parameter.grad"
            )
        ctx.spent = ctx.run.busy = True
        torch.autograd.Variable._execution_engine.queue_callback(ctx.run._backward_done)
        return None, None, *grads, *[None] * ctx.shards


class Total(torch.autograd.Function):
    """The sum over all ranks, with which every rank goes on alike; each differentiates its own part of it."""

    @staticmethod
    def forward(ctx, value: Tensor, world: Group) -> Tensor:
        return total(value.detach(), world)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
