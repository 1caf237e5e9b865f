"""A short number for the contents of a parameter, the same however it is sharded.

A LoRA checkpoint holds the adapters, not the frozen base, so it must know its base when it meets it again. A cryptographic hash
needs all bytes in order on one rank. This one is a sum: elements, read as integers, times their odd position numbers 2i+1, modulo
2^64. Each rank adds up its rows and the ranks add up their sums. It finds other weights, swapped rows and another dtype; it is no
protection against forgery. Of a weight in NF4 the elements are its packed bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.mesh import Mesh, local_part
from ..engine.model.nf4 import Nf4
from ..engine.model.weights import rows_of

PACKED = "nf4_"  # before the dtype, where the numbers are packed
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22  # elements; the products take 8 bytes each


@torch.no_grad()
def fingerprints(parameters: Iterable[tuple[str, Tensor]], mesh: Mesh) -> dict[str, str]:
    """Name -> fingerprint. Collective."""
    named = list(parameters)
    if not named:
        return {}
    sums = torch.stack([_share(parameter).to(mesh.device) for _, parameter in named])
    if not mesh.world.peerless:
        dist.all_reduce(sums, group=mesh.world.pg)  # wraps around like the sums themselves
    return {name: _text(value, parameter) for (name, parameter), value in zip(named, sums.tolist(), strict=True)}


def fingerprint(tensor: Tensor) -> str:
    """Of a whole tensor."""
    return _text(int(_sum(_elements(tensor), 0)), tensor)


def _share(parameter: Tensor) -> Tensor:
    """This rank's part of the sum: of a parameter's copies only one counts."""
    if not isinstance(parameter, DTensor):
        first = not dist.is_initialized() or dist.get_rank() == 0
        return _sum(parameter, 0) if first else torch.zeros((), dtype=torch.int64, device=parameter.device)
    offset, count = rows_of(parameter)
    local = _elements(parameter.to_local())
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    copy = any(at and placement.is_replicate() for at, placement in zip(place, parameter.placements, strict=True))
    if copy or not count:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return _sum(local[:count], offset * local.shape[1:].numel())


def _elements(tensor: Tensor) -> Tensor:
    return tensor.packed if isinstance(tensor, Nf4) else tensor


def _sum(tensor: Tensor, start: int) -> Tensor:
    """Of elements `start`, start + 1, ... of a parameter."""
    flat = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), _AT_ONCE):
        piece = flat[at : at + _AT_ONCE].to(torch.int64)
        weights = torch.arange(start + at, start + at + piece.numel(), dtype=torch.int64, device=flat.device)
        total += (piece * weights.mul_(2).add_(1)).sum()
    return total


def _text(value: int, tensor: Tensor) -> str:
    packed = PACKED if isinstance(local_part(tensor), Nf4) else ""
    return f"{packed}{str(tensor.dtype).removeprefix('torch.')}-{'x'.join(map(str, tensor.shape))}-{value % 2**64:016x}"
