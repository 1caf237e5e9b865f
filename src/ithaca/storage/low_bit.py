"""Optimizer states in 8 bits, taken apart so that torch can store and reshard them.

torchao keeps a state as codes (one byte per element, the shape of the shard), scales (one number per block of elements, counted
along the shard) and a map from codes to numbers. As a whole it is a tensor class of its own, which a checkpoint could only hold
as a pickle. Taken apart, codes are rows like those of the parameter, and scales are too, if a row is a whole number of blocks or
if blocks end where shards do; then both are stored as they are and resharded exactly.

Where that is not so, the state is stored in float32. And which states are in 8 bits depends on the number of ranks: torchao leaves
shards below 4,096 elements in float32. So a state may be stored one way and wanted the other. Out of 8 bits nothing is lost; into 8
bits it is rounded as the optimizer itself rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..engine.mesh import local_part
from ..engine.model.weights import rows_of
from .files import CheckpointError
from .shards import like


@dataclass(frozen=True)
class Layout:
    """How a rank holds a state in 8 bits."""

    block: int  # elements per scale
    codes: torch.dtype
    table: Tensor  # what each code stands for


def is_packed(value: Tensor) -> bool:
    """Whether this rank holds a state in few bits."""
    local: Any = local_part(value)
    if type(local) in (Tensor, torch.nn.Parameter):
        return False
    if not hasattr(local, "dequantize"):
        raise CheckpointError(f"optimizer states of type {type(local).__name__} cannot be stored; use full states")
    return True


def layout_of(value: Tensor) -> Layout | None:
    """None: not one that can be taken apart."""
    local: Any = local_part(value)
    if not all(hasattr(local, name) for name in ("codes", "scale", "qmap")) or local.codes.shape != local.shape:
        return None
    return Layout(local.numel() // local.scale.numel(), local.codes.dtype, local.qmap.cpu())


def fits(value: Tensor, layout: Layout | None) -> bool:
    """Whether this rank's part can be taken apart as the others' are."""
    local: Any = local_part(value)
    if layout is None or (local.numel() and not is_packed(value)):
        return False
    if not isinstance(value, DTensor):
        return True
    shape = _scales(value, layout)
    expected, _ = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
    return local.numel() == torch.Size(expected).numel() * layout.block


def _scales(value: Tensor, layout: Layout) -> torch.Size:
    row = value.shape[1:].numel()
    if value.dim() > 1 and row % layout.block == 0:
        return torch.Size((value.shape[0], row // layout.block))
    return torch.Size((value.numel() // layout.block,))


def take_apart(key: str, value: Tensor, layout: Layout) -> dict[str, Tensor]:
    """-> codes, scales and map of a state, the first two sharing its memory"""
    local: Any = local_part(value)
    shape = _scales(value, layout)
    if local.numel():
        values, scale = local.codes, local.scale.view(-1, *shape[1:])
    else:  # a rank without rows has nothing in 8 bits
        values = local.new_empty(local.shape, dtype=layout.codes)
        scale = local.new_empty((0, *shape[1:]), dtype=torch.float32)
    return {
        f"{key}.codes": like(values, value, value.shape),
        f"{key}.scale": like(scale, value, shape),
        f"{key}.map": layout.table,
    }


def wide_copy(value: Tensor) -> Tensor:
    """In float32."""
    local: Any = local_part(value)
    return like(local.dequantize().float() if is_packed(value) else local.float(), value, value.shape)


def crossings(
    tensors: Mapping[str, Any], packed: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """-> states stored in 8 bits and wanted in float32; states stored in float32 and wanted in 8 bits"""
    wide = [key for key in tensors if key not in stored and f"{key}.codes" in stored]
    return sorted(wide), sorted(key for key in packed if key in stored)


def parts_of(keys: list[str]) -> set[str]:
    return {f"{key}.{part}" for key in keys for part in ("codes", "scale", "map")}


def widen(key: str, target: Tensor, stored: Mapping[str, Any], read: Callable[[dict[str, Tensor]], None]) -> None:
    """Read a state that is stored in 8 bits. `read` fills tensors by their key; every rank reads the whole state."""
    names = ("codes", "scale", "map")
    entries = {name: stored[f"{key}.{name}"] for name in names}
    parts = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    _same_shape(key, parts["codes"], target)
    read({f"{key}.{name}": parts[name] for name in names})
    block = parts["codes"].numel() // parts["scale"].numel()
    whole = parts["map"][parts["codes"].view(-1, block).int()] * parts["scale"].view(-1, 1)
    first, count = rows_of(target)
    if count:
        local_part(target).copy_(whole.view(target.shape)[first : first + count])


def narrow(key: str, target: Tensor, stored: Mapping[str, Any], read: Callable[[dict[str, Tensor]], None]) -> None:
    """Read a state that is stored in float32 into one in 8 bits."""
    local = local_part(target)
    rows = like(torch.empty(local.shape, dtype=torch.float32, device=local.device), target, target.shape)
    _same_shape(key, torch.empty(stored[key].size, device="meta"), target)
    read({key: rows})
    if local.numel():
        local.copy_(local_part(rows))


def _same_shape(key: str, stored: Tensor, target: Tensor) -> None:
    if stored.shape != target.shape:
        raise CheckpointError(f"{key} is {list(stored.shape)} in the checkpoint and {list(target.shape)} in this run")
