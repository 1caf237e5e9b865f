"""Masks are read from transformers' own functions, and whoever asks for more than a rule says is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import masking_utils as masks

from ithaca.engine.attention.interface import Rule, Unread, Unsupported, attention, current, mask, read_rule

CAUSAL = masks.causal_mask_function
NO_PADDING = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (CAUSAL, Rule()),
        (masks.sliding_window_causal_mask_function(5), Rule(window=5)),
        (masks.sliding_window_causal_mask_function(1), Rule(window=1)),
        (masks.sliding_window_causal_mask_function(131072), Rule(window=131072)),
        (masks.chunked_causal_mask_function(8192, NO_PADDING), Rule(chunk=8192)),
        (masks.and_masks(CAUSAL, masks.sliding_window_overlay(7)), Rule(window=7)),
        (
            masks.and_masks(masks.sliding_window_overlay(3), masks.sliding_window_causal_mask_function(9)),
            Rule(window=3),
        ),
    ],
)
def test_a_rule_says_what_the_function_says(function: Any, rule: Rule):
    assert read_rule(function) == rule
    q, k = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    zero = torch.zeros_like(q)
    assert torch.equal(rule(q, k), torch.as_tensor(function(zero, zero, q, k)).expand(q.shape))


@pytest.mark.parametrize(
    "function",
    [
        masks.bidirectional_mask_function,
        masks.sliding_window_causal_mask_function(0),  # Qwen2-MoE makes one, for layers that it does not have
        masks.or_masks(CAUSAL, lambda b, h, q, k: k < 4),  # a prefix that everybody sees
        masks.and_masks(CAUSAL, lambda b, h, q, k: (q - k) % 2 == 0),
        masks.chunked_causal_mask_function(16, torch.tensor([3])),  # rows with padding at their beginning
    ],
)
def test_other_masks_are_no_rule(function: Any):
    with pytest.raises(Unsupported, match="neither causal nor a sliding window nor chunks"):
        read_rule(function)
    assert isinstance(mask(mask_function=function), Unread), "an error only where somebody attends with it"


class Layer(nn.Module):
    is_causal = True


def call(module: nn.Module | None = None, mask: Any = None, **more: Any) -> Any:
    q = torch.randn(1, 2, 3, 4)
    return attention(module or Layer(), q, q, q, Rule() if mask is None else mask, **more)


def test_what_a_layer_asks_for():
    asked: list[Any] = []

    def attend(q: Any, k: Any, v: Any, sinks: Any, what: Any) -> Any:
        asked.append((sinks, what.rule, what.scale, what.softcap))
        return q

    sinks = torch.zeros(2)
    with current(attend):
        call(scaling=0.3, softcap=20.0, s_aux=sinks, sliding_window=7, position_ids=torch.arange(3))
        call(mask=Rule(window=2))
    assert asked == [(sinks, Rule(), 0.3, 20.0), (None, Rule(window=2), 0.5, None)], (
        "a window in an argument is not believed"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mask": torch.zeros(1, 1, 3, 3)},
            "attends with a Tensor that does not come from transformers' mask functions",
        ),
        ({"mask": Unread("makes a mask that")}, "makes a mask that"),
        ({"dropout": 0.1}, "drops 10% of its attention at random"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias to its attention function"),
        ({"module": type("Both", (nn.Module,), {"is_causal": False})()}, "only causal attention"),
    ],
)
def test_what_it_may_not_ask_for(changes: dict[str, Any], said: str):
    with current(lambda *_: torch.zeros(())), pytest.raises(Unsupported, match=said):
        call(**changes)


def test_outside_of_a_run():
    with pytest.raises(RuntimeError, match="outside of a run"):
        call()
