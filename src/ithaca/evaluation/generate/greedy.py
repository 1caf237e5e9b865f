"""Greedy generation through a prepared model: any stack, any number of ranks, the same tokens as transformers' `generate`.

    answer = generate(run, prompt_ids, most=64, stop=tokenizer.eos_token_id)

The prompt is prefilled once, sharded as in training; then every new token costs one pass over the weights and one over the cached
keys (cache.py). FSDP2 gathers each layer for each token, so a large model answers slowly: seconds a token, whatever the length of
the prompt. That is what it takes to ask a model that only fits sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.batch import Batch
from ...engine.comm import total
from ...engine.layer.apply import run_layer
from ...engine.model.adapter import Decoder
from ...engine.model.linear import bind_linear
from ...engine.model.rope import Positions, Rope
from ...engine.own import OwnDecoder
from ...engine.request import Request
from ...engine.run import Run
from ...storage.state import at_rest
from .cache import LayerCache
from .own import OwnSession


@torch.no_grad()
def generate(run: Run, prompt: Sequence[int], *, most: int, stop: Collection[int] = ()) -> list[int]:
    """The likeliest tokens after `prompt`, at most so many, up to and with one of `stop`. Collective: every rank calls it with the
    same prompt and gets the same tokens."""
    if not prompt or most < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens and {most} new ones: both must be at least 1")
    kind = OwnSession if isinstance(run.decoder, OwnDecoder) else Session
    session = kind(run, len(prompt) + most)
    tokens = [session.prefill(prompt)]
    while len(tokens) < most and tokens[-1] not in stop:
        tokens.append(session.step(tokens[-1]))
    at_rest(run)
    return tokens


class Session:
    """One prompt and its continuation."""

    def __init__(self, run: Run, longest: int) -> None:
        decoder = run.decoder
        assert isinstance(decoder, Decoder)
        self.run, self.decoder = run, decoder
        self.caches = [LayerCache(layer) for layer in decoder.layers]
        self.ropes: dict[str | None, Rope] = {
            kind: decoder.rope(kind, longest) for kind in {layer.rope_type for layer in decoder.layers}
        }
        self.length = 0

    def prefill(self, prompt: Sequence[int]) -> int:
        """-> the token after the prompt"""
        run = self.run
        # every data-parallel group answers the same question; one token more, or a prompt of one had nothing to predict
        ids = torch.tensor([[*prompt, 0]]).expand(run.mesh.data.size, -1)
        self.length = len(prompt)
        return run.decoder.model(Request(lambda: self._prefill(run.shard(ids))))

    def _prefill(self, batch: Batch) -> int:
        run = self.run
        x = self.decoder.embed(batch.input_ids)
        wide = _rope_dtype(run, x)
        places = {kind: Positions(rope, batch.positions, wide) for kind, rope in self.ropes.items()}
        where = batch.positions[0]
        real = where < self.length
        for layer, cache in zip(self.decoder.layers, self.caches, strict=True):
            call = run._layer_call(layer, places[layer.rope_type], batch, x)

            def forward(x: Tensor, layer: Any = layer, cache: LayerCache = cache, call: Any = call) -> Any:
                cache.add(
                    x[:, real], where[real], self.ropes[layer.rope_type], wide
                )  # the layer may overwrite its input
                return run_layer(x, call)

            x = layer.module(x, Request(forward))[0]
        last = x[:1, where == self.length - 1].sum(1, keepdim=True)  # zero on the ranks that do not hold it
        return self._choose(total(total(last, run.mesh.ulysses), run.mesh.ring))

    def step(self, token: int) -> int:
        """-> the token after `token`"""
        return self.run.decoder.model(Request(lambda: self._step(token)))

    def _step(self, token: int) -> int:
        run, place = self.run, self.length
        self.length += 1
        ranks = run.mesh.ulysses.size * run.mesh.ring.size
        owner = run.mesh.ring.rank * run.mesh.ulysses.size + run.mesh.ulysses.rank == place % ranks
        x = self.decoder.embed(torch.tensor([[token]], device=run.mesh.device))
        wide = _rope_dtype(run, x)
        where = torch.tensor([place], device=run.mesh.device)
        for layer, cache in zip(self.decoder.layers, self.caches, strict=True):

            def forward(x: Tensor, layer: Any = layer, cache: LayerCache = cache) -> Tensor:
                rope = self.ropes[layer.rope_type]
                q, k, v = cache.heads(x, where, rope, wide)
                assert q is not None
                if owner:
                    cache.parts.append((k[0].transpose(0, 1), v[0].transpose(0, 1), where[:, None]))
                return layer.after(x, cache.answer(q[0, 0], place, run.mesh))[0]

            x = layer.module(x, Request(forward))
        return self._choose(x)

    def _choose(self, x: Tensor) -> int:
        """x [1, 1, d], the same on every rank; so is the answer."""
        decoder, head = self.decoder, self.decoder.head
        logits = head(x, Request(lambda x: decoder.logits(bind_linear(head), x)))
        return int(logits[0, 0].argmax())  # a cap on logits keeps their order


def _rope_dtype(run: Run, x: Tensor) -> torch.dtype:
    return (
        torch.promote_types(x.dtype, torch.float32) if run.decoder.family and run.decoder.family.wide_rope else x.dtype
    )
