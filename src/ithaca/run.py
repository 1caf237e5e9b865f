"""A prepared model: shards batches, computes the loss, and hands out what a training loop needs.

    run = prepare(model, stack)
    batch = run.shard(input_ids, labels=labels, documents=None)
    loss = run.loss(batch)
    loss.backward()

`prepare` works in place and states the order of techniques once (`_parallelize`). It routes the calls that carry an ithaca
request to our code; every other call of the model or of a layer still runs Hugging Face's own forward.

The loss is one number for the whole world: the sum of cross-entropies over all supervised tokens of all ranks, divided by
their global count. Every rank returns the same value, and backward leaves gradients of exactly that number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .activations.loss import IGNORE, LossTerms, cap, loss_tile, tiled_loss
from .activations.store import Store, StoreKind, open_store
from .attention.head_schedule import Stage, head_schedule
from .attention.kernel import Kernels, Need
from .attention.segments import Plan, plan_segments
from .attention.stages import Shape, StagedAttention
from .comm import total
from .fsdp import apply_fsdp
from .layer import LayerCall, run_layer
from .mesh import Group, Mesh, build_mesh
from .model.adapter import Decoder, Layer, read_model
from .model.projection import bind_linear
from .sequence import Layout, document_bounds, positions, read_documents, shift_labels
from .stack import Stack, require

log = logging.getLogger("ithaca")


@dataclass
class Batch:
    """This rank's slice of a global batch."""

    input_ids: Tensor  # [b, s]
    labels: Tensor  # [b, s], shifted: the label of a token is the next token
    positions: Tensor  # [b or 1, s]
    valid: Tensor | None  # [b, s], False on padding; None where there is none
    layout: Layout
    documents: list[list[int]] | None  # of this rank's rows
    longest: int  # longest document, in tokens: what rotary settings that depend on the length look at
    supervised: int  # supervised tokens of the whole batch, over all ranks
    tokens: int  # real tokens of the whole batch, over all ranks
    plans: dict[int | None, list[Plan]] = field(default_factory=dict)


@dataclass
class _Request:
    """Marks a call as ours and says what is wanted."""

    do: Callable[..., Any]


