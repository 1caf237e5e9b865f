"""`ithaca ladder`: what each technique takes away on the user's own model, predicted or measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.kernels import GPU_KERNELS
from ..base.units import parse_room
from ..config import add_stack_options, read_stack
from ..stack import require
from .measuring import at_least, limit_of, on_cpu, say
from .plan import known_model

_HELP = """\
Adds one technique after the other (FSDP, Ulysses, checkpointing, offload, tiling, Untied Ulysses, streamed layer) and shows the
peak of a GPU at each rung, what holds most of it, and how fast it would be; and what other values of heads_per_stage and tile
would cost at the top. Predicted in a second without a GPU. With --measure every rung runs, as rank 0 of the GPUs that --gpus
names, on the GPU that is here (or on CPU tensors), in a process of its own; one that runs out of memory says so.
A field of the stack that is given (--stack.FIELD VALUE) is so on every rung, and what would have added it is left out.

  ithaca ladder llama3_8b --gpus 8xH100-80GB --context 3M --svg ladder.svg
  ithaca ladder llama3_8b --gpus 8xH100-80GB --context 512K --layers 2 --measure --png ladder.png
"""


def add_ladder(verbs: Any) -> None:
    parser = verbs.add_parser(
        "ladder",
        help="show what each technique takes away, rung by rung",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_ladder, traceback=False)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, that file, owner/name, or a preset (ithaca plan --help)",
    )
    parser.add_argument("--gpus", required=True, help="such as 8xH100-80GB")
    parser.add_argument("--context", required=True, help="tokens of a row, such as 1M")
    parser.add_argument("--host", help="memory of one machine, such as 1TB; not given: what is usual, and said")
    parser.add_argument("--kernel", help=f"attention kernel: {', '.join(GPU_KERNELS)} (default: what the engine takes)")
    parser.add_argument("--layers", type=int, help="of a slice of the model: only so many layers")
    parser.add_argument("--measure", action="store_true", help="run every rung, and show it beside the prediction")
    parser.add_argument("--measure-sweeps", action="store_true", help="run the values of the sweeps too")
    parser.add_argument("--steps", type=int, default=2, help="steps to time, after a warm-up (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU, even if there is a GPU")
    parser.add_argument("--json", action="store_true", help="print the ladder as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it (package matplotlib)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page")
    why = "fields that are as given on every rung. Values are as in YAML (ithaca docs config)"
    add_stack_options(parser, why, older="set")


def run_ladder(options: argparse.Namespace) -> int:
    from ..engine.model.sizes import read_sizes
    from ..planner.chart import ladder_svg
    from ..planner.hardware import parse_gpus
    from ..planner.ladder import describe, ladder

    at_least(1, steps=options.steps, layers=options.layers)
    pinned, problems = read_stack(options)
    require(problems, "there is no such ladder")
    if options.png:
        from ..planner.chart import ladder_png, require_matplotlib

        require_matplotlib()  # before anything is measured for an hour
    options.model = known_model(options.model)
    measures = options.measure or options.measure_sweeps
    cpu = on_cpu(options) if measures else False
    hardware = parse_gpus(options.gpus)
    if options.host is not None:
        hardware = replace(hardware, host=parse_room(options.host))
    gpu = hardware.gpu
    if measures and not options.kernel:
        hardware = replace(hardware, gpu=replace(gpu, probed=kernels_apart(read_sizes(options.model), cpu)))
    planned = ladder(
        options.model, gpus=hardware, context=options.context, layers=options.layers, kernel=options.kernel, **pinned
    )
    if measures:
        from ..observe.profiler.rungs import measure_ladder

        measure_ladder(
            planned, options.model, layers=options.layers, steps=options.steps, cpu=cpu, limit=None if cpu else limit_of(gpu),
            sweeps=options.measure_sweeps, kernel=None if cpu else options.kernel, say=say,
        )  # fmt: skip
    whole = planned.json()
    if options.svg:
        options.svg.write_text(ladder_svg(whole))
    if options.png:
        ladder_png(whole, options.png)
    if options.html:
        from ..observe.report import write_report

        write_report(options.html, ladder=whole)
    print(json.dumps(whole, indent=1) if options.json else "\n".join(describe(planned)))
    return 0


def kernels_apart(model: Any, cpu: bool) -> tuple[str, str]:
    """The attention kernels that the rungs will run with. This process leaves the GPU to them, so another one asks."""
    if cpu:
        return "cpu", "cpu"
    import torch

    from ..base.processes.apart import run_apart
    from ..engine.attention.choice import kernels_here

    windowed = [window is not None for window in dict.fromkeys(model.windows)]
    asked = "auto", torch.device("cuda", 0), torch.bfloat16, model.head_dim, windowed
    found = run_apart(kernels_here, *asked, preload=["ithaca.observe.profiler.case"])  # which the rungs need as well
    if found.status != 0:
        why = (found.printed.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"which attention kernel runs here could not be found out ({why}); name one with --kernel")
    return found.value
