"""Numbers that are not finite (NaN, infinity) go nowhere: into no checkpoint, into no export, and out of no old one.

Loss and gradient of a step are looked at before it changes a weight (training/step.py). But an update can fail by itself: a
learning rate that is too large, an epsilon that is 0 in float32, 0/0 where a gradient is 0. So what goes out is looked at too:

    save            every weight and state, where it lies, before anything is written; all ranks agree
    load, verify    every tensor in the files: an older ithaca did not look
    export          every tensor as it is written, in the dtype it is written in: 3.4e38 is infinite in bf16

Cost: each number is read once. On a GPU all tensors of a dtype go through one kernel, and the host waits once for the answer. It
asks for the largest magnitude, because a sum of squares overflows for numbers that are finite. A state in 8 bits is looked at in
its parts (low_bit.py): codes are whole numbers, its scales and its map are floats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..engine.mesh import local_part
from ..engine.model.nf4 import Nf4
from .dcp import plainly
from .digest import Progress
from .files import NotFiniteValues, listed
from .safe_metadata import METADATA, SafeReader, read_metadata


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those of which this rank holds a number that is not finite."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        local = _numbers(tensor)
        if local.is_floating_point() and local.numel():
            groups.setdefault((local.device, local.dtype), {})[name] = local
    flagged = [(list(group), _finite(list(group.values()))) for group in groups.values()]  # before one is waited for
    return [name for names, flags in flagged for name, good in zip(names, flags.tolist(), strict=True) if not good]


def _numbers(tensor: Tensor) -> Tensor:
    """This rank's; of a weight in NF4 its scales, which tell."""
    local = local_part(tensor)
    return local.scales if isinstance(local, Nf4) else local


def _finite(tensors: list[Tensor]) -> Tensor:
    """A flag for each; none is empty, all are of one dtype and device."""
    if tensors[0].device.type == "cpu":  # where it is the fastest way, and NaN comes through as well
        return torch.stack([torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, ord=math.inf)).isfinite()


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """NotFiniteValues if this rank holds a number that is not."""
    names = not_finite(tensors)
    if names:
        more = f"; {len(names) - 1} more tensors are not finite either" if len(names) > 1 else ""
        raise NotFiniteValues(f"{words(names[0], _numbers(tensors[names[0]]))}{more}")


def words(name: str, tensor: Tensor) -> str:
    """What is wrong with one that is not finite."""
    return _say(name, _count(tensor))


def _count(tensor: Tensor) -> Counter[str]:
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return Counter({"NaN": nan, "infinite": infinite, "numbers": tensor.numel()})


def _say(name: str, count: Mapping[str, int]) -> str:
    return f"{name} is not finite ({count['NaN']:,} NaN and {count['infinite']:,} infinite of {count['numbers']:,} numbers)"


def stored_not_finite(path: Path, names: Collection[str] | None = None, progress: Progress | None = None) -> list[str]:
    """What of a checkpoint is not finite, in words. names: only what lies in these files. One stored piece in memory at a time."""
    files = listed(path)
    if METADATA not in files:
        return []  # no tensors
    reader = SafeReader(path, read_metadata(path, files))
    counts: dict[str, Counter[str]] = {}
    with plainly(f"reading {path}"):
        for name, tensor, size in reader.pieces(files if names is None else names):
            if not_finite({name: tensor}):
                counts[name] = counts.get(name, Counter()) + _count(tensor)
            if progress is not None:
                progress(size)
    return [_say(name.removeprefix("model."), count) for name, count in sorted(counts.items())]
