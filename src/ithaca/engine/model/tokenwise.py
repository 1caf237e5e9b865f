"""Does a module treat every token alike, by itself, and the same way each time?

Tiles, ranks and recompute rest on it: a norm, an MLP, an output projection or an embedding is called on some of the tokens, in
forward and again in backward. Those of transformers do; a module that its owner replaced, patched or hooked may not. So such a
module is tried on a few random tokens: two calls agree; a token's result does not change with its place, its
company or the number of tokens; no gradient reaches another token. What cannot be tried is not believed. A hook that collects
what it sees does so into copies of its lists meanwhile.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# How far results of differently shaped calls may differ, relative to the largest. A mean over tokens is off by far more.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_ELSEWHERE = 5e-2
_TOKENS = 6

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook",
)  # fmt: skip


def mixing(module: nn.Module, x: Tensor, function: Callable[[Tensor], Any] | None = None) -> str | None:
    """Why a module does not treat the tokens of x [2, n, ...] alike, or None. Never raises. function: called in its place."""
    try:
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad(), _collecting_apart(module):
            return _mixing(lambda x: _first((function or module)(x)), x.detach())
    except Exception as error:  # somebody else's code raises whatever it likes
        return f"failed when it was tried on an input of shape {list(x.shape)} ({type(error).__name__}: {error})"


def _first(result: Any) -> Any:
    """An MLP with experts may return more beside what goes on (gpt-oss)."""
    return result[0] if isinstance(result, tuple) and result else result


def _mixing(function: Callable[[Tensor], Any], x: Tensor) -> str | None:
    y = function(x)
    if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
        what = f"a tensor of shape {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        return f"returned {what} for an input of shape {list(x.shape)}"
    if not torch.equal(y, function(x)):
        return "gave two results for one input, so what backward computes again would be another"
    order = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    company = x.clone()
    company[:, 1:] = x[:, 1:].flip(1) * 64 if x.is_floating_point() else x[:, 1:].flip(1)
    for other, expected, what in (
        (function(x[:, order]), y[:, order], "depends on the place of a token in its tile"),
        (function(x[:, :1]), y[:, :1], "depends on how many tokens there are"),
        (function(x[:1]), y[:1], "depends on how many rows there are"),
        (function(company)[:, :1], y[:, :1], "depends on the other tokens"),
    ):
        if not _close(other, expected):
            return f"gives a result that {what}"
    return _leak(function, x) if x.is_floating_point() else None


def _leak(function: Callable[[Tensor], Any], x: Tensor) -> str | None:
    """Gradients of one token, by all of them."""
    x = x.clone().requires_grad_()
    y = function(x)
    if not y.requires_grad:
        return "passes no gradient on"
    weight = torch.randn_like(y[:, :1])
    (grad,) = torch.autograd.grad((y[:, :1] * weight).sum(), x)
    alone = x[:, :1].detach().requires_grad_()
    (alone_grad,) = torch.autograd.grad((function(alone) * weight).sum(), alone)
    if grad[:, 1:].count_nonzero() or not _close(alone_grad, grad[:, :1]):
        return "passes gradients of one token on to others"
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    limit = _ROUNDING.get(b.dtype, _ROUNDING_ELSEWHERE)
    return a.shape == b.shape and bool((a - b).abs().max() <= limit * b.abs().max())


@contextmanager
def _collecting_apart(module: nn.Module) -> Iterator[None]:
    """Hooks of the module and of all inside work on copies of the lists and tables they hold."""
    tables = [getattr(part, name) for part in module.modules() for name in HOOKS]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({key: _on_copies(hook) for key, hook in table.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _on_copies(hook: Any) -> Any:
    if not isinstance(hook, FunctionType):
        return hook
    cells = tuple(CellType(_copied(cell.cell_contents)) for cell in hook.__closure__ or ())
    defaults = tuple(map(_copied, hook.__defaults__ or ()))
    return FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, cells)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value


def sample(module: nn.Module, width: int, heads: int | None = None) -> Tensor:
    """An input to try a module on: [2, tokens, width], [2, tokens, heads, width], or token ids for an embedding."""
    parameter = next(module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    device = "cpu" if parameter is None else parameter.device
    generator = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Embedding):
        ids = torch.randint(0, module.num_embeddings, (2, _TOKENS), generator=generator)
        return ids.to(device)
    shape = (2, _TOKENS, width) if heads is None else (2, _TOKENS, heads, width)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


class Stand(nn.Module):
    """The hooks of a module around a stand-in for its forward: what its weights are does not matter to them, and once they are
    sharded it could not be called."""

    def __init__(self, module: nn.Module, into: int, out: int) -> None:
        super().__init__()
        object.__setattr__(self, "_real", module)
        self._added: dict[str, set[int]] = {}
        generator = torch.Generator().manual_seed(1)
        rows = module.num_embeddings if isinstance(module, nn.Embedding) else into
        self._map = torch.randn(rows, out, generator=generator) * into**-0.5
        for name in _HOOK_OPTIONS:
            object.__setattr__(self, name, getattr(module, name))

    def only(self, added: dict[str, set[int]]) -> Stand:
        """With these hooks alone: the others are FSDP2's, or known already."""
        self._added = added
        return self

    def __call__(self, x: Tensor) -> Tensor:
        for name, keys in self._added.items():  # as they are now: on copies, while they are tried
            hooks = getattr(object.__getattribute__(self, "_real"), name)
            object.__setattr__(self, name, {key: hook for key, hook in hooks.items() if key in keys})
        return super().__call__(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_real"), name)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._map.to(x) if x.is_floating_point() else self._map.to(x.device)[x]
