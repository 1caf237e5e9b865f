"""States on the host beside states on the device: seconds of a step, the optimizer's share of it, and peaks beside the plan's.

    python benchmarks/states.py --model llama3_8b --context 128K
    python benchmarks/states.py --model llama3_8b --context 256K --layers 4 --places host --host 2TB    # planned for another host
    python benchmarks/states.py --model llama32_1b --context 32K --accumulation 2
    python benchmarks/states.py --model tiny_llama --context 64 --cpu

Full fine-tuning of a preset with random weights on one GPU, AdamW with clipping, by `train.offload_optimizer` false and true, each
with the stack that `stack: auto` takes there; one that does not fit is a row that says so. The first step warms up; the best of
`--steps` is shown. The optimizer's seconds are those after backward: norm, clipping and update. "host" is how much less memory the
machine has free than before the model was built, so nothing else may run there. Beside them what the plan says.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from ithaca.base.units import format_bytes, parse_bytes, parse_tokens
from ithaca.engine.attention.choice import kernels_here
from ithaca.engine.offload.host import available_memory
from ithaca.observe.profiler.steps import Steps, ready
from ithaca.observe.profiler.wanted import Wanted, expected
from ithaca.planner.config import hf_config
from ithaca.planner.gpus import GPUS
from ithaca.planner.hardware import Hardware
from ithaca.planner.own import attention_of
from ithaca.planner.search import plan
from ithaca.training.automatic import gpu_here


def timed(step: Steps, device: torch.device) -> tuple[float, float]:
    """-> seconds of a step, and of those after backward"""
    seconds: dict[str, float] = {}

    def now(phase: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[phase] = time.perf_counter()

    now("begin")
    step(now)
    now("end")
    return seconds["end"] - seconds["begin"], seconds["end"] - seconds["step"]


def row(options: argparse.Namespace, away: bool, device: torch.device) -> list[str]:
    config, cuda = hf_config(options.model), device.type == "cuda"
    gpu = gpu_here(device) if cuda else GPUS["h200"]
    if cuda:
        gpu = replace(gpu, probed=kernels_here("auto", device, torch.bfloat16, attention_of(config)[0], {False}))
    hardware = Hardware(gpu, 1, host=options.host or available_memory())
    where = "host" if away else "device"
    whole = plan(
        options.model, gpus=hardware, context=parse_tokens(options.context), offload_optimizer=away, advise=False,
        rows=options.accumulation, accumulation=options.accumulation, asynchronous=False,
    )  # fmt: skip
    wanted = Wanted(job=whole.job, model=options.model, layers=options.layers, cpu=not cuda)
    said = expected(whole, wanted, whole.job.kernel)
    if not said.fits:
        return [where, f"does not fit: {', '.join(said.shortages)}"]
    before = available_memory()
    with ready(whole.job, config, device, options.layers, dtype=torch.bfloat16 if cuda else torch.float32) as step:
        timed(step, device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        best = min(timed(step, device) for _ in range(options.steps))
        peak, held = torch.cuda.max_memory_allocated() if cuda else 0, before - available_memory()
    took = said.speed.parts["optimizer"]
    return [
        where, f"{best[0]:.2f} s", f"{said.speed.seconds:.2f} s", f"{best[1]:.2f} s", f"{took:.2f} s",
        f"{best[1] / best[0]:.1%}", format_bytes(peak) if cuda else "-", format_bytes(said.allocated),
        f"{said.allocated / peak - 1:+.1%}" if cuda else "-", format_bytes(held), format_bytes(said.memory.host + said.besides),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", help="a preset")
    parser.add_argument("--context", default="128K")
    parser.add_argument("--layers", type=int, help="run so many of its layers only")
    parser.add_argument(
        "--host", type=parse_bytes, help="plan for so much host memory, e.g. 2TB (default: what is free here)"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step, a row each")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--places", default="device,host")
    parser.add_argument("--cpu", action="store_true", help="try it without a GPU")
    options = parser.parse_args()
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    layers = f", {options.layers} layers" if options.layers else ""
    print(f"{options.model}{layers}, {options.context} tokens, rows and micro-batches: {options.accumulation}\n")
    head = ["states", "step", "plan", "optimizer", "plan", "share", "peak", "plan", "plan off", "host", "plan"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for place in options.places.split(","):
        print(f"| {' | '.join(row(options, place == 'host', device))} |", flush=True)


if __name__ == "__main__":
    main()
