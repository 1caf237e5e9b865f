"""A run put together from its parts. The one place that states the order of techniques (`_parallelize`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..stack import Stack
from .attention.choice import Kernels, Need
from .attention.head_schedule import head_schedule
from .fsdp import apply_fsdp, pack_shards
from .mesh import Mesh
from .model.adapter import Decoder
from .model.experts import use_grouped_experts
from .model.fingerprint import Fingerprint
from .model.nf4 import Nf4
from .objective.cross_entropy import LossKernel
from .offload.store import GpuStore, Store
from .own import OwnDecoder, route_own
from .pretrained import keep_saving
from .request import route, route_whole
from .run import Run


def assemble(
    model: nn.Module,
    decoder: Decoder | OwnDecoder,
    stack: Stack,
    mesh: Mesh,
    *,
    store: Store,
    on_device: GpuStore,
    kernels: Kernels,
    loss_kernel: LossKernel,
    dtype: torch.dtype,
    weights: str | Path | Callable[[Run], None] | None,
    seed: int = 0,
    packing: type[Nf4] | None = None,
) -> Run:
    """Put a run together from its parts. `prepare` chooses them by stack and device; a dry run brings its own.

    packing: what the frozen base's shards become; None = they stay as they are."""
    schedule = ()
    if isinstance(decoder, Decoder):
        for layer in decoder.layers:
            kernels.resolve(Need(mesh.device, dtype, layer.projector.head_dim, layer.window is not None))
        first = decoder.layers[0].projector
        schedule = head_schedule(first.heads, first.kv_heads, stack.ulysses, stack.heads_per_stage)
    run = Run(model, stack, mesh, decoder, store, on_device, kernels, schedule, dtype, loss_kernel)
    _parallelize(run, weights, seed, packing)
    return run


def _parallelize(
    run: Run, weights: str | Path | Callable[[Run], None] | None, seed: int, packing: type[Nf4] | None
) -> None:
    """The order of techniques, with the reason beside each line."""
    decoder = run.decoder
    apply_fsdp(decoder, run.mesh, compute=run.dtype)  # first: a meta model is filled shard by shard
    if packing is not None:
        pack_shards(
            [layer.module for layer in decoder.layers], packing
        )  # before they are filled: packed as they are read
    materialize(run, weights, seed)
    use_grouped_experts(decoder.model.modules(), decoder.token_kernels)
    route_whole(decoder.model, decoder.base, run.ranks)
    route(decoder.head, run.ranks)
    if isinstance(decoder, OwnDecoder):
        decoder.tile = run.stack.tile
        route_own(decoder)
    for layer in decoder.layers if isinstance(decoder, Decoder) else ():
        route(layer.module, run.ranks)  # context parallelism, stages, tiles and store live in the routed layers
    keep_saving(run.model)
    run.fingerprint = Fingerprint(run.model, decoder.model, decoder.family)  # last: from here on nothing may change


def materialize(run: Run, weights: str | Path | Callable[[Run], None] | None, seed: int = 0) -> None:
    from .model.weights import fill_from_folder, is_meta

    if callable(weights):
        weights(run)
    elif is_meta(run.model):
        assert weights is not None
        fill_from_folder(
            run.decoder, Path(weights), run.mesh, seed=seed, gaussian=adapter_starts(run.model) == {"gaussian"}
        )
    elif run.mesh.parameters is None:
        run.model.to(run.mesh.device)


def adapter_starts(model: nn.Module) -> set[bool | str]:
    """How the PEFT adapters of a model begin."""
    configs = getattr(model, "peft_config", {})
    return {config.init_lora_weights for config in configs.values()}
