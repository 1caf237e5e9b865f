"""`ithaca profile`: a few real steps, and where their memory and time went, beside what was planned."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.exits import MEMORY, Failed
from ..base.units import format_tokens
from .measuring import at_least, check_room, limit_of, on_cpu, say
from .plan import add_request, find

_HELP = """\
Takes what `ithaca plan` takes, runs a few steps of it with random weights and random tokens, and shows what held the peak by
category, module and line of code, memory over time, copies and kernels, with the plan beside the measurement.

  ithaca profile llama32_1b --gpus 1xH200 --context 64K
  ithaca profile llama3_8b --gpus 8xH100-80GB --context 1M --host 1TB --layers 2
  ithaca profile ./tiny --gpus 1xH100 --context 1K --cpu --html profile.html

With several GPUs one GPU runs what rank 0 of them would: its kernels, copies and allocations, with peers that send nothing and take
no time. --layers runs a slice of the model where the whole takes too long or too much. Without a GPU it works on CPU tensors and
says what it cannot measure there.

The folder (--out) gets profile.json, plan.json, trace.json.gz for https://ui.perfetto.dev, and memory.pickle for
https://pytorch.org/memory_viz.
"""


def add_profile(verbs: Any) -> None:
    parser = verbs.add_parser(
        "profile",
        help="run a few steps and show where memory and time went, beside the plan",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_profile)
    add_request(parser)
    parser.add_argument(
        "--rank-of", type=int, metavar="N", help="run as rank 0 of N (default: as many as --gpus names)"
    )
    parser.add_argument("--layers", type=int, help="run only so many layers of the model")
    parser.add_argument(
        "--states", action="store_true", help="with --layers: hold weights, gradients and states of all layers"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps to time, after a warm-up (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even if there is a GPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/profile-MODEL-CONTEXT")
    parser.add_argument("--explain", action="store_true", help="every phase, and longer lists")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def run_profile(options: argparse.Namespace) -> int:
    full_plan, wanted = ask(options)
    from ..observe.profiler.measure import OutOfMemory, measure
    from ..observe.profiler.result import Profile
    from ..observe.profiler.text import describe
    from ..observe.profiler.wanted import expected
    from ..planner.shortage import gpu_shortage

    check_room(full_plan, wanted)
    folder = make_folder(
        options.out or Path("runs") / f"profile-{full_plan.model.name}-{format_tokens(full_plan.context)}"
    )
    try:
        profile = Profile.of(wanted, measure(wanted, folder, say), full_plan)
    except OutOfMemory as error:
        if not error.used:
            raise
        planned = expected(full_plan, wanted, full_plan.job.kernel)
        raise Failed(MEMORY, gpu_shortage(planned, error.used)) from error
    whole, plan = profile.json(), profile.planned.json()
    for name, content in (("profile", whole), ("plan", plan)):
        (folder / f"{name}.json").write_text(json.dumps(content) + "\n")
    if options.html:
        from ..observe.report import write_report

        write_report(options.html, plan=plan, profile=whole)
    if options.json:
        print(json.dumps(whole, indent=1))
    else:
        files = ", ".join(["profile.json", "plan.json", *whole["files"].values()])
        print("\n".join([*describe(whole, explain=options.explain), f"  files   {folder}: {files}"]))
    return 0


def ask(options: argparse.Namespace) -> tuple[Any, Any]:
    """The plan as `ithaca plan` makes it, and what to run of it here."""
    at_least(1, steps=options.steps, layers=options.layers, rank_of=options.rank_of)
    options.cpu = on_cpu(options)
    if options.gpus is None:
        options.gpus = gpus_here(options)
    plan = find(options)
    count = plan.hardware.count
    if options.rank_of not in (None, count):
        raise ValueError(
            f"--rank-of {options.rank_of}, but --gpus names {count}: the plan and the measurement would be of different runs; "
            "drop one of them"
        )
    from ..observe.profiler.wanted import Wanted

    if options.kernel and not options.cpu and plan.stack.attention == "auto":
        plan.job = replace(plan.job, stack=replace(plan.stack, attention=options.kernel))
    wanted = Wanted(
        job=plan.job, model=options.model, layers=options.layers, states=options.states, steps=options.steps, cpu=options.cpu,
        limit=None if options.cpu else limit_of(plan.hardware.gpu),
    )  # fmt: skip
    return plan, wanted


def gpus_here(options: argparse.Namespace) -> Any:
    if options.cpu:
        raise ValueError("--gpus is needed where there is no GPU: a plan is for some, such as --gpus 1xH100-80GB")
    import torch

    from ..engine.offload.host import available_memory
    from ..planner.hardware import Hardware
    from ..training.automatic import gpu_here

    ranks = options.rank_of or 1
    # this machine's memory is that of the GPUs it has
    host = available_memory() if ranks <= torch.cuda.device_count() else None
    return Hardware(gpu_here(torch.device("cuda", 0)), ranks, host=host)


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); name another folder with --out") from None
    return folder
