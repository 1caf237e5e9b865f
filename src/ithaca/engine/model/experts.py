"""Experts of a mixture in grouped matrix products, with few passes over memory.

transformers' fast path (`grouped_mm`) copies every token once for each of its experts, sorted by expert, multiplies groups, weighs
and sorts back: some twenty passes over copies that together are as large as eight layers' inputs, and autograd keeps six of them.
Here the same is written out, forward and backward:

    forward     copies sorted by expert, gate and up in one grouped product, the gated product, down; a token adds its weighted
                copies in one pass
    kept        tokens, and gate and up of the copies
    backward    the gated product again, from what was kept; a weight's gradient is its row's dy · down · product, so that what
                comes out of down is not needed; copies of tokens and of their gradients are made again

It is put in where transformers asks for it (`ExpertsInterface`), so routers, shared experts and hooks stay the model's own. Only
for experts that are gated by silu, without biases, as most are; others keep transformers' own path, and so does a model whose owner
chose another implementation.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import module_holds
from .gated import is_silu
from .token_kernels import TokenKernels
from .unread import nothing

log = logging.getLogger("ithaca")
module_holds(__name__, "tile")

NAME, REPLACED = "ithaca", "grouped_mm"
_UNREAD = ContextVar("experts_unread", default=False)


@contextmanager
def unread_experts(unread: bool) -> Iterator[None]:
    """Of a block that runs in here, experts are only differentiated. The block is the model's own code: this goes past it."""
    before = _UNREAD.set(unread)
    try:
        yield
    finally:
        _UNREAD.reset(before)


def use_grouped_experts(modules: Iterable[nn.Module], kernels: TokenKernels) -> None:
    """Let the experts among these modules be computed here."""
    configs: dict[int, Any] = {}
    experts: Any
    for experts in modules:
        config: Any = getattr(experts, "config", None)
        if not hasattr(experts, "has_gate") or getattr(config, "_experts_implementation", None) not in (REPLACED, NAME):
            continue
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
        if experts.config._experts_implementation != NAME:  # of their own: other models may share the config
            own = configs.setdefault(id(config), copy.copy(config))
            own._experts_implementation_internal = NAME  # the public name goes on to the configs inside
            experts.config = own
        experts._kernels_of_ithaca = kernels


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    if not _plain(module, hidden_states):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    kernels = getattr(module, "_kernels_of_ithaca", None) or TokenKernels()
    weights = module.gate_up_proj, module.down_proj
    return _Experts.apply(hidden_states, top_k_weights, *weights, top_k_index, kernels)  # pyright: ignore[reportReturnType]


def _plain(module: Any, x: Tensor) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and "_apply_gate" not in vars(module)
        and is_silu(module.act_fn)
        and x.dtype == module.gate_up_proj.dtype == module.down_proj.dtype
        and x.dtype in (torch.bfloat16, torch.float32)
        and (not x.is_cuda or _agree(x.device))
    )


