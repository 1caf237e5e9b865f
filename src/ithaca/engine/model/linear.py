"""A linear, or some of its rows, with its LoRA adapters, in as few passes over memory as there are products.

PEFT computes `W x + scale · B (A x)` as four steps, of which three pass over something as wide as the linear's output, for all of
the linears of a layer, and again in backward. Here an adapter's product is added inside of the matrix product, forward and
backward, so what it costs is its multiplications: a hundredth of the linear's. It also rounds less often.

Several linears of one input are differentiated together: their gradients of it add up inside of the products too. A linear that is
only to be differentiated (unread.py) does not multiply its weight at all.

The rows are leaves of autograd, so that a tile's backward yields gradients of the slice, not of the whole matrix;
`Gradients.add_leaves` puts them in their place. Linears that are neither plain nor PEFT's LoRA on a plain one run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.holding import CALLER, holds, module_holds
from .tokenwise import HOOKS
from .unread import nothing

module_holds(__name__, "tile")


@dataclass
class Leaf:
    """What autograd differentiates by in place of a parameter: the parameter itself, or some of its rows."""

    parameter: Tensor
    value: Tensor
    rows: Tensor | slice | None = None


class Adapter(NamedTuple):
    """Where an adapter's parts are among the values of its linear. A as PEFT calls it is `down`, B is `up`."""

    up: int
    bias: int | None  # of `up`
    down: int
    scale: float


class Parts(NamedTuple):
    """Where a linear's parts are among its values."""

    weight: int
    bias: int | None
    adapters: tuple[Adapter, ...]

    def behind(self, count: int) -> Parts:
        """The same with so many other values before them."""

        def moved(index: int | None) -> Any:
            return None if index is None else index + count

        adapters = (Adapter(moved(up), moved(bias), moved(down), scale) for up, bias, down, scale in self.adapters)
        return Parts(moved(self.weight), moved(self.bias), tuple(adapters))


@dataclass
class BoundLinear:
    """A linear, or some of its rows, as a function of its leaves."""

    leaves: list[Leaf]
    parts: Parts
    sink: Callable[[Tensor, Tensor], None] | None = None
    """Of a plain one: takes gradient and input of each call, of whose product the weight's gradient is the sum."""

    @holds(CALLER)  # the head's output is the loss's business
    def __call__(self, x: Tensor) -> Tensor:
        if self.sink is not None:
            return _Sunk.apply(x, *self.plain_parameters(), self.sink)  # pyright: ignore[reportReturnType]
        return linears(x, [self])[0]

    @property
    def values(self) -> list[Tensor]:
        return [leaf.value for leaf in self.leaves]

    @property
    def plain(self) -> bool:
        """No adapter."""
        return not self.parts.adapters

    def plain_parameters(self) -> tuple[Tensor, Tensor | None]:
        weight, bias, _ = self.parts
        return self.leaves[weight].value, None if bias is None else self.leaves[bias].value


