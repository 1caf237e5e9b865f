"""A recipe's memory on a real GPU beside its plan.

    python benchmarks/recipes.py llama31_8b_qlora_128k_1x24gb llama31_8b_lora_128k_1x48gb --layers 4
    python benchmarks/recipes.py llama3_8b_2m_1xh200 --layers 4 --no-attention
    python benchmarks/recipes.py llama31_8b_qlora_128k_1x24gb --set stack=auto --max-context --host 128GiB --no-attention
    python benchmarks/recipes.py tiny_cpu --cpu       # no GPU: does it still run?

Each recipe has the plan of `ithaca plan RECIPE`, of which one step is timed behind a first one that warms up: random weights of
the preset with the sizes of its model, random tokens, rank 0 of as many as it is for. The allocator may have what a GPU of the
recipe's has, less the CUDA context, and attention is the kernel of its plan where this machine has it. "plan" is of what runs:
with --layers the weights, gradients and states of the other layers lie on the GPU all the same, but what they keep of their
activations does not, and nothing of them waits on the host or on disk, weights and states neither. "host" is how much less memory
the machine has free than before the model was built, so nothing else may run there; its plan counts the process, and what a disk
store keeps near. Where `store` is disk, TMPDIR names the folder. One that does not fit is a row that says so.

    --no-attention    memory runs at millions of tokens: a stand-in kernel allocates its tensors and computes nothing
    --max-context     not the recipe's context, but the longest that is planned for its GPU and a host of --host
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from ithaca.base.units import format_bytes, format_tokens
from ithaca.cli.measuring import limit_of
from ithaca.config import recipe_names
from ithaca.engine.attention.choice import kernels_here
from ithaca.engine.job import Job
from ithaca.engine.offload.host import available_memory
from ithaca.observe.profiler.measure import timed
from ithaca.observe.profiler.steps import ready
from ithaca.observe.profiler.wanted import Wanted, expected
from ithaca.planner.config import hf_config
from ithaca.planner.dry_run.kernels import DryKernel
from ithaca.planner.plan import Plan
from ithaca.planner.run import hardware_of, load_run, parts_of

MEANT = {"1x24gb": "1xRTX4090", "1x48gb": "1xL40S"}  # names that say the memory of a GPU, and not which it is
CPU = "4xH100-80GB"  # plans are of GPUs: that of a run on a CPU is made for these
HEAD = ["recipe", "context", "layers", "attention", "limit", "step", "peak", "plan", "plan off", "host", "plan"]


class Measured(NamedTuple):
    kernel: str  # of attention, that ran
    seconds: float
    peak: int
    host: int


def planned(recipe: str, options: argparse.Namespace) -> tuple[str, Plan]:
    """-> preset, and the plan that `ithaca plan` makes of a recipe; of several phases the longest"""
    cpu = ["model.dtype=bf16"] if options.cpu else []  # no other type is planned
    loaded = load_run(recipe, [*cpu, *options.set])
    hardware, _ = hardware_of(loaded, CPU if cpu else MEANT.get(recipe.rpartition("_")[2]))
    part = max(parts_of(loaded), key=lambda part: part.asked["context"])
    return part.model, part.plan(options.max_context, gpus=hardware, host=options.host)


def on_this_machine(job: Job, device: torch.device) -> Job:
    """With the attention kernel of its plan by name, as a larger GPU would choose another; where it is not here, what is."""
    if device.type != "cuda" or job.stack.attention != "auto":
        return job
    try:
        kernels_here(job.kernel, device, torch.bfloat16, job.model.head_dim)
    except ValueError:
        return job
    return replace(job, stack=replace(job.stack, attention=job.kernel))


@contextmanager
def limited(limit: int | None, device: torch.device) -> Iterator[None]:
    """The allocator has no more than this, and begins with nothing."""
    gc.collect()  # a model measured before is a circle of objects
    if limit is None:
        yield
        return
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # as the command does
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def measured(wanted: Wanted, attention: bool, first: bool) -> Measured:
    """The second step, or the first."""
    cuda, before = not wanted.cpu, available_memory()
    dtype = torch.bfloat16 if cuda else torch.float32
    with ready(wanted.job, hf_config(wanted.model), wanted.device, wanted.layers, wanted.states, dtype=dtype) as step:
        kernels = step.run.kernels.chosen
        if not attention:
            kernels.update((need, DryKernel(wanted.job.kernel)) for need in kernels)  # pyright: ignore
        if not first:
            timed(step, cuda)
        last = timed(step, cuda)
        name = next(iter(kernels.values())).name
        return Measured(name, last["seconds"] or 0.0, int(last["peak"] or 0), before - available_memory())


def row(recipe: str, options: argparse.Namespace) -> list[str]:
    preset, whole = planned(recipe, options)
    limit = None if options.cpu else limit_of(whole.hardware.gpu)
    wanted = Wanted(job=whole.job, model=preset, layers=options.layers, states=True, cpu=options.cpu, limit=limit)
    if not options.no_attention:
        wanted = replace(wanted, job=on_this_machine(whole.job, wanted.device))
    said = expected(whole, wanted, whole.job.kernel)
    first = [recipe, format_tokens(whole.context), str(said.model.layers)]
    room = "-" if limit is None else format_bytes(limit)
    try:
        with limited(limit, wanted.device):
            found = measured(wanted, not options.no_attention, options.first)
    except (torch.OutOfMemoryError, MemoryError) as error:
        why = f"does not fit: {(str(error) or 'out of memory').splitlines()[0]}"
        sizes = format_bytes(said.allocated), format_bytes(said.memory.host + said.besides)
        return [*first, "-", room, why, "-", sizes[0], "-", "-", sizes[1]]
    said = expected(whole, wanted, found.kernel)
    return [
        *first, "none" if options.no_attention else found.kernel, room, f"{found.seconds:.2f} s",
        format_bytes(found.peak) if limit else "-", format_bytes(said.allocated),
        f"{said.allocated / found.peak - 1:+.1%}" if limit else "-", format_bytes(max(0, found.host)),
        format_bytes(said.memory.host + said.besides),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=recipe_names(), metavar="RECIPE", help="ithaca recipes ls")
    parser.add_argument("--layers", type=int, help="run so many of its layers only, and hold the states of all")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--first", action="store_true", help="measure the first step, where one takes minutes")
    parser.add_argument("--max-context", action="store_true")
    parser.add_argument("--host", help="of the plan, e.g. 128GiB (default: what is usual)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipes")
    parser.add_argument("--cpu", action="store_true", help="try it without a GPU")
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for recipe in options.recipes:
        print(f"| {' | '.join(row(recipe, options))} |", flush=True)


if __name__ == "__main__":
    main()
