"""Our attention inside a model's own code, by the two doors that transformers has for it.

Models ask `AttentionMaskInterface` for a mask and `AttentionInterface` for the function that attends. Under the name "ithaca" the
first gives back a `Rule`, which says in words what the mask function says for every pair of tokens, and the second hands
q, k and v to whoever computes this layer (`current`). What a model says of its mask elsewhere, in an argument of the call or a
setting, is not believed: Qwen2-MoE passes a window to layers that have none.

A mask is read by its function. The numbers that it closes over are candidates for a window or a chunk; the one that agrees with it
on pairs of tokens around every edge is taken, and where none does the mask is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

NAME = "ithaca"
_PAIRS = 4096
# arguments of the attention function that say nothing of what is computed: positions are in q and k already, masks come as rules
_SILENT = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "sliding_window", "is_causal", "position_embeddings", "past_key_values", "past_key_value", "return_dict", "labels",
    "num_items_in_batch", "layer_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep",
}  # fmt: skip


class Unsupported(ValueError):
    """What a model asks of attention cannot be done here."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees: those before it in its document, and of these the last `window`, or those of its own `chunk`."""

    window: int | None = None
    chunk: int | None = None

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q
        if self.window is not None:
            seen &= q - k < self.window
        if self.chunk is not None:
            seen &= q // self.chunk == k // self.chunk
        return seen


@dataclass(frozen=True)
class Unread:
    """A mask that no rule says. Only an error where somebody attends with it: models make masks that none of their layers uses."""

    why: str


@dataclass(frozen=True)
class Asked:
    """What a layer asks for, beside q, k and v."""

    rule: Rule
    scale: float
    softcap: float | None
    module: nn.Module


Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Asked], Tensor]
_current: ContextVar[Attend | None] = ContextVar("attend", default=None)


@contextmanager
def current(attend: Attend) -> Iterator[None]:
    """Inside, attention of whatever model runs in this thread is done by `attend(q, k, v, sinks, asked)` -> [B, s, H, D]."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def in_run() -> bool:
    """Whether a layer is being computed for a run, in this thread."""
    return _current.get() is not None


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that its modules look at to find their attention."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


@contextmanager
def attending(configs: list[Any]) -> Iterator[None]:
    """Inside, the modules that look at these configs ask for our attention and our masks."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    for config, _ in before:
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls."""
    attend = _current.get()
    kind = type(module).__name__
    if attend is None:
        raise RuntimeError(
            f"{kind} was called with ithaca's attention outside of a run; use the run that prepare returned"
        )
    if isinstance(attention_mask, Unread):
        raise Unsupported(f"{kind}: {attention_mask.why}")
    if not isinstance(attention_mask, Rule):
        got = "no mask" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise Unsupported(f"{kind} attends with {got} that does not come from transformers' mask functions")
    if dropout:
        raise Unsupported(f"{kind} drops {dropout:.0%} of its attention at random; set attention_dropout to 0.0")
    if getattr(module, "is_causal", True) is False:
        raise Unsupported(f"{kind} says is_causal=False, but only causal attention is supported")
    for name, given in others.items():
        if given is not None and given is not False and name not in _SILENT:
            raise Unsupported(f"{kind} passes {name} to its attention function, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = Asked(attention_mask, scale, None if softcap is None else float(softcap), module)
    return attend(query, key, value, s_aux, asked), None


def mask(mask_function: Callable[..., Any], **_: Any) -> Rule | Unread:
    """What transformers' mask functions call. Padding and documents are the run's business, so neither is part of the rule."""
    key = _key(mask_function)
    if key not in _rules:
        try:
            with _disable_current_modes():  # in a dry run too it is numbers that answer
                _rules[key] = read_rule(mask_function)
        except Unsupported as error:
            _rules[key] = Unread(str(error))
    return _rules[key]


_rules: dict[Any, Rule | Unread] = {}


def read_rule(mask_function: Callable[..., Any]) -> Rule:
    """The rule that says what this function says."""
    numbers = sorted({n for n in _numbers(mask_function) if n >= 1})
    rules = [Rule(), *(Rule(window=n) for n in numbers), *(Rule(chunk=n) for n in numbers)]
    q, k = _samples([*numbers, 64])
    zero = torch.zeros_like(q)
    said = torch.as_tensor(mask_function(zero, zero, q, k))
    for rule in rules:
        if torch.equal(rule(q, k), said.expand(q.shape)):
            return rule
    name = getattr(mask_function, "__qualname__", mask_function)
    raise Unsupported(f"{name} makes a mask that is neither causal nor a sliding window nor chunks")


def _samples(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Pairs of tokens: next to each edge that one of the numbers could make, and anywhere."""
    chosen = random.Random(0)
    pairs = []
    for number in numbers:
        for _ in range(_PAIRS // len(numbers)):
            q = chosen.randrange(4 * number + 8)
            edges = [q, q - number, q // number * number]
            near = chosen.choice(edges) + chosen.randint(-2, 2)
            pairs.append((q, max(0, near)))
            pairs.append((q, chosen.randrange(4 * number + 8)))
    q, k = torch.tensor(pairs).T
    return q, k


def _numbers(function: Any, seen: set[int] | None = None) -> Iterator[int]:
    """All whole numbers that a function closes over, also through the functions inside."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, bool):
        return
    if isinstance(function, int):
        yield function
    elif isinstance(function, (tuple, list)):
        for part in function:
            yield from _numbers(part, seen)
    elif isinstance(function, CellType):
        yield from _numbers(function.cell_contents, seen)
    elif isinstance(getattr(function, "__code__", None), CodeType):
        yield from _numbers(function.__closure__ or (), seen)


def _key(function: Any) -> Any:
    """Equal for functions of the same code that close over the same things; tensors count by identity."""
    if isinstance(function, (tuple, list)):
        return tuple(_key(part) for part in function)
    if isinstance(function, CellType):
        return _key(function.cell_contents)
    if isinstance(code := getattr(function, "__code__", None), CodeType):
        return code, _key(function.__closure__ or ())
    if isinstance(function, Tensor):
        return tuple(function.shape), tuple(function.flatten()[:16].tolist()) if function.numel() <= 16 else id(
            function
        )
    return function if isinstance(function, (int, float, str, type(None))) else id(function)
