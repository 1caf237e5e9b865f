"""`ithaca train`: one command that starts a run and resumes it.

Dotted options (`--train.steps 100`) override the file, the file overrides its recipe. On one machine the command starts its own
workers; under torchrun or srun it joins the job. Before any worker starts, what is on the Hub is fetched, and data that is not
packed yet is packed.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import faults
from ..base.exits import DATA, Failed
from ..base.files import read_text, write_atomically
from ..base.hub import read_pins, remember
from ..base.processes.fork_server import MODELS
from ..base.run_folder import RunFolder
from ..config import Config, Loaded, dump, load
from ..config.curriculum import phase_configs
from ..training.launch import find_job, start

PRELOAD = ("ithaca.training.phases", "ithaca.training.trainer", *MODELS)


def add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a model; the same command resumes",
        description="Train a model as a YAML file says. The same command on the same run folder resumes.",
        epilog="Any setting can be given as --section.name VALUE, such as --train.steps 100 --stack.ulysses 4 --data.context 1M; "
        "docs/config.md lists them. Ctrl-C saves and stops after the step, a second one stops at once.",
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
        "--allow-change",
        action="store_true",
        help="go on from a checkpoint though data or model settings are others now",
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND@RANK:STEP[:POINT]",
        help=f"break this run on purpose, to rehearse (docs/reliability.md); needs {faults.ALLOW}=1",
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
    job = find_job(os.environ)
    alone = job is None  # workers that we start, or that others started, come here again as ranks
    loaded, pinned = _fetched(loaded)
    config = loaded.config
    if options.check or alone:
        from ..training.preflight import check_run, finished, verdict

        preflight = check_run(config, loaded.text, allow_change=options.allow_change)
        preflight.require()
        if options.check:
            print(loaded.text, end="")
            print(verdict(preflight, config))
            return 0
        if preflight.done is not None and preflight.done >= config.train.steps:
            print(finished(preflight.done, config))
            return 0
        for part in phase_configs(config):
            pack_before(part, options.quiet)
        if preflight.unpacked:  # now it can be opened
            check_run(config, loaded.text, allow_change=options.allow_change).require()
    if pinned and (job is None or job.rank == 0):
        _write_pins(config, pinned)

    def train_here(config: Config) -> int:
        from ..training.phases import train_in_phases
        from ..training.trainer import train

        def one(config: Config, text: str | None, *, first: bool, last: bool) -> int:
            more: dict[str, Any] = dict(allow_change=options.allow_change, injected=injected, first=first, last=last)
            return train(config, quiet=options.quiet, text=text, **more)

        return train_in_phases(config, loaded.text, one)

    return start(config, train_here, preload=PRELOAD)


def _fetched(loaded: Loaded) -> tuple[Loaded, dict[str, str]]:
    """With all that is on the Hub here, at the commits that the run began with. -> and which commits those are"""
    from ..data.fetch import fetch_run, pins_of

    with suppress(OSError, ValueError):
        remember(read_pins(read_text(RunFolder(loaded.config.run.folder).hub)))
    config = fetch_run(loaded.config)
    return replace(loaded, config=config, text=dump(config, loaded.origins)), pins_of(loaded.config)


def _write_pins(config: Config, pinned: dict[str, str]) -> None:
    folder = RunFolder(config.run.folder)
    folder.create()
    write_atomically(folder.hub, json.dumps(pinned, indent=1) + "\n")


def pack_before(config: Config, quiet: bool) -> None:
    if config.eval.every is not None:
        from ..evaluation.held_out import check_evaluation

        check_evaluation(config, (lambda line: None) if quiet else print)
    if config.data.is_packed:
        from ..data.samples import pack_sources, packed_folder

        try:
            pack_sources(config, (lambda line: None) if quiet else print)
        except (ValueError, OSError) as error:
            where = (
                f"packing into {packed_folder(config)}: " if isinstance(error, OSError) and not error.filename else ""
            )
            raise Failed(DATA, where + str(error)) from error
