"""`ithaca slurm`: a batch script for a run, to read, edit and submit."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

_HELP = """\
Writes a Slurm batch script that trains as a YAML file says: one process per GPU on every node, saved before the time limit,
queued again until it is done. Read it before you submit it.

examples:
  ithaca slurm run.yaml --partition gpu --account physics --time 2-00:00:00 > job.sh && sbatch job.sh
  ithaca slurm run.yaml --nodes 4 --gpus-per-node 8 --setup 'source .venv/bin/activate' --out job.sh
  ithaca slurm run.yaml --train.steps 500                settings of the run, as for ithaca train
"""


def add_slurm(verbs: Any) -> None:
    parser = verbs.add_parser(
        "slurm",
        help="write a Slurm batch script for a run",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_slurm, overrides=[])
    parser.add_argument("config", nargs="?", metavar="FILE", help="the run as YAML")
    parser.add_argument("--recipe", help="start from this recipe (`ithaca recipes ls`)")
    parser.add_argument("--out", metavar="FILE", help="file to make (default: the standard output)")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default: launch.nodes)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each (default: launch.workers)")
    parser.add_argument("--time", default="24:00:00", help="time limit of the job, D-HH:MM:SS (default %(default)s)")
    parser.add_argument("--account", help="who pays")
    parser.add_argument("--partition", help="where it runs")
    parser.add_argument("--cpus-per-task", type=int, metavar="N", help="CPU cores of each process")
    parser.add_argument("--mem", default="0", help="host memory of each node (default: all of it)")
    parser.add_argument(
        "--warning", type=int, default=300, metavar="SECONDS",
        help="stop and save so long before the time limit (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-requeue", action="store_true", help="do not queue the job again")
    parser.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="shell line before the run; repeatable"
    )
    parser.add_argument("--program", help="the ithaca of the nodes (default: the one that runs now)")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run_slurm(options: argparse.Namespace) -> int:
    from ..config import load
    from ..training.launch.slurm import Settings, batch_script

    if options.config is None and options.recipe is None:
        raise ValueError("which run? Give a file (ithaca slurm run.yaml) or --recipe NAME")
    if options.program is not None and not options.program.strip():
        raise ValueError("--program is empty; name the ithaca of the nodes, or leave it out")
    overrides = list(options.overrides)
    if options.nodes is not None:
        overrides.append(f"launch.nodes={options.nodes}")
    if options.gpus_per_node is not None:
        overrides.append(f"launch.workers={options.gpus_per_node}")
    config = load(options.config, overrides, options.recipe).config
    words = (
        ["train"]
        + ([options.config] if options.config else [])
        + (["--recipe", options.recipe] if options.recipe else [])
    )
    words += [
        word for override in overrides for word in ("--" + override.partition("=")[0], override.partition("=")[2])
    ]
    text = batch_script(
        config,
        [*(shlex.split(options.program) if options.program else _this_program()), *words],
        Settings(
            time=options.time, account=options.account, partition=options.partition, cpus=options.cpus_per_task,
            memory=options.mem, warning=options.warning, requeue=not options.no_requeue, setup=tuple(options.setup),
        ),
        made_by=shlex.join(["ithaca", "slurm", *words[1:]]),
    )  # fmt: skip
    if options.out is None:
        print(text, end="")
        return 0
    try:
        # a mode that cannot overwrite, not even between a check and a write
        with open(os.open(options.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{options.out} is there already, and nothing was changed; choose another name") from None
    print(f"wrote {options.out}; read it, then: sbatch {shlex.quote(options.out)}", file=sys.stderr)
    return 0


def _this_program() -> list[str]:
    """By its full path: a job on another node has another PATH."""
    script = Path(sys.executable).parent / "ithaca"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "ithaca"]
