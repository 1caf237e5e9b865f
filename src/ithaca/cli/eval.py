"""`ithaca eval RUN_OR_FOLDER`: does this model use its context?"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

_HELP = """\
Loss by position on held-out text, needles by length and depth, and RULER-style tasks (multi_key, multi_value, variable_tracking,
common_words), of a run's newest checkpoint, a checkpoint (step-N), or any Hugging Face folder. Questions are words where there is a
tokenizer and token ids where there is none. The numbers are the same on any number of processes.

Results: RUN/eval/step-N.json and the page of the run; for a Hugging Face folder runs/eval-NAME/step-0.json.

examples:
  ithaca eval runs/mine
  ithaca eval runs/mine/checkpoints/step-400 --eval.lengths 32K,128K,512K --eval.depths 9 --eval.samples 8
  ithaca eval models/Llama-3.1-8B --data.context 128K --eval.lengths 8K,32K,128K
  ithaca eval models/tiny --file held_out.txt --eval.tasks '[]' --cpu 2
"""


def add_eval(verbs: Any) -> None:
    parser = verbs.add_parser(
        "eval",
        help="measure whether a model uses its context: loss by position, needles, tasks",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any setting can be given as --section.name VALUE; ithaca docs config lists those of `eval`.",
    )
    add_source(parser)
    parser.add_argument("--file", action="append", default=[], help="held-out text; may be given several times")
    parser.add_argument("--out", type=Path, help="folder for the results (default: RUN/eval, or runs/eval-NAME)")
    parser.add_argument("--quiet", action="store_true", help="no tables on the terminal")
    parser.set_defaults(run=run_eval, overrides=[])


def run_eval(options: argparse.Namespace) -> int:
    from ..evaluation.opening import find_model
    from ..training.launch import find_job, start

    overrides = overrides_of(options)
    if options.file:
        overrides += [f"eval.sources=[{', '.join(map(_quoted, options.file))}]", "eval.packed=null"]
    opened = find_model(options.source, overrides, options.out)
    if not any(override.startswith("eval.tasks=") for override in overrides):
        from ..evaluation.alone import with_tasks

        opened = replace(opened, config=with_tasks(opened.config))
    if find_job(os.environ) is None:  # workers come here again, with everything packed
        from ..evaluation.held_out import check_evaluation

        check_evaluation(opened.config, (lambda line: None) if options.quiet else print)

    def evaluate_here(config: Any) -> int:
        from ..evaluation.alone import evaluate_alone

        return evaluate_alone(opened, options.quiet)

    return start(opened.config, evaluate_here, resumes=False)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN_OR_FOLDER", type=Path, help="a run, a checkpoint, a Hugging Face folder, or owner/name"
    )
    parser.add_argument("--cpu", type=int, default=None, metavar="N", help="on the CPU with N workers")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Settings that were given, those behind --cpu among them."""
    cpu = [] if options.cpu is None else ["launch.workers=null", f"launch.cpu={options.cpu}"]
    return [*options.overrides, *cpu]
