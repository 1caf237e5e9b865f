"""QLoRA beside LoRA on one GPU: time and memory of a step, and the way from a folder. How long under a limit: recipes.py.

    python benchmarks/qlora.py --layers 8 --context 32K               # LoRA in bf16 and NF4: seconds, tokens/s, GB, GB planned
    python benchmarks/qlora.py --load /scratch/8b                     # writes a folder once, then: seconds to the first loss
    python benchmarks/qlora.py --shape tiny_llama --context 256 --cpu  # no GPU: does it still run?

Random weights, adapters of rank 16 on every linear, one row, AdamW.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path

import torch
from rank_of_n import size

import ithaca
from ithaca.engine.job import Job
from ithaca.engine.model.sizes import read_sizes, sliced
from ithaca.engine.model.weights import fill_at_random
from ithaca.observe.profiler.steps import ready
from ithaca.planner.config import hf_config
from ithaca.planner.dry_run.run import meta_model
from ithaca.planner.memory import predict
from ithaca.stack import Stack
from ithaca.storage.export import export_model

RANK = 16


def stepped(job: Job, shape: str, layers: int | None, device: torch.device, steps: int) -> tuple[float, int]:
    """-> seconds of the fastest step behind a first one, or of that if there are no more, and bytes at the peak"""
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    with ready(job, hf_config(shape), device, layers, dtype=torch.bfloat16 if cuda else torch.float32) as step:
        seconds = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(1 + steps):
            start = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:] or seconds), torch.cuda.max_memory_allocated() if cuda else 0


def beside(options: argparse.Namespace, device: torch.device) -> None:
    stack = Stack(tile=8192, heads_per_stage=options.heads)
    print("| base | s a step | tokens/s | GB | planned |\n|---|---:|---:|---:|---:|")
    for quantize in (None, "nf4"):
        job = Job(
            sliced(read_sizes(options.shape), options.layers), stack, options.context, lora=RANK, quantize=quantize,
            kernel=options.kernel,
        )  # fmt: skip
        seconds, peak = stepped(job, options.shape, options.layers, device, options.steps)
        rate, planned = options.context / seconds, predict(job).peak
        print(f"| {quantize or 'bf16'} | {seconds:.2f} | {rate:,.0f} | {peak / 1e9:.2f} | {planned / 1e9:.2f} |")


def loaded(options: argparse.Namespace, device: torch.device) -> None:
    """From a folder to the first loss, and what the GPU held until then."""
    folder, config = Path(options.load), hf_config(options.shape)
    job = Job(read_sizes(options.shape), Stack(tile=8192, store="host"), options.context, lora=RANK, quantize="nf4")
    if not folder.exists():
        whole = ithaca.prepare(
            meta_model(replace(job, lora=0), config, torch.bfloat16), job.stack, device=device, dtype=torch.bfloat16,
            weights=lambda run: fill_at_random(run.decoder, run.mesh),
        )  # fmt: skip
        export_model(whole, folder)
        del whole
        gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    dtype = torch.bfloat16 if cuda else torch.float32
    run = ithaca.prepare(
        meta_model(job, config, dtype), job.stack, device=device, dtype=dtype, weights=folder, quantize="nf4"
    )
    filled, held = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    run.loss(run.shard(torch.zeros(1, options.context, dtype=torch.int64))).item()
    print(
        f"loaded in {filled:.1f} s, at most {held:.2f} GB on the GPU; first loss after {time.perf_counter() - start:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama31_8b", help="a preset")
    parser.add_argument("--layers", type=int, help="fewer than it has")
    parser.add_argument("--context", type=size, default="32K")
    parser.add_argument("--heads", type=int, help="at a time")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kernel", default="fa4", help="that the plan counts with")
    parser.add_argument("--load", metavar="FOLDER")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    if options.load:
        loaded(options, device)
    else:
        beside(options, device)


if __name__ == "__main__":
    main()
