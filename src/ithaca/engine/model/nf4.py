"""NF4: a frozen base in four bits a weight, as QLoRA has it (https://arxiv.org/abs/2305.14314).

Sixty-four neighbours of a row share a scale, the largest of them; each is one of sixteen levels, the quantiles of a normal
distribution, and two of them share a byte. Levels, order and rounding are those of bitsandbytes, bit for bit, so that adapters
trained here belong on a base that it has loaded.

A shard of a parameter stays packed. FSDP2 gathers the packed bytes, 3.6 times fewer than bf16's, and what it hands to the layer
is unpacked: from there on the layer cannot tell, so every technique works on a packed base as on another. What is gathered is
freed between forward and backward as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...base.holding import module_holds
from ..limits import NF4 as BYTES
from ..limits import NF4_BLOCK as BLOCK

_AT_ONCE = 1 << 24  # weights
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
module_holds(__name__, "fsdp")


def pack(weight: Tensor) -> Tensor:
    """[..., columns] -> bytes [..., columns * 9 / 16]: codes, two in a byte, the first one high; then scales, in float32."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    known = levels(weight.device)
    middles = (known[1:] + known[:-1]) / 2
    inverse = torch.where(scales > 0, 1 / scales, 0.0)  # a block of zeros
    codes = torch.bucketize(blocks * inverse[..., None], middles).to(torch.uint8).flatten(-2)
    return torch.cat((codes[..., 0::2] << 4 | codes[..., 1::2], scales.view(torch.uint8)), -1)


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """What `pack` made, rounded to the dtype of `out`, into it."""
    if packed.device.type == "cuda":
        from .nf4_triton import unpack_on_gpu

        return unpack_on_gpu(packed, levels(packed.device), out)
    codes, scales = packed.split((out.shape[-1] // 2, 4 * out.shape[-1] // BLOCK), -1)
    known = levels(packed.device)
    halves = torch.stack((known[(codes >> 4).long()], known[(codes & 15).long()]), -1).flatten(-2)
    return out.copy_(halves.unflatten(-1, (-1, BLOCK)).mul_(scales.view(torch.float32)[..., None]).flatten(-2))


@functools.cache
def levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


class Nf4(Tensor):
    """A packed shard that looks like the parameter's, of its shape and dtype."""

    packed: Tensor
    unpack = staticmethod(unpack)  # a dry run has another
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Nf4:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=packed.device)  # pyright: ignore
        made.packed = packed
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Nf4:
        """Packed now; on the meta device, room for it."""
        room = torch.empty(*weight.shape[:-1], int(weight.shape[-1] * BYTES), dtype=torch.uint8, device=weight.device)
        made = cls(room, weight.shape, weight.dtype)
        if not weight.is_meta:
            made.fill(weight)
        return made

    def fill(self, weight: Tensor) -> None:
        """Pack other numbers into the same memory, some rows at a time: packing takes many times what it packs."""
        rows = max(1, _AT_ONCE // max(1, weight[:1].numel()))
        for numbers, room in zip(weight.split(rows), self.packed.split(rows), strict=True):
            room.copy_(pack(numbers.to(room.device)))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["packed"], (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inside: dict[str, Tensor], about: tuple[Any, ...], size: Any, stride: Any) -> Nf4:
        return cls(inside["packed"], *about)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def scales(self) -> Tensor:
        """[..., columns / 64] of the packed bytes. A weight that is not finite makes its block's so."""
        return self.packed[..., self.shape[-1] // 2 :].view(torch.float32)

    def whole(self) -> Tensor:
        """The numbers that the layer computes with."""
        return self.unpack(self.packed, torch.empty(self.shape, dtype=self.dtype, device=self.device))

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Nf4({tuple(self.shape)}, {self.dtype}, {self.device})"

    # -- FSDP2 --------------------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        return (self.packed,), None  # one tensor: for a single rank FSDP2 takes no more

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (packed,) = outputs
        made = out
        if made is None:
            made = torch.empty(*packed.shape[:-1], self.shape[-1], dtype=dtype, device=packed.device)
        # the memory of the last time autograd may have seen: the same numbers again
        with torch.autograd._unsafe_preserve_version_counter(made):
            self.unpack(packed, made.detach())
        gathered = packed.untyped_storage()
        if gathered._cdata != self.packed.untyped_storage()._cdata:
            gathered.resize_(0)  # or FSDP2 would keep it beside what the layer computes with
        return (made, (made,)) if out is None else None

    # -- what a module may do to its parameters -----------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = op.overloadpacket
        if kind not in _ALLOWED:
            raise NotImplementedError(
                f"{op} of a weight in NF4, which is frozen: nothing is merged into four bits. Export with the adapters merged "
                "instead (ithaca export --merge, export_model(..., merge_lora=True)), into the numbers that come out of it"
            )
        return _ALLOWED[kind](args[0], *args[1:], **(kwargs or {}))

    def _like(self, packed: Tensor, shape: Sequence[int] | None = None) -> Nf4:
        return type(self)(packed, self.shape if shape is None else shape, self.dtype)


_aten = torch.ops.aten
_ALLOWED: dict[Any, Callable[..., Any]] = {
    _aten.detach: lambda weight: weight._like(weight.packed.detach()),
    # DTensor hands out a view of the same shape; FSDP2 keeps a flat one, which of a packed shard is never looked at
    _aten.view: lambda weight, size: weight._like(weight.packed, (weight.numel(),) if list(size) == [-1] else size),
    _aten.empty_like: lambda weight, device=None, **_: weight._like(torch.empty_like(weight.packed, device=device)),
}


def unpacked(shard: Tensor) -> Tensor:
    """The numbers of a shard, be it packed or not."""
    return shard.whole() if isinstance(shard, Nf4) else shard


# -- a model ------------------------------------------------------------------------------------------------------------------


def packable(layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Frozen matrices of the layers' linears and experts: not the embedding, the head, norms and routers."""
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or parameter.requires_grad:
                    continue
                experts = parameter.dim() == 3 and not isinstance(module, _ConvNd)
                if experts or (isinstance(module, nn.Linear) and key == "weight"):
                    yield f"{name}.{key} of layer {number}", parameter


CANNOT_PACK = "the base cannot be packed in NF4"


def packing_violations(layers: Sequence[nn.Module], shards: int) -> list[str]:
    """Why these layers cannot be packed, in shards of so many ranks."""
    found = list(packable(layers))
    if not found:
        return ["the layers have no frozen linear: NF4 is for a base under LoRA adapters"]
    odd = [
        f"{name} has rows of {parameter.shape[-1]}, which is no multiple of {BLOCK}"
        for name, parameter in found
        if parameter.shape[-1] % BLOCK
    ]
    odd += [
        f"{name} has {parameter.shape[0]} rows, which {shards} ranks cannot share evenly; use fewer ranks, or more replicas"
        for name, parameter in found
        if parameter.shape[0] % shards
    ]
    return odd[:3]
