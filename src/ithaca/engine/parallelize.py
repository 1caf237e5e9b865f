"""`prepare`: apply a stack to a model, in place. The one place that states the order of techniques (`_parallelize`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ..stack import Stack, require
from .attention.choice import Kernels, Need
from .attention.head_schedule import head_schedule
from .fsdp import apply_fsdp
from .mesh import Mesh, build_mesh
from .model.adapter import Decoder, read_model
from .model.fingerprint import Fingerprint
from .objective.cross_entropy import LossKernel
from .offload.choice import open_store
from .offload.store import GpuStore, Store, StoreKind
from .pretrained import keep_saving
from .ranks import on_all_ranks
from .request import route, route_whole
from .run import Run


def prepare(
    model: nn.Module,
    stack: Stack | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    scratch: str | Path | None = None,
    weights: str | Path | Callable[[Run], None] | None = None,
    offload_parameters: bool = False,
    seed: int = 0,
) -> Run:
    """Apply a stack to a Hugging Face decoder, in place.

    model: any supported model, plain or with PEFT LoRA adapters, on CPU, GPU or the meta device.
    device: where to train; default is this process's current GPU if there is one, else the CPU.
    dtype: compute dtype; default bf16 on CUDA with fp32 master weights, and the model's own dtype elsewhere.
    scratch: folder for store="disk"; default is the system's temporary folder.
    weights: folder with safetensors, for a model on the meta device: every rank reads its own shards only. Or a function that
    gives the sharded model its numbers in another way.
    offload_parameters: shards of parameters, gradients and optimizer states wait in host memory (FSDP2's CPU offload).
    seed: of PEFT adapters on the meta device, which start at random; the same on any number of ranks.
    """
    stack = stack or Stack()
    decoder = read_model(model)
    require(stack.layer_violations(len(decoder.layers)), "this stack does not suit the model")
    _check_weights(model, weights)
    device = _device(model, device)
    mesh = build_mesh(stack, device, offload_parameters)
    compute = dtype or _compute_dtype(decoder, stack, device)
    _check_dtype(model, mesh, compute)
    folder = None if scratch is None else Path(scratch)
    # together: one rank without a writable disk must not leave the others waiting
    store = on_all_ranks(mesh.world, lambda: open_store(cast(StoreKind, stack.offload), device=device, scratch=folder))
    on_device = store if isinstance(store, GpuStore) else GpuStore(device)
    return assemble(
        model, decoder, stack, mesh, store=store, on_device=on_device, kernels=Kernels(stack.attention), loss_kernel=LossKernel(),
        dtype=compute, weights=weights, seed=seed,
    )  # fmt: skip


def assemble(
    model: nn.Module,
    decoder: Decoder,
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
) -> Run:
    """Put a run together from its parts. `prepare` chooses them by stack and device; a dry run brings its own."""
    for layer in decoder.layers:
        kernels.resolve(Need(mesh.device, dtype, layer.projector.head_dim, layer.window is not None))
    first = decoder.layers[0].projector
    schedule = head_schedule(first.heads, first.kv_heads, stack.ulysses, stack.heads_per_stage)
    run = Run(model, stack, mesh, decoder, store, on_device, kernels, schedule, dtype, loss_kernel)
    _parallelize(run, weights, seed)
    return run


def _parallelize(run: Run, weights: str | Path | Callable[[Run], None] | None, seed: int) -> None:
    """The order of techniques, with the reason beside each line."""
    decoder = run.decoder
    apply_fsdp(decoder, run.mesh, compute=run.dtype)  # first: a meta model is filled shard by shard
    materialize(run, weights, seed)
    route_whole(decoder.model, decoder.base, run.ranks)
    for module in [decoder.head, *(layer.module for layer in decoder.layers)]:
        route(module, run.ranks)  # context parallelism, stages, tiles and store live in the routed layers
    keep_saving(run.model)
    run.fingerprint = Fingerprint(run.model, decoder.model, decoder.family)  # last: from here on nothing may change


def materialize(run: Run, weights: str | Path | Callable[[Run], None] | None, seed: int = 0) -> None:
    from .model.weights import fill_from_folder, is_meta

    if callable(weights):
        weights(run)
    elif is_meta(run.model):
        assert weights is not None
        fill_from_folder(run.decoder, Path(weights), run.mesh, seed=seed, gaussian=_starts(run.model) == {"gaussian"})
    elif run.mesh.parameters is None:
        run.model.to(run.mesh.device)


def _check_weights(model: nn.Module, weights: str | Path | Callable[[Run], None] | None) -> None:
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
    if not all(p.is_meta for p in model.parameters()):
        raise ValueError(
            "a part of the model is on the meta device and another is not; build all of it there (adapters: "
            "get_peft_model under torch.device('meta')), or nothing"
        )
    if _starts(model) not in (set(), {True}, {"gaussian"}):
        raise ValueError(
            f"adapters on the meta device start as with init_lora_weights=True or 'gaussian', not {_starts(model)}, which "
            "need the base first; choose one of the two, or build base and adapters on a real device and drop weights="
        )


def _starts(model: nn.Module) -> set[bool | str]:
    """How the PEFT adapters of a model begin."""
    configs = getattr(model, "peft_config", {})
    return {config.init_lora_weights for config in configs.values()}


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
