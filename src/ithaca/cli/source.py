"""What verbs that open a trained model share: `ithaca eval` and `ithaca ask`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN_OR_FOLDER", type=Path, help="a run, a checkpoint or a Hugging Face folder"
    )
    parser.add_argument("--cpu", type=int, default=None, metavar="N", help="on the CPU with N workers")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Settings that were given, those behind --cpu among them."""
    cpu = [] if options.cpu is None else ["launch.workers=null", f"launch.cpu={options.cpu}"]
    return [*options.overrides, *cpu]
