"""A few steps on every rank of a process group that is there: what each took of its GPU, and how long. For `ithaca bench`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ...planner.config import hf_config
from .measure import around, timed
from .steps import ready
from .wanted import Wanted


@dataclass(frozen=True)
class RankResult:
    seconds: float  # of a step: the median of those after the first
    tokens: int  # of a step on this rank
    peak: int | None  # bytes of tensors at most, as torch's allocator counts them; None on a CPU
    context: (
        int | None
    )  # bytes of this GPU that nobody's tensors have: contexts, NCCL's buffers; of all ranks that share it
    pinned: int  # bytes of host memory that the store holds
    kernel: str


def bench_rank(wanted: Wanted) -> RankResult:
    """Collective, on the ranks of wanted.job."""
    gpu = not wanted.cpu
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.empty_cache()  # of a shorter context before
    dtype = torch.bfloat16 if gpu else torch.float32  # many CPUs multiply bf16 a number at a time
    with ready(wanted.job, hf_config(wanted.model), device, wanted.layers, dtype=dtype, joined=True) as step:
        step()
        dist.barrier()
        steps = [timed(step, gpu) for _ in range(wanted.steps)]
        peaks = [int(one["peak"]) for one in steps if one["peak"] is not None]
        kernel = next(iter(step.run.kernels.chosen.values())).name
        held = step.run.report()["store"].held_bytes
        return RankResult(
            median(float(one["seconds"] or 0.0) for one in steps), step.tokens, max(peaks, default=None),
            around(device)["context"] if gpu else None, held, kernel,
        )  # fmt: skip
