"""How a store sees tensors: as a layout and a run of bytes, without copying them.

Attention returns its output transposed ([B, H, S, D] over [B, S, H, D] in memory). Such a tensor is dense, so its bytes
can be copied as they lie and come back with the same strides. Only gaps or repeats in memory need a copy first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.holding import CALLER, module_holds

module_holds(__name__, CALLER)


@dataclass(frozen=True)
class Layout:
    """How to rebuild a tensor from its bytes: shape, dtype and the order of dimensions in memory."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]  # outermost in memory first
    dtype: torch.dtype
    nbytes: int

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_permuted(self.shape, self.dims, dtype=self.dtype, device=device)

    def flat(self, tensor: Tensor) -> Tensor:
        """The bytes of `tensor` [nbytes], a view."""
        return tensor.permute(self.dims).view(-1).view(torch.uint8)


def pack(tensor: Tensor) -> tuple[Layout, Tensor]:
    """The layout of `tensor` and its bytes. Dense tensors, transposed ones too, are viewed; only a tensor with gaps or
    repeats in memory (a slice, an expanded one) is copied first."""
    dims = tuple(range(tensor.dim()))
    if not tensor.is_contiguous():
        by_stride = tuple(sorted(dims, key=lambda dim: -tensor.stride(dim)))
        if tensor.permute(by_stride).is_contiguous():
            dims = by_stride
        else:
            tensor = tensor.contiguous()
    layout = Layout(tuple(tensor.shape), dims, tensor.dtype, tensor.nbytes)
    return layout, layout.flat(tensor)


class Source:
    """Tensors that must neither be freed nor change, and a check of the second."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self._versions = self._read_versions()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def own(self) -> None:
        """Hold copies instead."""
        self.tensors = [tensor.clone() for tensor in self.tensors]
        self._versions = self._read_versions()

    def check_unchanged(self) -> None:
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "a kept tensor was written in place after put() and before its copy was done: "
                "call store.wait_copied(handle) before the write, or put a clone"
            )

    def _read_versions(self) -> list[int | None]:
        # Detached views share the counter of the tensor they come from; inference tensors have none.
        return [None if tensor.is_inference() else tensor._version for tensor in self.tensors]
