"""Experts of a mixture in grouped matrix products, with few passes over memory.

transformers' fast path (`grouped_mm`) copies every token once for each of its experts, sorted by expert, multiplies groups, weighs
and sorts back: some twenty passes over copies that together are as large as eight layers' inputs, and autograd keeps six of them.
Here the same is written out, forward and backward:

    forward     copies sorted by expert, gate and up in one grouped product, the gated product, down; a token adds its weighted
                copies in one pass
    kept        tokens, and gate and up of the copies
    backward    the gated product again, from what was kept; a weight's gradient is its row's dy · down · product, so that what
                comes out of down is not needed; copies of tokens and of their gradients are made again

PEFT's adapters on experts make another weight of each expert, W + B A, and want the gradient of all of it: as much memory and as
many operations as if experts were trained whole. Here adapters are grouped products of their own, of the adapter's rank.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...base.holding import module_holds
from .gated import backward_of_both, is_silu, product_of_both
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

    gate_up, down = (_weight(module, name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None or not _plain(module, hidden_states, gate_up, down):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    kernels = getattr(module, "_kernels_of_ithaca", None) or TokenKernels()
    return _experts(hidden_states, top_k_weights, gate_up, down, top_k_index, kernels)


class _Weight(NamedTuple):
    """Of all experts [E, out, in]; and of an adapter, where there is one, up [E, out, r] and down [E, r, in]."""

    base: Tensor
    up: Tensor | None = None
    down: Tensor | None = None
    scale: float = 1.0


def _weight(module: Any, name: str) -> _Weight | None:
    """None where it is something else that only its owner can make."""
    if not parametrize.is_parametrized(module, name):
        own = getattr(module, name, None)  # experts without a gate have another (Nemotron-H)
        return None if own is None else _Weight(own)
    made = module.parametrizations[name]
    proxy: Any = made[0]
    # while PEFT runs experts with one adapter, it lets this stand for the weight, which nobody has asked for yet
    if len(made) > 1 or type(proxy).__name__ != "_LoraFactorsProxy" or not type(proxy).__module__.startswith("peft."):
        return None
    if made.original.dim() != 3:
        return None
    short = -proxy.rhs.shape[1] % (
        16 // proxy.rhs.element_size()
    )  # rows of whole 16 bytes, as grouped products want them
    up, down = F.pad(proxy.lhs, (0, short)).contiguous(), F.pad(proxy.rhs, (0, 0, 0, short)).contiguous()
    return _Weight(made.original, up, down, proxy.scaling)


def _plain(module: Any, x: Tensor, gate_up: _Weight, down: _Weight) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and "_apply_gate" not in vars(module)
        and is_silu(module.act_fn)
        and all(t is None or t.dtype == x.dtype for t in (*gate_up[:3], *down[:3]))
        and x.dtype in (torch.bfloat16, torch.float32)
        and (not x.is_cuda or _agree(x.device, gate_up.up is not None or down.up is not None))
    )


@cache
def _agree(device: torch.device, adapted: bool) -> bool:
    """Whether grouped products and kernels work on this GPU, and answer what plain products do."""
    random = torch.Generator(device).manual_seed(0)
    shapes = [(40, 64), (40, 2), (4, 64, 64), (4, 64, 32)]  # tokens, their weights, gate and up, down
    if adapted:  # up and down of either
        shapes += [(4, 64, 8), (4, 8, 64), (4, 64, 8), (4, 8, 32)]
    given = [torch.randn(shape, device=device, generator=random).bfloat16().requires_grad_() for shape in shapes]
    index = torch.rand(40, 3, device=device, generator=random).topk(2).indices + 1  # to the first expert nobody goes

    def of(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        own = _Weight(gate_up, *factors[:2], scale=0.5), _Weight(down, *factors[2:], scale=0.5)
        return _experts(x, weights, *own, index, TokenKernels())

    def plain(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        if factors:
            gate_up, down = gate_up + 0.5 * factors[0] @ factors[1], down + 0.5 * factors[2] @ factors[3]
        gate, up = torch.einsum("td,ewd->tew", x, gate_up).chunk(2, -1)
        each = torch.einsum("tei,edi->ted", F.silu(gate) * up, down)
        return (each.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)

    try:
        with torch.enable_grad():
            wide = [t.detach().float().requires_grad_() for t in given]
            found, wanted = of(*given), plain(*wide)
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


def _experts(
    x: Tensor, weights: Tensor, gate_up: _Weight, down: _Weight, index: Tensor, kernels: TokenKernels
) -> Tensor:
    scales, factors = (gate_up.scale, down.scale), (gate_up.up, gate_up.down, down.up, down.down)
    return _Experts.apply(x, weights, gate_up.base, down.base, *factors, index, kernels, scales)  # pyright: ignore[reportReturnType]


class _Experts(torch.autograd.Function):
    """x [t, d], weights and index [t, k], gate_up [E, 2i, d], down [E, d, i], and their adapters -> [t, d]"""

    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, wide_up: Tensor | None, wide_down: Tensor | None,
        out_up: Tensor | None, out_down: Tensor | None, index: Tensor, kernels: TokenKernels, scales: tuple[float, float],
    ):  # fmt: skip
        chosen, order = torch.sort(index.flatten())
        groups = torch.arange(1, len(down) + 1, device=x.device)
        ends = torch.searchsorted(chosen, groups, out_int32=True)  # where each expert's copies end
        place = torch.empty_like(order)  # of the copies of each token, among the sorted
        place[order] = torch.arange(len(order), device=x.device)
        copies = x.index_select(0, order // index.shape[1])
        wide = F.grouped_mm(copies, gate_up.mT, offs=ends)
        low = _lowered(copies, wide_down, ends)
        del copies
        _add(wide, low, wide_up, ends, scales[0])
        factors = wide_up, wide_down, out_up, out_down
        ctx.save_for_backward(x, weights, gate_up, down, *factors, wide, low, order, place, ends)
        ctx.kernels, ctx.scales = kernels, scales
        if _UNREAD.get():
            return nothing(x, x.shape)
        product = product_of_both(wide, kernels)
        out = F.grouped_mm(product, down.mT, offs=ends)
        _add(out, _lowered(product, out_down, ends), out_up, ends, scales[1])
        del product
        return combine(out, place.view(index.shape), weights, kernels)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, gate_up, down, wide_up, wide_down, out_up, out_down, wide, low, order, place, ends = (
            ctx.saved_tensors
        )
        kernels, token, learns = ctx.kernels, order // weights.shape[1], ctx.needs_input_grad
        of_wide, of_out = ctx.scales
        dcopies = dy.index_select(0, token)
        dproduct = F.grouped_mm(dcopies, down, offs=ends)
        dlow = _lowered_gradient(dcopies, out_up, ends, of_out)
        _add(dproduct, dlow, None if out_down is None else out_down.mT, ends)
        weight = weights.flatten()[order]
        product, dwide, dweight = backward_of_both(wide, dproduct, weight, kernels)
        del dproduct
        ddown = F.grouped_mm(dcopies.mT, product, offs=ends) if learns[3] else None
        dout_up, dout_down = _by_factors(dcopies, product, _lowered(product, out_down, ends), dlow, ends, of_out)
        del product, dcopies
        dcopies = F.grouped_mm(dwide, gate_up, offs=ends)
        dlow = _lowered_gradient(dwide, wide_up, ends, of_wide)
        _add(dcopies, dlow, None if wide_down is None else wide_down.mT, ends)
        dx = combine(dcopies, place.view(weights.shape), None, kernels)
        del dcopies
        dgate_up = dwide_up = dwide_down = None
        if learns[2] or wide_up is not None:
            copies = x.index_select(0, token)
            dgate_up = F.grouped_mm(dwide.mT, copies, offs=ends) if learns[2] else None
            dwide_up, dwide_down = _by_factors(dwide, copies, low, dlow, ends, of_wide)
        dweight = dweight[place].view(weights.shape).to(weights.dtype)
        return dx, dweight, dgate_up, ddown, dwide_up, dwide_down, dout_up, dout_down, None, None, None


# -- adapters: rows sorted by expert through each one's down [E, r, in] and up [E, out, r]; nothing where there is none -------


def _lowered(rows: Tensor, down: Tensor | None, ends: Tensor) -> Tensor | None:
    return None if down is None else F.grouped_mm(rows, down.mT, offs=ends)


def _lowered_gradient(grads: Tensor, up: Tensor | None, ends: Tensor, scale: float) -> Tensor | None:
    return None if up is None else F.grouped_mm(grads, up, offs=ends).mul_(scale)


def _add(into: Tensor, low: Tensor | None, up: Tensor | None, ends: Tensor, scale: float = 1.0) -> None:
    if low is not None and up is not None:
        into.add_(F.grouped_mm(low, up.mT, offs=ends), alpha=scale)


def _by_factors(
    grads: Tensor, rows: Tensor, low: Tensor | None, dlow: Tensor | None, ends: Tensor, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of up and down."""
    if low is None or dlow is None:
        return None, None
    return F.grouped_mm(grads.mT, low, offs=ends).mul_(scale), F.grouped_mm(dlow.mT, rows, offs=ends)


def combine(copies: Tensor, place: Tensor, weights: Tensor | None, kernels: TokenKernels) -> Tensor:
    """copies [n, d], place and weights [t, k] -> the weighted sum of each token's copies [t, d]"""
    if kernels.fuses(copies):
        return kernels.combine(copies, place, weights)
    own = copies.index_select(0, place.flatten()).unflatten(0, place.shape)
    own = own if weights is None else own * weights[..., None]
    return own.sum(1).to(copies.dtype)
