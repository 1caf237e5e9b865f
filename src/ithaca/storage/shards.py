"""DTensors by their shards: put another in the place of this rank's."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..engine.mesh import local_part
from ..engine.offload.host import HostBuffer

log = logging.getLogger("ithaca")
_ALIGNED = 64  # bytes: no number may begin in the middle of another's


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
    """Copies of shards on the host, which training cannot change, in one buffer that is kept from save to save: to get memory from
    the system takes longer than to copy into it. From a GPU the buffer is pinned, so that a copy runs at the speed of the link."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._buffer: HostBuffer | None = None  # what `_kept` is in, where it is pinned

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Valid until the next call."""
        parts = {key: local_part(value).detach() for key, value in tensors.items()}
        layout = [(key, part.shape, part.dtype) for key, part in parts.items()]
        if layout != self._layout:
            self._kept, self._layout = {}, []  # or both would be held for a moment
            self._kept = self._room(parts)
            self._layout = layout
        for key, part in parts.items():
            self._kept[key].copy_(part, non_blocking=True)
        if self._buffer is not None:
            torch.cuda.synchronize()
        return {key: like(self._kept[key], value, value.shape) for key, value in tensors.items()}

    def _room(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        self._buffer, begins, end = None, {}, 0
        for key, part in parts.items():
            begins[key] = end
            end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        device = next((part.device for part in parts.values() if part.is_cuda), None)
        if device is not None:
            try:
                self._buffer = HostBuffer(end, device)
            except MemoryError as error:
                log.warning(
                    "copies for checkpoints are not pinned, so training waits longer for them: %s",
                    str(error).partition(": ")[0],
                )
        memory = torch.empty(end, dtype=torch.uint8) if self._buffer is None else self._buffer.bytes
        return {
            key: memory[begins[key] : begins[key] + part.nbytes].view(part.dtype).view(part.shape)
            for key, part in parts.items()
        }