@dataclass
class Run:
    """What `prepare` returns."""

    model: nn.Module
    stack: Stack
    mesh: Mesh
    decoder: Decoder
    store: Store
    kernels: Kernels
    schedule: tuple[Stage, ...]
    dtype: torch.dtype
    busy: bool = False  # inside a forward or backward, or one has failed
    reserved: int = 0  # largest input for which the store was found to have room

    # -- data ---------------------------------------------------------------------------------------------------------

    def shard(
        self, input_ids: Tensor, labels: Tensor | None = None, documents: Sequence | Tensor | None = None
    ) -> Batch:
        """This rank's slice of a global [B, S] batch; every rank passes the same tensors.

        labels: [B, S], -100 where not supervised; None = every token is (labels are shifted here, so pass input_ids
        as they are). documents: lengths of the packed documents of each row; tokens attend inside their document only.
        """
        self._check_batch(input_ids, labels)
        rows, length = input_ids.shape
        lengths = read_documents(documents, rows, length)
        input_ids, labels = (t.long() for t in (input_ids, input_ids if labels is None else labels))
        labels = shift_labels(labels, lengths, IGNORE)
        supervised = int((labels != IGNORE).sum())
        if supervised == 0:
            raise ValueError(
                "no token of this batch is supervised: every label is -100 after the shift to the next token. The loss "
                "would be 0/0; leave such batches out, or supervise at least one token"
            )
        layout = Layout(length, self.stack.ulysses, self.stack.ring)
        own = slice(*(rows // self.mesh.data.size * (self.mesh.data.rank + i) for i in (0, 1)))
        where = layout.tokens(self.mesh.ring.rank, self.mesh.ulysses.rank)
        real = where < length
        take = where.clamp(max=length - 1)
        device = self.mesh.device
        mine = None if lengths is None else lengths[own]
        place = positions(mine, len(range(*own.indices(rows))), layout.padded)
        if lengths is None:
            place = place[:1]  # the same in every row
        padded = not bool(real.all())
        valid = real.to(device).expand(len(range(*own.indices(rows))), -1) if padded else None
        ids, targets = (t[own].cpu()[:, take] for t in (input_ids, labels))
        return Batch(
            input_ids=ids.masked_fill(~real, 0).to(device),
            labels=targets.masked_fill(~real, IGNORE).to(device),
            positions=place[:, where].to(device),
            valid=valid,
            layout=layout,
            documents=mine,
            longest=length if lengths is None else max(max(row) for row in lengths),
            supervised=supervised,
            tokens=rows * length,
        )

    def _check_batch(self, input_ids: Tensor, labels: Tensor | None) -> None:
        vocabulary = self.decoder.config.vocab_size
        for name, value in (("input_ids", input_ids), ("labels", labels)):
            if not isinstance(value, Tensor) and not (name == "labels" and value is None):
                raise ValueError(f"{name} is a {type(value).__name__}; pass a torch.Tensor of shape [rows, tokens]")
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, tokens], both at least 1"
            )
        problems = []
        if labels is not None and labels.shape != input_ids.shape:
            problems.append(
                f"labels has shape {tuple(labels.shape)} but input_ids {tuple(input_ids.shape)}; pass labels of the same "
                "shape, unshifted, with -100 where a token is not supervised"
            )
        if input_ids.shape[0] % self.mesh.data.size:
            problems.append(
                f"a batch of {input_ids.shape[0]} rows cannot be split over {self.mesh.data.size} data-parallel groups; "
                f"pass a multiple of {self.mesh.data.size} rows, or raise ulysses or ring so that fewer groups are left"
            )
        for name, value, low in (("input_ids", input_ids, 0), ("labels", labels, 0)):
            if value is None or value.is_floating_point():
                if value is not None:
                    problems.append(f"{name} has dtype {value.dtype}; token ids are whole numbers (torch.int64)")
                continue
            wrong = (value < low) | (value >= vocabulary)
            if name == "labels":
                wrong &= value != IGNORE
            if bool(wrong.any()):
                row, at = wrong.nonzero()[0].tolist()
                problems.append(
                    f"{name}[{row}, {at}] is {int(value[row, at])}, outside the model's vocabulary of {vocabulary:,} "
                    "tokens (0 to {:,}); check that tokenizer and model belong together".format(vocabulary - 1)
                )
        require(problems, "this batch cannot be used")

    # -- computation --------------------------------------------------------------------------------------------------

    def loss(
        self, batch: Batch, *, supervised: int | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        """The global mean loss, the same on every rank.

        supervised: divide by this count instead of the batch's own. For accumulation, pass the sum of `batch.supervised` over
        the micro-batches: the losses then add up to the mean over all of them, and so do the gradients.
        """
        count = batch.supervised if supervised is None else supervised
        terms = LossTerms(label_smoothing, z_loss, self.decoder.logit_cap)
        problems = self._mode_violations() + terms.violations()
        if count < 1:
            problems.append(
                f"supervised={count} must be at least 1: the sum of batch.supervised over the micro-batches"
            )
        require(problems, "this loss cannot be computed")
        if self.busy:
            self._recover()
        self.busy = True
        mine: Tensor = self.decoder.model(_Request(lambda: self._local_loss(batch, count, terms)))
        self.busy = False
        return _GlobalSum.apply(mine, self)  # pyright: ignore[reportReturnType]

    def _mode_violations(self) -> list[str]:
        """Modes of torch in which a forward would go wrong later."""
        found = []
        if torch.is_autocast_enabled(self.mesh.device.type):
            found.append(
                "torch.autocast is on, but backward computes parts of the forward again outside of it, in another dtype; "
                "leave the context and choose the compute dtype with prepare(dtype=...)"
            )
        if torch.is_inference_mode_enabled() and self.mesh.parameters is not None:
            found.append(
                "torch.inference_mode is on, and what FSDP2 gathers first inside of it is of no use outside; use "
                "torch.no_grad()"
            )
        return found

    def _recover(self) -> None:
        """The last forward or backward ended in an exception that the caller survived: FSDP2 still stands in its middle,
        and would leave some gradients of the next step unreduced without a word."""
        if isinstance(self.decoder.model, FSDPModule):
            if not hasattr(self.decoder.model, "reset_iter_state"):  # torch before 2.13
                raise RuntimeError(
                    "the last forward or backward failed, and this torch cannot bring FSDP2 back to a clean state; build and "
                    "prepare the model again, or use torch 2.13"
                )
            self.decoder.model.reset_iter_state()
        self.busy = False

    def _backward_done(self) -> None:
        self.busy = False

    def logits(self, batch: Batch) -> Tensor:
        """Logits of this rank's tokens, [b, s, V]: for checks and short inputs, as they are whole."""
        require(self._mode_violations(), "these logits cannot be computed")

        def compute() -> Tensor:
            x, _ = self._hidden(batch)
            return self.decoder.head(
                x, _Request(lambda x: cap(bind_linear(self.decoder.head)(self.decoder.norm(x)), self.decoder.logit_cap))
            )

        return self.decoder.model(_Request(compute))

    def _local_loss(self, batch: Batch, count: int, terms: LossTerms) -> Tensor:
        x, routing = self._hidden(batch)

        def compute(x: Tensor) -> Tensor:
            head = bind_linear(self.decoder.head)
            weights = [leaf.parameter for leaf in head.leaves] + list(self.decoder.norm.parameters())
            trainable = [p for p in weights if p.requires_grad]
            return tiled_loss(
                x,
                batch.labels,
                lambda t: head(self.decoder.norm(t)),
                trainable,
                tile=loss_tile(self.stack.tile, x.shape[0], self.decoder.config.vocab_size),
                terms=terms,
                scale=1.0 / count,
            )

        mine = self.decoder.head(x, _Request(compute))
        if routing:
            mine = mine + self._balance_loss(routing, batch) * (batch.supervised / count)
        return mine

    def _hidden(self, batch: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Embedding and layers. -> x before the final norm, router sums of each layer"""
        x = self.decoder.embedding(batch.input_ids)
        ropes = {
            kind: self.decoder.rope(kind, batch.longest) for kind in {layer.rope_type for layer in self.decoder.layers}
        }
        self._reserve(x, batch)
        routing = []
        for layer in self.decoder.layers:
            call = self._layer_call(layer, ropes[layer.rope_type], batch, x)
            x, *sums = layer.module(x, _Request(lambda x, call=call: run_layer(x, call)))
            if self.stack.store != "gpu" and torch.is_grad_enabled() and call.learn and not call.stored:
                raise RuntimeError(
                    f"store={self.stack.store!r} was asked for, but layer {layer.index} stored nothing in this forward. "
                    "Activations stay on the GPU, so memory would run out later without a reason; this is a bug or a "
                    "patched layer"
                )
            if sums:
                routing.append(tuple(sums))
        return x, routing

    def _layer_call(self, layer: Layer, rope, batch: Batch, x: Tensor) -> LayerCall:
        projector = layer.projector
        kernel = self.kernels.resolve(Need(x.device, x.dtype, projector.head_dim, layer.window is not None))
        shape = Shape(x.shape[0], x.shape[1], projector.heads, projector.kv_heads, projector.head_dim)
        attention = StagedAttention(
            self.schedule,
            shape,
            self.mesh.ulysses,
            self.mesh.ring,
            kernel,
            self._plans(batch, layer.window),
            layer.scale,
        )
        return LayerCall(
            layer=layer,
            attention=attention,
            rope=rope,
            positions=batch.positions,
            tile=self.stack.tile,
            recompute=self.stack.recompute,
            store=self.store,
            engine=self.stack.chosen_engine,
            count_routing=self.decoder.router_weight != 0.0 and layer.router is not None,
            valid=batch.valid,
        )

    def _plans(self, batch: Batch, window: int | None) -> list[Plan]:
        """One plan per ring step, made once per batch and window."""
        if window not in batch.plans:
            layout, ring = batch.layout, self.mesh.ring
            bounds = None
            if batch.documents is not None:
                bounds = [document_bounds(lengths, layout.padded) for lengths in batch.documents]
            batch.plans[window] = [
                plan_segments(
                    layout.chunks(ring.rank),
                    layout.chunks((ring.rank - step) % ring.size),
                    bounds,
                    window,
                    self.mesh.device,
                )
                for step in range(ring.size)
            ]
        return batch.plans[window]

    def _reserve(self, x: Tensor, batch: Batch) -> None:
        """Before the first layer stores anything: is there room for all of them? Ranks answer together."""
        if self.stack.store == "gpu" or x.numel() <= self.reserved or not torch.is_grad_enabled():
            return
        projector = self.decoder.layers[0].projector
        attended = x.shape[0] * x.shape[1] * projector.heads * projector.head_dim * x.element_size()
        need = x.numel() * x.element_size() * len(self.decoder.layers)
        if self.stack.recompute == "keep_attention":
            most = max(sum(len(stage.queries[self.mesh.ulysses.rank]) for stage in self.schedule), 1)
            lse = x.shape[0] * x.shape[1] * self.mesh.ulysses.size * most * 4
            need += (attended + lse) * len(self.decoder.layers)
        if self.stack.chosen_engine == "streamed":
            need += attended  # in backward one layer's gradient of it passes through the store as well
        per_host = min(self.mesh.world.size, torch.cuda.device_count() if x.is_cuda else self.mesh.world.size)
        error = None
        try:
            self.store.reserve(need * per_host)
        except (ValueError, OSError) as problem:
            error = str(problem)
        self.mesh.agree(error)
        self.reserved = x.numel()  # once per length: every rank sees the same shapes and asks at the same time

    def _balance_loss(self, routing: list[tuple[Tensor, Tensor]], batch: Batch) -> Tensor:
        """This rank's part of the router's balance loss over all tokens of the batch and all layers (Switch, eq. 4-6)."""
        probability = torch.stack([p for p, _ in routing]).sum(0)
        rows = len(routing) * batch.tokens
        chosen = total(torch.stack([c for _, c in routing]).sum(0), self._token_ranks()) / rows
        return self.decoder.router_weight * len(probability) * (chosen.detach() * probability / rows).sum()

    def _token_ranks(self) -> Group:
        return self.mesh.world  # every rank holds other tokens

    def report(self) -> dict[str, Any]:
        """What the store moved since the last call: bytes, copy time, and how much of it was waited for."""
        report = self.store.report()
        self.store.reset()
        return {"store": report}


class _GlobalSum(torch.autograd.Function):
    """Sum over all ranks in forward, identity in backward: gradients are summed by FSDP, once."""

    @staticmethod
    def forward(ctx, mine: Tensor, run: Run) -> Tensor:
        ctx.run, ctx.spent = run, False
        return total(mine.detach(), run.mesh.world)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.spent:  # here, before FSDP2's first hook
            raise RuntimeError("this loss was already differentiated; call run.loss again for another backward")
        ctx.spent = ctx.run.busy = True
        torch.autograd.Variable._execution_engine.queue_callback(ctx.run._backward_done)
        return grad, None


def prepare(
    model: nn.Module,
    stack: Stack | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    scratch: str | Path | None = None,
    weights: str | Path | None = None,
) -> Run:
    """Apply a stack to a Hugging Face decoder, in place.

    model: any supported model, plain or with PEFT LoRA adapters, on CPU, GPU or the meta device.
    device: where to train; default is this process's current GPU if there is one, else the CPU.
    dtype: compute dtype; default bf16 on CUDA with fp32 master weights, and the model's own dtype elsewhere.
    scratch: folder for store="disk"; default is the system's temporary folder.
    weights: folder with safetensors, for a model on the meta device: every rank reads its own shards only.
    """
    stack = stack or Stack()
    decoder = read_model(model)
    _check_weights(model, weights)
    device = _device(model, device)
    mesh = build_mesh(stack, device)
    compute = dtype or _compute_dtype(decoder, stack, device)
    _check_dtype(model, mesh, compute)
    error, store = None, None
    try:
        store = open_store(
            cast(StoreKind, stack.store), device=device, scratch=None if scratch is None else Path(scratch)
        )
    except (ValueError, OSError) as problem:
        error = str(problem)
    mesh.agree(error)  # one rank without a writable disk must not leave the others waiting
    assert store is not None
    kernels = Kernels(stack.attention)
    for layer in decoder.layers:
        kernels.resolve(Need(device, compute, layer.projector.head_dim, layer.window is not None))
    first = decoder.layers[0].projector
    schedule = head_schedule(first.heads, first.kv_heads, stack.ulysses, stack.heads_per_stage)
    run = Run(model, stack, mesh, decoder, store, kernels, schedule, compute)
    _parallelize(run, weights)
    return run


def _parallelize(run: Run, weights: str | Path | None) -> None:
    """The order of techniques, with the reason beside each line."""
    decoder = run.decoder
    apply_fsdp(decoder, run.mesh, compute=run.dtype)  # first: a meta model is filled shard by shard
    materialize(run, weights)
    for module in [decoder.model, decoder.head, *(layer.module for layer in decoder.layers)]:
        _route(module)  # last: context parallelism, stages, tiles and store live in the routed layers


def materialize(run: Run, weights: str | Path | None) -> None:
    from .model.weights import fill_from_folder, is_meta

    if is_meta(run.model):
        assert weights is not None
        fill_from_folder(run.decoder, Path(weights), run.mesh)
    elif run.mesh.parameters is None:
        run.model.to(run.mesh.device)


def _check_weights(model: nn.Module, weights: str | Path | None) -> None:
    """Before anything is sharded: do the model and `weights` belong together?"""
    from .model.weights import is_meta

    if not is_meta(model):
        if weights is not None:
            raise ValueError("weights= is for a model on the meta device; this one has its weights already: drop it")
        return
    if weights is None:
        raise ValueError(
            "the model is on the meta device, so it has no weights yet; pass weights=FOLDER with its safetensors, or "
            "build it on a real device"
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            "a model with PEFT adapters cannot be filled from weights=, which holds the base model only; build base and "
            "adapters on a real device and drop weights="
        )


def _check_dtype(model: nn.Module, mesh: Mesh, compute: torch.dtype) -> None:
    """FSDP2 casts parameters while computing; without it they are used as they are."""
    if compute not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"dtype={compute} is not supported: gradients divided by a million tokens are below float16's smallest number; "
            "use torch.bfloat16 or torch.float32"
        )
    other = {p.dtype for p in model.parameters()} - {compute}
    if mesh.parameters is None and other:
        raise ValueError(
            f"dtype={compute} was asked for, but the model has parameters of {', '.join(map(str, other))}, which "
            f"shard_parameters=False leaves as they are; use shard_parameters=True, or call model.to({compute}) first"
        )


def _route(module: nn.Module) -> None:
    """Let calls that end with a request run our code inside this module's own hooks (FSDP's), all others as before."""
    module._forward_before_ithaca = module.forward  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_routed_forward, module)  # a method, so that a deep copy runs on its own weights


def _routed_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], _Request):
        return args[-1].do(*args[:-1])
    return module._forward_before_ithaca(*args, **kwargs)


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    if wanted is not None:
        device = torch.device(wanted)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r} was asked for, but torch sees no GPU; use device='cpu'")
        return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
    device = next(model.parameters()).device
    if device.type in ("meta", "cpu") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "meta" else device


def _compute_dtype(decoder: Decoder, stack: Stack, device: torch.device) -> torch.dtype:
    own = next(decoder.model.parameters()).dtype
    return torch.bfloat16 if device.type == "cuda" and stack.shard_parameters else own
