"""`prepare`: apply a stack to a model, in place. The order of techniques stands in assemble.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ..base.exits import MEMORY, Failed
from ..stack import Stack, require
from .assemble import adapter_starts, assemble
from .attention.choice import Kernels
from .limits import FP32
from .mesh import Mesh, build_mesh
from .model.adapter import Decoder, base_model, read_model
from .model.families import FAMILIES
from .model.nf4 import CANNOT_PACK, Nf4, packing_violations
from .objective.cross_entropy import LossKernel
from .offload.choice import open_store
from .offload.cost import pinned
from .offload.host import available_memory
from .offload.store import GpuStore, StoreKind, human_bytes
from .own import OwnDecoder, read_own
from .proof import require_proof
from .ranks import on_all_ranks, world_group
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
    quantize: str | None = None,
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
    quantize: "nf4" = the frozen base under LoRA adapters waits in four bits a weight (QLoRA).
    """
    stack = stack or Stack()
    # together: a model that is refused on one rank only must not leave the others waiting
    decoder = on_all_ranks(world_group(), lambda: _read(model, stack, weights))
    if isinstance(decoder, OwnDecoder):
        require_proof(decoder)
    device = _device(model, device)
    mesh = build_mesh(stack, device, offload_parameters)
    if quantize is not None:
        _check_packing(decoder, stack, mesh, quantize, offload_parameters)
    if mesh.offload:
        on_all_ranks(mesh.world, lambda: require_host_room(model, mesh))
    compute = dtype or _compute_dtype(decoder, stack, device)
    _check_dtype(model, mesh, compute)
    folder = None if scratch is None else Path(scratch)
    # together: one rank without a writable disk must not leave the others waiting
    store = on_all_ranks(mesh.world, lambda: open_store(cast(StoreKind, stack.offload), device=device, scratch=folder))
    on_device = store if isinstance(store, GpuStore) else GpuStore(device)
    return assemble(
        model, decoder, stack, mesh, store=store, on_device=on_device, kernels=Kernels(stack.attention), loss_kernel=LossKernel(),
        dtype=compute, weights=weights, seed=seed, packing=None if quantize is None else Nf4,
    )  # fmt: skip


def _read(model: nn.Module, stack: Stack, weights: str | Path | Callable[[Run], None] | None) -> Decoder | OwnDecoder:
    decoder = read_decoder(model, stack)
    require(stack.layer_violations(len(decoder.layers)), "this stack does not suit the model")
    _check_weights(model, weights)
    return decoder


def read_decoder(model: nn.Module, stack: Stack) -> Decoder | OwnDecoder:
    """By the table of families, or by its own code where the stack says so or the table does not know it."""
    known = getattr(getattr(base_model(model), "config", None), "model_type", None) in FAMILIES
    if stack.engine == "module" or (stack.engine == "auto" and not known):
        return read_own(model)
    return read_model(model)


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
    if adapter_starts(model) not in (set(), {True}, {"gaussian"}):
        raise ValueError(
            f"adapters on the meta device start as with init_lora_weights=True or 'gaussian', not {adapter_starts(model)}, which "
            "need the base first; choose one of the two, or build base and adapters on a real device and drop weights="
        )


def require_host_room(model: nn.Module, mesh: Mesh) -> None:
    """Failed, before anything is loaded, if weights, gradients and AdamW's averages of this host's ranks are more than its memory.
    What FSDP2 pins comes in powers of two; of a model that is here already the weights are counted once more, for they are
    copied."""
    shards, need, trained = mesh.shards, 0, 0
    for parameter in model.parameters():
        rows = -(-parameter.shape[0] // shards) if parameter.dim() else 1
        weights = rows * (parameter.numel() // max(parameter.shape[0], 1)) if parameter.dim() else 1
        if parameter.requires_grad:
            size = max(parameter.element_size(), FP32)
            need += 2 * pinned(weights * size) + 2 * weights * size
            trained += weights
        else:
            need += pinned(weights * parameter.element_size())
    need, available = need * mesh.ranks_here, available_memory()
    if need > available:
        raise Failed(
            MEMORY,
            f"weights, gradients and optimizer states of {trained * shards:,} trained weights take {human_bytes(need)} of host "
            f"memory here (train.offload_optimizer, ranks on this host: {mesh.ranks_here}), and {human_bytes(available)} are "
            "available: use more hosts, a host with more memory, model.lora, or keep them on the GPU",
        )


def _check_packing(decoder: Decoder | OwnDecoder, stack: Stack, mesh: Mesh, quantize: str, offload: bool) -> None:
    if quantize != "nf4":
        raise ValueError(f"quantize={quantize!r} is not known; there is 'nf4', or None")
    problems = []
    if mesh.parameters is None:
        problems.append(
            "FSDP2 unpacks a layer when it gathers it, and shard_parameters=False does without; leave it True"
        )
    if offload:
        problems.append(
            "offload_parameters keeps shards on the host, which four bits a weight make needless; drop one of them"
        )
    problems += packing_violations([layer.module for layer in decoder.layers], mesh.shards)
    require(problems, CANNOT_PACK)


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


def _compute_dtype(decoder: Decoder | OwnDecoder, stack: Stack, device: torch.device) -> torch.dtype:
    own = next(decoder.model.parameters()).dtype
    return torch.bfloat16 if device.type == "cuda" and stack.shard_parameters else own
