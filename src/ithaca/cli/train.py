"""`ithaca train`: one command that starts a run and resumes it.

Dotted options (`--train.steps 100`) override the file, the file overrides its recipe. What is done with it, by this command and by
`ithaca.train`, is in training/entry.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..base import faults
from ..config import load
from ..training.entry import Wishes, carry_out, check_only, dry_run


def add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a model; the same command resumes",
        description="Train a model as a YAML file says. The same command on the same run folder resumes.",
        epilog="Any setting can be given as --section.name VALUE, such as --train.steps 100 --stack.ulysses 4 --data.context 1M; "
        "ithaca docs config lists them. Ctrl-C saves and stops after the step, a second one stops at once.",
    )
    parser.add_argument("config", nargs="?", metavar="FILE", help="the run as YAML; `ithaca recipes cp` makes one")
    parser.add_argument("--recipe", help="start from this recipe (`ithaca recipes ls`)")
    parser.add_argument("--cpu", type=int, default=None, metavar="N", help="train on the CPU with N workers")
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="let the workers share the GPUs there are, to rehearse a larger job (launch.workers); its speed means nothing",
    )
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on the terminal")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the whole config, look for every problem that files can tell, and stop",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the same, count the data, show the plan of memory and time, and stop: no step, nothing written",
    )
    parser.add_argument(
        "--allow-change",
        action="store_true",
        help="go on from a checkpoint though data or model settings are others now",
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND@RANK:STEP[:POINT]",
        help=f"break this run on purpose, to rehearse (ithaca docs reliability); needs {faults.ALLOW}=1",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    parser.set_defaults(run=run_train, overrides=[], resumes=True)


def run_train(options: argparse.Namespace) -> int:
    overrides = list(options.overrides)
    if options.cpu is not None:
        overrides.append(f"launch.cpu={options.cpu}")
    if options.share_gpu:
        overrides.append("launch.share_gpu=true")
    if options.config is None and options.recipe is None:
        raise ValueError(
            "what is to be trained? Give a file (ithaca train run.yaml) or a recipe (ithaca train --recipe tiny_cpu); "
            "`ithaca recipes ls` lists recipes, `ithaca recipes cp NAME` makes a file of one"
        )
    loaded = load(None if options.config is None else Path(options.config), overrides, options.recipe)
    injected = faults.parse_all(options.fault, os.environ)
    wishes = Wishes(quiet=options.quiet, allow_change=options.allow_change, injected=injected)
    if options.check:
        check_only(loaded, wishes)
    if options.dry_run:
        dry_run(loaded, wishes)
    return 0 if options.check or options.dry_run else carry_out(loaded, wishes)