@holds(CALLER)
def linears(x: Tensor, bound: Sequence[BoundLinear], unread: bool = False) -> tuple[Tensor, ...]:
    """x [..., d] through each of them. unread: only to be differentiated."""
    if not torch.is_grad_enabled():
        return tuple(multiplied(x, each.parts, each.values, lowered(x, each.parts, each.values)) for each in bound)
    parts, values = [], []
    for each in bound:
        parts.append(each.parts.behind(len(values)))
        values += each.values
    return _Linears.apply(x, unread, tuple(parts), *values)  # pyright: ignore[reportReturnType]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, unread: bool, linears: tuple[Parts, ...], *values: Tensor) -> tuple[Tensor, ...]:
        lows = [lowered(x, parts, values) for parts in linears]
        flat = [low for of_one in lows for low in of_one]
        learns = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(x if learns else None, *values, *flat)
        ctx.linears, ctx.shape = linears, x.shape
        ctx.set_materialize_grads(False)
        if unread:
            return tuple(nothing(x, (*x.shape[:-1], len(values[parts.weight]))) for parts in linears)
        return tuple(multiplied(x, parts, values, low) for parts, low in zip(linears, lows, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):  # pyright: ignore
        wants_x, learns = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        x, *values = ctx.saved_tensors
        values, lows = values[: len(learns)], values[len(learns) :]
        flat = None if x is None else x.flatten(0, -2)
        dx, dvalues = None, [None] * len(learns)
        for grad, parts in zip(grads, ctx.linears, strict=True):
            own, lows = lows[: len(parts.adapters)], lows[len(parts.adapters) :]
            if grad is None:
                continue
            rows = grad.flatten(0, -2)
            dlows = lowered_gradients(rows, parts, values)
            dx = by_input(rows, dlows, parts, values, dx) if wants_x else None
            if flat is not None:
                by_values(rows, flat, own, dlows, parts, learns, dvalues)
        return None if dx is None else dx.view(ctx.shape), None, None, *dvalues


# -- the products: rows are of [tokens, out], flat ones of [tokens, in], low ones of [tokens, rank] -----------------------


def lowered(x: Tensor, parts: Parts, values: Sequence[Tensor]) -> list[Tensor]:
    """What comes out of each adapter's first matrix."""
    return [F.linear(x, values[adapter.down]).flatten(0, -2) for adapter in parts.adapters]


def multiplied(x: Tensor, parts: Parts, values: Sequence[Tensor], lows: Sequence[Tensor]) -> Tensor:
    out = F.linear(x, values[parts.weight], None if parts.bias is None else values[parts.bias])
    rows = out.view(-1, out.shape[-1])
    for low, adapter in zip(lows, parts.adapters, strict=True):
        rows.addmm_(low, values[adapter.up].t(), alpha=adapter.scale)
        if adapter.bias is not None:
            rows.add_(values[adapter.bias], alpha=adapter.scale)
    return out


def lowered_gradients(rows: Tensor, parts: Parts, values: Sequence[Tensor]) -> list[Tensor]:
    return [(rows @ values[adapter.up]).mul_(adapter.scale) for adapter in parts.adapters]


def by_input(
    rows: Tensor, dlows: Sequence[Tensor], parts: Parts, values: Sequence[Tensor], dx: Tensor | None = None
) -> Tensor:
    """The gradient of the input, added to that of others."""
    weight = values[parts.weight]
    dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
    for dlow, adapter in zip(dlows, parts.adapters, strict=True):
        dx.addmm_(dlow, values[adapter.down])
    return dx


def by_values(
    rows: Tensor, flat: Tensor, lows: Sequence[Tensor], dlows: Sequence[Tensor], parts: Parts, learns: Sequence[bool],
    into: list[Any],
) -> None:  # fmt: skip
    """Gradients of those values that learn."""

    def put(index: int | None, made: Callable[[], Tensor]) -> None:
        if index is not None and learns[index]:
            into[index] = made()

    put(parts.weight, lambda: rows.t() @ flat)
    put(parts.bias, lambda: rows.sum(0))
    for low, dlow, adapter in zip(lows, dlows, parts.adapters, strict=True):
        put(adapter.up, lambda low=low, adapter=adapter: (rows.t() @ low).mul_(adapter.scale))
        put(adapter.bias, lambda adapter=adapter: rows.sum(0).mul_(adapter.scale))
        put(adapter.down, lambda dlow=dlow: dlow.t() @ flat)


class _Sunk(torch.autograd.Function):
    """A linear whose weight has its gradient elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        ctx.sink(rows, x.flatten(0, -2))
        return (rows @ weight).view(x.shape), None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


# -- from a module ----------------------------------------------------------------------------------------------------------


def bind_linear(linear: Any, rows: Tensor | slice | None = None) -> BoundLinear:
    """rows: output features to take, None = all (then the parameters themselves are the leaves)."""
    leaves: list[Leaf] = []

    def leaf(parameter: Tensor, cut: bool = True) -> int:
        if rows is None:
            leaves.append(Leaf(parameter, parameter))
        elif not cut:  # a leaf of its own: q, k and v may share an adapter's A, and each has its part of the gradient
            leaves.append(Leaf(parameter, parameter.detach().requires_grad_(parameter.requires_grad)))
        else:
            whole = parameter.detach()
            value = whole[rows] if isinstance(rows, slice) else whole.index_select(0, rows)
            leaves.append(Leaf(parameter, value.requires_grad_(parameter.requires_grad), rows))
        return len(leaves) - 1

    def bias_of(module: Any) -> int | None:
        return None if module.bias is None else leaf(module.bias)

    base, adapters = getattr(linear, "base_layer", linear), []
    weight, bias = leaf(base.weight), bias_of(base)
    if base is not linear and not linear.disable_adapters:
        for name in linear.active_adapters:
            if name in linear.lora_A:
                down, up = linear.lora_A[name], linear.lora_B[name]
                adapters.append(
                    Adapter(leaf(up.weight), bias_of(up), leaf(down.weight, cut=False), linear.scaling[name])
                )
    return BoundLinear(leaves, Parts(weight, bias, tuple(adapters)))


def apply_linear(linear: Any, x: Tensor) -> Tensor:
    """linear(x), with its adapters inside of the product where nobody has changed either."""
    return bind_linear(linear)(x) if has_adapters(linear) and unchanged(linear) else linear(x)


def has_adapters(linear: nn.Module) -> bool:
    return type(linear) is not nn.Linear and linear_violation(linear, "") is None


# What modules are made of, looked up once. Held weakly: parameters of a part lead to FSDP2's records, and these to the whole model.
_PARTS: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()


def unchanged(module: nn.Module) -> bool:
    """Nothing in it is hooked or patched. That a prepared model is still of the same modules is seen elsewhere (fingerprint.py)."""
    if module not in _PARTS:
        _PARTS[module] = [ref(part) for part in module.modules()]
    for known in _PARTS[module]:
        part = known()
        if part is None or "forward" in (own := vars(part)):
            return False
        for hooks in HOOKS:
            if own[hooks]:
                return False
    return True


def linear_violation(linear: nn.Module, name: str) -> str | None:
    """Why the rows of this module cannot be taken one by one, or None."""
    if type(linear) is nn.Linear:
        return None
    kind = f"{type(linear).__module__}.{type(linear).__name__}"
    if not (kind.startswith("peft.tuners.lora") and hasattr(linear, "base_layer")):
        return (
            f"{name} is a {kind}; only torch.nn.Linear and PEFT LoRA on it are supported: remove or merge the wrapper"
        )
    return lora_violation(linear, name)


def lora_violation(linear: Any, name: str) -> str | None:
    if type(linear.base_layer) is not nn.Linear:
        kind = type(linear.base_layer).__name__
        return (
            f"{name} has an adapter on {kind}, whose rows cannot be taken one by one; load the base in bf16, and for QLoRA use "
            "quantize='nf4'"
        )
    return adapter_violation(linear, name)


def adapter_violation(module: Any, name: str) -> str | None:
    """What no adapter may have, wherever it sits."""
    if module.merged:
        return f"{name} has merged adapters; call model.unmerge_adapter() first"
    for adapter in module.active_adapters:
        if adapter not in getattr(module, "lora_A", {}):
            continue
        dropout = module.lora_dropout[adapter]
        if isinstance(dropout, nn.Dropout) and dropout.p > 0:
            return f"{name} has lora_dropout={dropout.p}, which makes results random; set lora_dropout=0.0"
        if module.use_dora.get(adapter) or getattr(module, "lora_variant", {}).get(adapter) is not None:
            return f"{name} uses a LoRA variant (DoRA or similar) that is not row-wise; use plain LoRA"
    return None
