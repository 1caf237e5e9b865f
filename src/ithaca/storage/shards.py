"""DTensors by their shards: put another in the place of this rank's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..engine.mesh import local_part


def like(local: Tensor, value: Tensor, shape: torch.Size) -> Tensor:
    """`local` as this rank's rows of a tensor of this shape, sharded like `value`.

    Not `DTensor.from_local`, which moves the rows to the device of the mesh: copies for a save, and offloaded shards, are on the
    host.
    """
    if not isinstance(value, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(value.device_mesh, value.placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


class HostCopies:
    """Copies of shards on the host, which training cannot change. Their memory is kept from save to save: to get fresh memory
    from the system takes longer than to copy into it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Valid until the next call."""
        self._kept = {key: self._copy(key, local_part(value).detach()) for key, value in tensors.items()}
        return {key: like(self._kept[key], value, value.shape) for key, value in tensors.items()}

    def _copy(self, key: str, local: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype, kept.stride()) != (local.shape, local.dtype, local.stride()):
            return local.to("cpu", copy=True)
        return kept.copy_(local)
