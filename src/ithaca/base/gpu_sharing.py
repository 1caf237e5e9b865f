"""Several ranks on one GPU: a job of N ranks rehearsed with real NCCL and real data, on the GPU there is.

What it proves: every collective, every order of them, every wait between streams. What it cannot: the speed of links, and time at
all, for the ranks take turns. So it is never done unless asked for, and what runs this way is not measured.

NCCL takes two ranks of one GPU for a mistake ("Duplicate GPU detected") unless a variable says otherwise, which 2.30 is the first
to read. torch up to 2.13 brings an older one; a newer library can be put before it with LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import os
from math import ceil

LEAST = (2, 30)
_ENABLE, _BLOCKS, _PROTOCOL = "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_PROTO"
_ALL_BLOCKS = 32  # of one collective's kernel: with more, those of several ranks do not fit beside each other


def nccl_version() -> tuple[int, int, int] | None:
    """Of the library that is loaded; torch.cuda.nccl.version() tells the one that torch was built with. None: there is none."""
    import torch  # loads it

    del torch
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def why_not_shared() -> str | None:
    """Why ranks cannot share a GPU here; None: they can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU here; without one, ranks run on the CPU (launch.cpu, --device cpu, --cpu)"
    version = nccl_version()
    if version is None:
        return "no NCCL is loaded here; install a torch with CUDA for Linux, or run the ranks on the CPU"
    if version < LEAST:
        loaded, least = (".".join(map(str, number)) for number in (version, LEAST))
        return (
            f"NCCL {loaded} is loaded, and ranks can share a GPU from {least} on; torch 2.14 brings one, or put a newer "
            "libnccl.so.2 before it with LD_PRELOAD"
        )
    return None


def ranks_per_gpu(ranks: int, gpus: int) -> int:
    return ceil(ranks / max(gpus, 1))


def sharing_variables(ranks: int, gpus: int) -> dict[str, str]:
    """What NCCL must find in the environment before it begins.

    Of its protocols LL128 sums wrongly where ranks share a GPU: with 2.30.7 an all-reduce of 4 MB over four ranks is off by 0.9 of
    its size, and says nothing. The other two are right."""
    blocks = str(max(1, _ALL_BLOCKS // ranks_per_gpu(ranks, gpus)))
    return {_ENABLE: "1", _BLOCKS: os.environ.get(_BLOCKS, blocks), _PROTOCOL: os.environ.get(_PROTOCOL, "^LL128")}
