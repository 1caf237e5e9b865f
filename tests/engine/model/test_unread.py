"""What backward computes again, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca import prepare
from ithaca.config.schema import LINEARS
from ithaca.engine.model.gated import gated
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.token_kernels import TokenKernels
from ithaca.stack import Stack
from ithaca.verify.presets import build

TOKENS = 96


class Products(TorchDispatchMode):
    """Counts what matrix products multiply."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            (rows, inner), (_, columns) = (t.shape for t in args[-2:])
            self.count += 2 * rows * inner * columns
        return func(*args, **(kwargs or {}))


def operations(name: str, stack: Stack, lora: int = 0) -> int:
    model: Any = build(preset_config(name), 0)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, target_modules=[*LINEARS]))
    run = prepare(model, stack)
    batch = run.shard(torch.arange(TOKENS)[None] % 64)
    with Products() as products:
        run.loss(batch).backward()
    return products.count


@pytest.mark.parametrize("engine", ["composed", "streamed"])
@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_last_products_are_not_computed_again(name, tile, engine):
    config = preset_config(name)
    plain = operations(name, Stack(recompute="none", tile=None, shard_parameters=False))
    again = operations(name, Stack(recompute="keep_attention", tile=tile, engine=engine, shard_parameters=False))
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    projections = heads * config.head_dim + config.num_attention_heads * config.head_dim  # q, k, v once, and o
    weights = config.hidden_size * (projections + 2 * config.intermediate_size)  # gate and up, not down
    assert again - plain == 2 * TOKENS * config.num_hidden_layers * weights


def test_with_adapters_neither(lora: int = 2):
    """Their own products are made again, but for the last one's; what their first matrices make is needed for gradients."""
    config = preset_config("llama3")
    plain = operations("llama3", Stack(recompute="none", tile=None, shard_parameters=False), lora)
    again = operations("llama3", Stack(recompute="keep_attention", tile=None, shard_parameters=False), lora)
    q, kv = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    d, i = config.hidden_size, config.intermediate_size
    weights = d * (q + 2 * kv) + d * q + 2 * d * i  # q, k, v once, and o; gate and up
    # of their adapters all; of q, k, v once more the first
    adapters = lora * ((3 * d + q + 2 * kv) + (q + d) + 2 * (d + i) + 3 * d)
    assert again - plain == 2 * TOKENS * config.num_hidden_layers * (weights + adapters)


def test_what_is_unread_is_not_a_number_and_has_the_same_gradients():
    model = build(preset_config("llama3"), 0)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 7, model.config.hidden_size, requires_grad=True)
    dy = torch.randn(1, 7, model.config.hidden_size)
    found = []
    for value in (mlp(x), gated(mlp, x, TokenKernels(), False, unread=True)):
        found.append((value, torch.autograd.grad(value, [x, *mlp.parameters()], dy)))
    (right, grads), (value, ours) = found
    assert torch.isfinite(right).all() and torch.isnan(value).all() and value.shape == right.shape
    for grad, own in zip(grads, ours, strict=True):
        torch.testing.assert_close(own, grad, rtol=1e-5, atol=1e-6)
