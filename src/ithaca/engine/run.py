"""A prepared model: shards batches, computes the loss, and hands out what a training loop needs.

    run = prepare(model, stack)
    batch = run.shard(input_ids, labels=labels, documents=None)
    loss = run.loss(batch)
    loss.backward()

The loss is one number for the whole world: the sum of cross-entropies over all supervised tokens of all ranks, divided by
their global count. Every rank returns the same value, and backward leaves gradients of exactly that number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ..base import faults
from ..base.holding import holds
from ..stack import Stack, require
from .attention.choice import Kernels, Need
from .attention.head_schedule import Stage
from .attention.stages import Shape, StagedAttention
from .batch import Batch, shard_batch
from .comm import total
from .cost import RankCost
from .fsdp import recover, shown_whole
from .job import Job
from .layer.apply import run_layer
from .layer.call import LayerCall
from .layer.cost import stored as bytes_stored
from .leaving import Frozen, Leaving, Total
from .limits import BF16, loss_tile
from .mesh import Mesh
from .model.adapter import Decoder, Layer
from .model.fingerprint import Fingerprint
from .model.linear import BoundLinear, bind_linear
from .model.rope import Positions
from .model.sizes import sizes_of
from .objective.cross_entropy import LossKernel, LossTerms, cap, tiled_loss
from .objective.log_probs import Question, Scored, tiled_log_probs
from .offload.store import GpuStore, Store
from .own import OwnDecoder
from .own_time import OwnTime
from .ranks import on_all_ranks
from .request import Ranks, Request


class NoRoom(ValueError):
    """A step does not fit where its activations are to be kept; found before the first layer computes."""

    exit_code = 5  # docs/reference/run_folder.md


def _no_room(error: Exception) -> Exception:
    return NoRoom(str(error)) if isinstance(error, (ValueError, OSError)) else error


@dataclass
class Run:
    """What `prepare` returns."""

    model: nn.Module
    stack: Stack
    mesh: Mesh
    decoder: Decoder | OwnDecoder
    store: Store  # the one outside of the GPU, where there is one
    on_device: GpuStore  # for the layers that keep theirs on the GPU
    kernels: Kernels
    schedule: tuple[Stage, ...]
    dtype: torch.dtype
    loss_kernel: LossKernel = field(default_factory=LossKernel)
    busy: bool = False  # inside a forward or backward, or one has failed
    reserved: dict[int, int] = field(default_factory=dict)  # by first layer: what the store was found to have room for
    part: Tensor | None = None  # of the last loss, what this rank added to it
    own: OwnTime = field(default_factory=OwnTime)
    fingerprint: Fingerprint | None = None  # of the model as it was prepared
    ranks: Ranks = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = Ranks(self.mesh.world.size, sharded=self.mesh.parameters is not None)

    # -- data ---------------------------------------------------------------------------------------------------------

    def shard(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        documents: Sequence | Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Batch:
        """This rank's slice of a global [B, S] batch; every rank passes the same tensors.

        labels: [B, S], -100 where not supervised; None = every token is (labels are shifted here, so pass input_ids
        as they are). documents: lengths of the packed documents of each row; tokens attend inside their document only. An entry
        may also be (length, parent), the parent an earlier entry of its row that the document goes on from: trees.py.
        weights: [B, S], what the cross-entropy of each label is multiplied by in `loss`, which is still divided by the count of
        labels; None = 1 each. They belong to the labels and are shifted with them.
        """
        return shard_batch(
            input_ids, labels, documents, weights,
            mesh=self.mesh, stack=self.stack, vocabulary=self.decoder.config.vocab_size,
        )  # fmt: skip

    # -- computation --------------------------------------------------------------------------------------------------

    def loss(
        self,
        batch: Batch,
        *,
        supervised: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        balance: float | None = None,
    ) -> Tensor:
        """The global mean loss, the same on every rank.

        supervised: divide by this count instead of the batch's own. For accumulation, pass the sum of `batch.supervised` over
        the micro-batches: the losses then add up to the mean over all of them, and so do the gradients.
        balance: weight of this batch in the router's balance loss; None = its share of `supervised`.
        """
        count = batch.supervised if supervised is None else supervised
        terms = LossTerms(label_smoothing, z_loss, self.decoder.logit_cap)
        self._recover()
        problems = self._violations() + terms.violations()
        if batch.parents is not None and self.decoder.router_weight != 0.0:
            problems.append(
                "the documents are trees, and the router's balance loss would count tokens that several of them share once; set "
                "output_router_logits to false in the model's config, or give every path as a document of its own"
            )
        if count < 1:
            problems.append(
                f"supervised={count} must be at least 1: the sum of batch.supervised over the micro-batches"
            )
        require(problems, "this loss cannot be computed")
        self.busy = True
        local_loss: Tensor = self.decoder.model(Request(lambda: self._local_loss(batch, count, terms, balance)))
        self.busy = False
        self.part = local_loss.detach()
        (loss,) = self._leave(local_loss)
        return self._total(loss)

    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of the labels of this rank's tokens, [b, s], in float32 (float64 of a float64 model); 0 where there is
        no label. With `entropy` also that of each token's distribution. Of logits / temperature.

        Differentiable, with any gradient: backward leaves the gradients of the sum of what all ranks differentiate, each for its
        own tokens. `by_document` makes numbers of the whole batch of them, the same on every rank: a loss of those is
        right as it is. Experts' balance loss is not in it.
        """
        if not 0.0 < temperature < float("inf"):
            raise ValueError(
                f"temperature={temperature} must be a finite number above 0; 1.0 leaves the logits as they are"
            )
        scored = self._score(batch, temperature, "these log-probabilities cannot be computed")
        logprobs, of_tokens = self._leave(scored.logprobs, scored.entropy)
        return (logprobs, of_tokens) if entropy else logprobs

    def by_document(self, batch: Batch, values: Tensor) -> Tensor:
        """Sums of this rank's `values` [b, s] over the tokens of each document, [documents of the whole batch], row by row and the
        same on every rank. Without documents a row is one. Differentiable; collective. In float64: an answer of 100,000 tokens has
        a log-probability of about -100,000, of which the difference to a reference is the last digits."""
        self._check_tokens(batch, values)
        values = values.double()
        sums = values.new_zeros(sum(batch.documents_of_rows))
        sums = sums.index_add(0, batch.document_of_tokens(self.mesh).flatten(), values.flatten())
        return self._total(sums)

    @staticmethod
    def _check_tokens(batch: Batch, values: Tensor) -> None:
        if values.shape != batch.labels.shape:
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but this rank's tokens are {tuple(batch.labels.shape)}; pass what "
                "logprobs(batch) gave, or a function of it, token by token"
            )

    def by_token(self, batch: Batch, values: Tensor) -> Tensor:
        """This rank's `values` [b, s] in their places in the whole batch, [rows, tokens], the same on every rank. Differentiable;
        collective. For what a loss needs of all tokens at once: it is as large as the batch, on every rank."""
        self._check_tokens(batch, values)
        rows = len(batch.documents_of_rows)
        first = rows // self.mesh.data.size * self.mesh.data.rank
        where = batch.layout.tokens(self.mesh.ring.rank, self.mesh.ulysses.rank).to(values.device)
        whole = values.new_zeros(len(values), batch.layout.padded).index_copy(1, where, values)
        whole = torch.nn.functional.pad(whole, (0, 0, first, rows - first - len(values)))
        return self._total(whole)[:, : batch.layout.length]

    def _total(self, value: Tensor) -> Tensor:
        """Over all ranks. Every rank goes on alike with the sum, and differentiates its own part of it."""
        return Total.apply(value, self.mesh.world)  # pyright: ignore[reportReturnType]

    def _leave(self, *local: Tensor) -> tuple[Tensor, ...]:
        """What a forward made, to be differentiated by the caller."""
        if torch.is_grad_enabled() and not any(t.requires_grad for t in local):
            nothing = torch.zeros((), requires_grad=True)
            return tuple(Frozen.apply(t, nothing) for t in local)  # pyright: ignore[reportReturnType]
        shards = [] if self.mesh.parameters is None else [p for p in self.model.parameters() if p.requires_grad]
        return Leaving.apply(self, len(local), *local, *shards)  # pyright: ignore[reportReturnType]

    def _violations(self) -> list[str]:
        """What has changed since `prepare`, and modes of torch in which a forward would go wrong later."""
        problems = [] if self.fingerprint is None else self.fingerprint.changes()
        if torch.is_autocast_enabled(self.mesh.device.type):
            problems.append(
                "torch.autocast is on, but backward computes parts of the forward again outside of it, in another dtype; "
                "leave the context and choose the compute dtype with prepare(dtype=...)"
            )
        if torch.is_inference_mode_enabled() and self.mesh.parameters is not None:
            problems.append(
                "torch.inference_mode is on, and what FSDP2 gathers first inside of it is of no use outside; use "
                "torch.no_grad()"
            )
        return problems

    def _recover(self) -> None:
        """The last forward or backward ended in an exception that the caller survived."""
        if self.busy or self.ranks.interrupted:
            recover(self.decoder.model)
            self.busy = self.ranks.interrupted = False

    def _backward_done(self) -> None:
        self.busy = False

    def logits(self, batch: Batch) -> Tensor:
        """Logits of this rank's tokens, [b, s, V]: for checks and short inputs, as they are whole."""
        require(self._violations(), "these logits cannot be computed")

        def compute() -> Tensor:
            x, _ = self._hidden(batch)
            return self.decoder.head(x, Request(lambda x: cap(self._head()[0](x), self.decoder.logit_cap)))

        return self.decoder.model(Request(compute))

    @torch.no_grad()
    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """For evaluation: cross-entropy of this rank's tokens and whether each label is the likeliest token, [b, s] each; 0 and
        False where there is no label."""
        scored = self._score(batch, 1.0, "these tokens cannot be scored")
        return -scored.logprobs, scored.hits

    def _score(self, batch: Batch, temperature: float, failing: str) -> Scored:
        """One forward; logits exist a tile at a time and for supervised tokens only."""
        self._recover()
        require(self._violations(), failing)
        asked = batch.asked  # a question to the GPU: before it has work

        def of_hidden(x: Tensor) -> tuple[Tensor, ...]:
            head, weights, _ = self._head()
            fused = self.loss_kernel.fuses(x.device, x.dtype, LossTerms(logit_cap=self.decoder.logit_cap))
            question = Question(
                head, asked, batch.labels.flatten()[asked],
                loss_tile(self.stack.tile, 1, self.decoder.config.vocab_size, fused),
                temperature, self.decoder.logit_cap, self.loss_kernel,
                lambda: shown_whole(self.decoder.head, self.decoder.model),
            )  # fmt: skip
            scored = tiled_log_probs(x, question, [p for p in weights if p.requires_grad])
            return scored.logprobs, scored.entropy, scored.hits

        def compute() -> tuple[Tensor, ...]:
            x, _ = self._hidden(batch)
            faults.reach("fwd")
            return self.decoder.head(x, Request(of_hidden))

        self.busy = True
        logprobs, entropy, hits = self.decoder.model(Request(compute))
        self.busy = False
        return Scored(logprobs, entropy, hits)

    @holds("loss")
    def _local_loss(self, batch: Batch, count: int, terms: LossTerms, balance: float | None) -> Tensor:
        x, routing = self._hidden(batch)
        faults.reach("fwd")
        if faults.armed() and x.requires_grad:
            x.register_hook(lambda _: faults.reach("bwd"))

        def compute(x: Tensor) -> Tensor:
            with self.own.measure(x.device):
                return loss_of(x)

        def loss_of(x: Tensor) -> Tensor:
            head, weights, linear = self._head()
            return tiled_loss(
                x,
                batch.labels,
                head,
                [p for p in weights if p.requires_grad],
                tile=loss_tile(
                    self.stack.tile,
                    x.shape[0],
                    self.decoder.config.vocab_size,
                    self.loss_kernel.fuses(x.device, x.dtype, terms),
                ),
                terms=terms,
                scale=1.0 / count,
                weights=batch.weights,
                kernel=self.loss_kernel,
                linear=linear,
            )

        loss = self.decoder.head(x, Request(compute))
        if routing:
            share = batch.supervised / count if balance is None else balance
            loss = loss + self._balance_loss(routing, batch) * share
        return faults.spoil(loss)

    @holds("loss")
    def _head(self) -> tuple[Callable[[Tensor], Tensor], list[Tensor], BoundLinear | None]:
        """(what is behind the layers -> logits, the parameters that takes, the linear in it if that is known). Inside of a call of
        the head."""
        if isinstance(self.decoder, OwnDecoder):
            return *self.decoder.head_function(self.ranks), None
        decoder, head = self.decoder, bind_linear(self.decoder.head)
        weights = [leaf.parameter for leaf in head.leaves] + list(decoder.norm.parameters())
        return (lambda t: decoder.logits(head, t)), weights, head

    @holds("residual")
    def _hidden(self, batch: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Embedding and layers. -> what the head function takes, router sums of each layer"""
        if isinstance(self.decoder, OwnDecoder):
            return self.decoder.hidden(self, batch), []
        x = self.decoder.embed(batch.input_ids)
        wide = torch.promote_types(x.dtype, torch.float32) if self.decoder.family.wide_rope else x.dtype
        places = {
            kind: Positions(self.decoder.rope(kind, batch.longest), batch.positions, wide)
            for kind in {layer.rope_type for layer in self.decoder.layers}
        }
        self._reserve(x)
        routing = []
        for layer in self.decoder.layers:
            if layer.index and self.stack.store_of(layer.index) != self.stack.store_of(layer.index - 1):
                self.store.flush()  # before layers that put nothing into it
            call = self._layer_call(layer, places[layer.rope_type], batch, x)
            x, *sums = layer.module(x, Request(lambda x, call=call: run_layer(x, call)))
            self.check_stored(layer.index, call.learn, call.stored)
            if sums:
                routing.append(tuple(sums))
        return x, routing

    def check_stored(self, layer: int, learns: bool, stored: bool) -> None:
        kind = self.stack.store_of(layer)
        if kind != "gpu" and torch.is_grad_enabled() and learns and not stored:
            raise RuntimeError(
                f"store={kind!r} was asked for, but layer {layer} stored nothing in this forward. Activations stay on the GPU, so "
                "memory would run out later without a reason; this is a bug or a patched layer"
            )

    def _layer_call(self, layer: Layer, positions: Positions, batch: Batch, x: Tensor) -> LayerCall:
        projector = layer.projector
        kernel = self.kernels.resolve(Need(x.device, x.dtype, projector.head_dim, layer.window is not None))
        shape = Shape(x.shape[0], x.shape[1], projector.heads, projector.kv_heads, projector.head_dim)
        attention = StagedAttention(
            self.schedule,
            shape,
            self.mesh.ulysses,
            self.mesh.ring,
            kernel,
            batch.plans_for(layer.window, self.mesh),
            layer.scale,
        )
        return LayerCall(
            layer=layer,
            attention=attention,
            positions=positions,
            tile=self.stack.tile,
            recompute=self.stack.recompute_of(layer.index),
            store=self.store_of(layer.index),
            run_store=self.store,
            engine=self.stack.engine_of(layer.index),
            hold=self.stack.hold,
            count_routing=self.decoder.router_weight != 0.0 and layer.router is not None,
            valid=batch.valid,
        )

    def store_of(self, layer: int) -> Store:
        if self.stack.store_of(layer) == "gpu":
            return self.on_device
        # backward begins with the last layer: what it keeps is wanted again at once
        return self.store.scratch_store if layer == len(self.decoder.layers) - 1 else self.store

    def _reserve(self, x: Tensor) -> None:
        """Before the first layer stores anything: is there room for all of them? Ranks answer together."""
        if self.stack.offload == "gpu" or x.numel() <= self.reserved.get(0, 0) or not torch.is_grad_enabled():
            return
        context, rows = x.shape[1] * self.stack.context_ranks, x.shape[0] * self.mesh.data.size
        sizes = sizes_of(self.decoder.config.to_dict(), "this model")
        stored = bytes_stored(RankCost(Job(sizes, self.stack, context, self.mesh.world.size, rows)))
        need = stored[self.stack.offload] * x.element_size() // BF16  # which is what is counted in
        self._ask_for_room(need)
        self.reserved[0] = x.numel()  # once per length: every rank sees the same shapes and asks at the same time

    def reserve_like(self, layer: int, nbytes: int) -> None:
        """The same where nobody has counted: this layer is about to store so much, and those above it that are asked for the same
        will take as much each."""
        asked = (self.stack.recompute_of(layer), self.stack.store_of(layer))
        if layer and asked == (self.stack.recompute_of(layer - 1), self.stack.store_of(layer - 1)):
            return  # the first of them has asked for all
        above = range(layer, len(self.decoder.layers))
        like = takewhile(lambda i: (self.stack.recompute_of(i), self.stack.store_of(i)) == asked, above)
        need = nbytes * sum(1 for _ in like)
        if asked[1] == "gpu" or need <= self.reserved.get(layer, 0):
            return
        self._ask_for_room(need + sum(below for first, below in self.reserved.items() if first < layer))
        self.reserved[layer] = need

    def _ask_for_room(self, need: int) -> None:
        """need: bytes of this rank, and of every other."""
        on_all_ranks(self.mesh.world, lambda: self.store.reserve(need * self.mesh.ranks_here), _no_room)

    def _balance_loss(self, routing: list[tuple[Tensor, Tensor]], batch: Batch) -> Tensor:
        """This rank's part of the router's balance loss over all tokens of the batch and all layers (Switch, eq. 4-6)."""
        probability = torch.stack([p for p, _ in routing]).sum(0)
        rows = len(routing) * batch.tokens
        chosen = (
            total(torch.stack([c for _, c in routing]).sum(0), self.mesh.world) / rows
        )  # ranks hold different tokens
        return self.decoder.router_weight * len(probability) * (chosen.detach() * probability / rows).sum()

    def report(self) -> dict[str, Any]:
        """What the store moved since the last call: bytes, copy time, and how much of it was waited for."""
        report = self.store.report()
        self.store.reset()
        return {"store": report}