@cache
def _agree(device: torch.device) -> bool:
    """Whether grouped products and kernels work on this GPU, and answer what plain products do."""
    random = torch.Generator(device).manual_seed(0)
    shapes = (40, 64), (40, 2), (4, 64, 64), (4, 64, 32)  # tokens, their weights, gate and up, down
    given = [torch.randn(shape, device=device, generator=random).bfloat16().requires_grad_() for shape in shapes]
    index = torch.rand(40, 3, device=device, generator=random).topk(2).indices + 1  # to the first expert nobody goes

    def plain(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.einsum("td,ewd->tew", x, gate_up).chunk(2, -1)
        each = torch.einsum("tei,edi->ted", F.silu(gate) * up, down)
        return (each.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)

    try:
        with torch.enable_grad():
            wide = [t.detach().float().requires_grad_() for t in given]
            found, wanted = _Experts.apply(*given, index, TokenKernels()), plain(*wide)
            assert isinstance(found, Tensor)
            up = torch.randn(wanted.shape, device=device, generator=random)
            grads = torch.autograd.grad(found, given, up.bfloat16()), torch.autograd.grad(wanted, wide, up)
        pairs = [(found, wanted), *zip(*grads, strict=True)]
        near = [((ours.float() - exact).norm() / exact.norm()).item() < 0.02 for ours, exact in pairs]  # a NaN is not
        why = None if all(near) else "they do not answer what plain products do"
    except Exception as error:  # of torch, Triton, or the C compiler that it calls
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if why is not None:
        log.warning("experts run as transformers has them, slower and in more memory: %s", why)
    return why is None


class _Experts(torch.autograd.Function):
    """x [t, d], weights and index [t, k], gate_up [E, 2i, d], down [E, d, i] -> [t, d]"""

    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, kernels: TokenKernels
    ):  # fmt: skip
        chosen, order = torch.sort(index.flatten())
        groups = torch.arange(1, len(down) + 1, device=x.device)
        ends = torch.searchsorted(chosen, groups, out_int32=True)  # where each expert's copies end
        place = torch.empty_like(order)  # of the copies of each token, among the sorted
        place[order] = torch.arange(len(order), device=x.device)
        copies = x.index_select(0, order // index.shape[1])
        wide = F.grouped_mm(copies, gate_up.mT, offs=ends)
        del copies
        ctx.save_for_backward(x, weights, gate_up, down, wide, order, place, ends)
        ctx.kernels = kernels
        if _UNREAD.get():
            return nothing(x, x.shape)
        out = F.grouped_mm(expert_product(wide, kernels), down.mT, offs=ends)
        return combine(out, place.view(index.shape), weights, kernels)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, gate_up, down, wide, order, place, ends = ctx.saved_tensors
        kernels, token = ctx.kernels, order // weights.shape[1]
        dcopies = dy.index_select(0, token)
        dproduct = F.grouped_mm(dcopies, down, offs=ends)
        weight = weights.flatten()[order]
        product, dwide, dweight = expert_backward(wide, dproduct, weight, kernels)
        del dproduct
        ddown = F.grouped_mm(dcopies.mT, product, offs=ends) if ctx.needs_input_grad[3] else None
        del product, dcopies
        dx = combine(F.grouped_mm(dwide, gate_up, offs=ends), place.view(weights.shape), None, kernels)
        dgate_up = None
        if ctx.needs_input_grad[2]:
            dgate_up = F.grouped_mm(dwide.mT, x.index_select(0, token), offs=ends)
        return dx, dweight[place].view(weights.shape).to(weights.dtype), dgate_up, ddown, None, None


def expert_product(wide: Tensor, kernels: TokenKernels) -> Tensor:
    """silu(gate) · up of [n, 2i], gate beside up"""
    gate, up = wide.chunk(2, -1)
    return kernels.product(gate, up) if kernels.fuses(wide) else F.silu(gate) * up


def expert_backward(
    wide: Tensor, dproduct: Tensor, weight: Tensor, kernels: TokenKernels
) -> tuple[Tensor, Tensor, Tensor]:
    """dproduct: of the product that was not weighed. -> the product, weighed; gradients of `wide` and of the weights, float32"""
    if kernels.fuses(wide):
        return kernels.expert_backward(wide, dproduct, weight)
    gate, up = wide.chunk(2, -1)
    active = F.silu(gate)
    product = active * up
    dweight = (dproduct.float() * product.float()).sum(-1)
    dproduct = dproduct * weight[:, None]
    dgate = torch.ops.aten.silu_backward(dproduct * up, gate)
    return (product * weight[:, None]).to(wide.dtype), torch.cat((dgate, dproduct * active), -1).to(wide.dtype), dweight


def combine(copies: Tensor, place: Tensor, weights: Tensor | None, kernels: TokenKernels) -> Tensor:
    """copies [n, d], place and weights [t, k] -> the weighted sum of each token's copies [t, d]"""
    if kernels.fuses(copies):
        return kernels.combine(copies, place, weights)
    own = copies.index_select(0, place.flatten()).unflatten(0, place.shape)
    own = own if weights is None else own * weights[..., None]
    return own.sum(1).to(copies.dtype)
