"""N real NCCL ranks on the GPUs there are, against one rank: loss and every gradient at length, and what each rank holds.

    python benchmarks/real_ranks.py --tokens 1M --ranks 8 --layers 2                       # Llama3-8B widths
    python benchmarks/real_ranks.py --tokens 4K --ranks 2 --layers 2 --shape tiny_llama --cpu    # no GPU: does it still run?

Ranks, data, NCCL, FSDP2, streams and stores are real. Links and time are not, where ranks share a GPU (base/gpu_sharing.py). Both
runs have the same weights and tokens, from seeds, and the same kernels. Of each gradient it is the distance between the two over
the norm of the one rank's: in bf16 they differ by rounding, since sums are made in another order. The peak of each rank is what
torch's allocator counted; beside it the plan for rank 0 of N, and what the GPU had beyond all tensors: contexts, NCCL's buffers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_of_n import size
from torch.distributed.tensor import DTensor

from ithaca.base.processes.pool import Workers
from ithaca.config import add_stack_options, read_stack
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import read_sizes, sliced
from ithaca.engine.model.weights import rows_of
from ithaca.observe.profiler.steps import ready
from ithaca.planner.config import hf_config
from ithaca.planner.memory import predict
from ithaca.stack import Stack


def step(job: Job, shape: str, layers: int, cpu: bool, folder: str) -> dict[str, Any]:
    """One forward and backward. The one rank writes its gradients down, several compare theirs with it, each its own part."""
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if cpu else torch.bfloat16
    with ready(job, hf_config(shape), device, layers, dtype=dtype, joined=True) as steps:
        run = steps.run
        _fill(run.model)
        if not cpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = run.loss(steps.batch)
        loss.backward()
        if not cpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = 0 if cpu else torch.cuda.max_memory_allocated()
        free, whole = (0, 0) if cpu else torch.cuda.mem_get_info()
        result = {"loss": float(loss.detach()), "seconds": seconds, "peak": peak, "taken": whole - free}
        result["reserved"] = 0 if cpu else torch.cuda.memory_reserved()
        gradients = {name: parameter.grad for name, parameter in run.model.named_parameters()}
        if job.world == 1:
            for name, grad in gradients.items():
                torch.save(_local(grad).cpu(), Path(folder) / name)
            return result
        sums = torch.stack([torch.stack(_compare(grad, Path(folder) / name)) for name, grad in gradients.items()])
        dist.all_reduce(sums)
        result["apart"] = {name: float((a / b).sqrt()) for name, (a, b) in zip(gradients, sums, strict=True)}
        result["kernel"] = next(iter(run.kernels.chosen.values())).name
        return result


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """The same numbers, however many ranks share them."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() < 2:
            continue  # norms are ones, biases zeros
        local = _local(parameter)
        generator = torch.Generator(local.device).manual_seed(number)
        whole = torch.empty(parameter.shape, device=local.device, dtype=local.dtype).normal_(
            0.0, 0.02, generator=generator
        )
        first, count = rows_of(parameter)
        local[:count].copy_(whole[first : first + count])


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _compare(grad: torch.Tensor, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares over this rank's rows: of the difference, and of the one rank's gradient."""
    whole, part = torch.load(path, mmap=True, weights_only=True), _local(grad)
    first, count = rows_of(grad)
    part, theirs = part[:count], whole[first : first + count].to(part.device)
    return (part.double() - theirs.double()).square().sum(), theirs.double().square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3_8b")
    parser.add_argument("--tokens", type=size, default=size("1M"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    add_stack_options(
        parser, "the stack of the ranks; default: ulysses of all, one head a stage, host store, streamed", older="field"
    )
    options = parser.parse_args()
    os.environ.setdefault(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    )  # as the command line does: eight must fit together
    given, problems = read_stack(options, options.ranks)
    assert not problems, problems
    stack = Stack(**{**dict(ulysses=options.ranks, heads_per_stage=1, store="host", engine="streamed"), **given})
    alone = Stack(heads_per_stage=1, store="host", engine="streamed", tile=stack.tile)
    sizes = sliced(read_sizes(options.shape), options.layers)
    device = "cpu" if options.cpu else "cuda"
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for world, chosen in ((1, alone), (options.ranks, stack)):
            job = Job(sizes, chosen, options.tokens, world)
            share = not options.cpu and world > gpus
            with Workers(world, device=device, share_gpu=share, timeout=1800.0) as pool:
                results[world] = pool.run(step, job, options.shape, options.layers, options.cpu, folder)
            one = results[world][0]
            print(f"{world} rank{'s' if world > 1 else ''}: loss {one['loss']:.7f}, {one['seconds']:.1f} s", flush=True)
    (one,), several = results[1], results[options.ranks]
    apart = several[0]["apart"]
    worst = max(apart, key=lambda name: apart[name])
    print(f"loss apart: {abs(several[0]['loss'] - one['loss']) / abs(one['loss']):.2e}")
    middle = sorted(apart.values())[len(apart) // 2]
    print(f"gradients apart: {len(apart)}, median {middle:.2e}, worst {apart[worst]:.2e} ({worst})")
    if options.cpu:
        return
    gb = 1e9
    planned = predict(Job(sizes, stack, options.tokens, options.ranks, kernel=several[0]["kernel"])).peak
    peaks = [result["peak"] for result in several]
    off = f"{planned / max(peaks) - 1:+.1%}"
    print(f"peak of a rank: {min(peaks) / gb:.2f} to {max(peaks) / gb:.2f} GB; plan {planned / gb:.2f} GB ({off})")
    beyond = several[0]["taken"] - sum(result["reserved"] for result in several)
    print(f"beyond all allocators: {beyond / gb:.2f} GB, {beyond / options.ranks / gb:.2f} a rank (contexts, NCCL)")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {stack}")


if __name__ == "__main__":
    main()
