"""`ithaca eval`, as every rank executes it: load, evaluate, write down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ..config import Config
from ..engine.build import device_of, model_config
from ..observe.report import write_report
from .held_out import open_language, open_suite
from .opening import Opened, load_model
from .publish import write_record
from .suite import run_suite
from .text import describe


def with_tasks(config: Config) -> Config:
    """A config that asks nothing gets every question its language knows."""
    if config.eval.tasks:
        return config
    asking = replace(config, eval=replace(config.eval, tasks=("needle",)))
    language = open_language(asking, model_config(config.model, config.data.context).vocab_size)
    assert language is not None
    return replace(config, eval=replace(config.eval, tasks=language.tasks))


def evaluate_alone(opened: Opened, quiet: bool = False) -> int:
    """-> exit code"""
    rank = dist.get_rank() if dist.is_initialized() else 0
    config = opened.config
    hf = model_config(config.model, config.data.context)
    run, opened = load_model(opened, hf, device_of(config))
    suite = open_suite(config, hf, run.mesh.data.size)
    record = run_suite(run, suite, opened.step)
    assert record is not None  # nobody asks it to leave off
    record["model"] = str(opened.checkpoint or config.model.folder)
    if rank == 0:
        path = write_record(opened.results / f"step-{opened.step}.json", record)
        if not quiet:
            print(describe(record))
        print(f"wrote {path}{_report(opened, path)}")
    return 0


def _report(opened: Opened, record: Path) -> str:
    if opened.run is None:
        return f"; as a page: ithaca report {record}"
    page = write_report(run=opened.run)
    return f" and {page}"
