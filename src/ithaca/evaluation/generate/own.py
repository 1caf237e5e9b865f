"""Generation of a model that runs by its own code: its attention is asked twice.

While the prompt is prefilled, attention is that of training, and each rank keeps the keys and values that its layers make of its
own tokens. A new token is the same on every rank; its attention is answered from what all of them keep (cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...engine.attention.interface import Asked, Attend, Unsupported, attending, current
from ...engine.batch import Batch
from ...engine.comm import total
from ...engine.own import OwnDecoder, OwnLayer, Running
from ...engine.request import Request
from ...engine.run import Run
from .cache import KeyCache


class OwnSession:
    """One prompt and its continuation."""

    def __init__(self, run: Run, longest: int) -> None:
        assert isinstance(run.decoder, OwnDecoder)
        if mixers := run.decoder.mixers():
            raise Unsupported(
                f"{mixers[0]} carries a state from token to token, which is not kept between new tokens here; export the model and "
                "let transformers generate"
            )
        self.run, self.decoder, self.longest = run, run.decoder, longest
        self.caches: dict[tuple[int, int], KeyCache] = {}
        self.length = 0
        self.batch: Batch | None = None

    def prefill(self, prompt: Sequence[int]) -> int:
        """-> the token after the prompt"""
        # every data-parallel group answers the same question; one token more, or a prompt of one had nothing to predict
        ids = torch.tensor([[*prompt, 0]]).expand(self.run.mesh.data.size, -1)
        self.length = len(prompt)
        # rotary settings that depend on the length are those of the longest that will be reached, for all tokens alike
        self.batch = batch = replace(self.run.shard(ids), longest=self.longest)
        return self.decoder.model(Request(lambda: self._prefill(batch)))

    def _prefill(self, batch: Batch) -> int:
        x = self.decoder.hidden(self.run, batch, Prefill(self.run, batch, session=self))
        last = x[:1, batch.positions[0] == self.length - 1].sum(
            1, keepdim=True
        )  # zero on the ranks that do not hold it
        return self._choose(total(total(last, self.run.mesh.ulysses), self.run.mesh.ring))

    def step(self, token: int) -> int:
        """-> the token after `token`"""
        return self.decoder.model(Request(lambda: self._step(token)))

    def _step(self, token: int) -> int:
        assert self.batch is not None
        device = self.run.mesh.device
        ids, place = torch.tensor([[token]], device=device), torch.tensor([[self.length]], device=device)
        batch = replace(self.batch, input_ids=ids, labels=ids, positions=place, valid=None)
        x = self.decoder.hidden(self.run, batch, Step(self.run, batch, session=self))
        self.length += 1
        return self._choose(x)

    def _choose(self, x: Tensor) -> int:
        """x [1, 1, d], the same on every rank; so is the answer."""
        head = self.decoder.head
        logits = head(x, Request(lambda x: self.decoder.head_function(self.run.ranks)[0](x)))
        return int(logits[0, 0].argmax())

    def cache(self, layer: OwnLayer, number: int, v: Tensor) -> KeyCache:
        """Of the `number`th attention that a layer comes to; most have one."""
        return self.caches.setdefault((layer.index, number), KeyCache(value_dim=v.shape[-1]))


@dataclass
class Prefill(Running):
    session: OwnSession = field(kw_only=True)

    def layer(self, layer: OwnLayer, args: Any, kwargs: Any) -> Any:
        self.called.add(layer.index)
        call = self.call_of(layer)
        with attending(layer.configs), current(self.attention(layer, call.attend)):
            return layer.forward(*args, **kwargs)

    def attention(self, layer: OwnLayer, attend: Attend) -> Attend:
        where, numbers = self.batch.positions[0], count()
        real = where < self.session.length

        def kept(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: Asked) -> Tensor:
            cache = self.session.cache(layer, next(numbers), v)
            if bool(real.any()):
                cache.parts.append((k[0][:, real].clone(), v[0][:, real].clone(), where[real][:, None]))
            return attend(q, k, v, sinks, asked)

        return kept


class Step(Prefill):
    def attention(self, layer: OwnLayer, attend: Attend) -> Attend:
        mesh, place, numbers = self.run.mesh, self.session.length, count()
        # the new token's key and value go to one rank, in turn
        owner = mesh.ring.rank * mesh.ulysses.size + mesh.ulysses.rank == place % (mesh.ulysses.size * mesh.ring.size)
        where = self.batch.positions[0][:, None]

        def answered(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: Asked) -> Tensor:
            cache = self.session.cache(layer, next(numbers), v)
            if owner:
                cache.parts.append((k[0], v[0], where))
            out = cache.attend(
                q[0, :, 0], k.shape[1], place, mesh, asked.rule, asked.scale, softcap=asked.softcap, sinks=sinks
            )
            return out[None, None]

        return answered
