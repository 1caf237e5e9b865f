"""`ithaca plan`: will it fit, how fast will it be, and with which stack. No GPU is needed; torch only for a dry run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.kernels import GPU_KERNELS
from ..base.units import format_tokens
from ..config import add_stack_options, read_fields, read_stack, split_words
from ..engine.model.presets import PRESETS
from ..stack import require
from .measuring import at_least, going_on, say

_HELP = """\
Says before a run whether it fits, what holds the memory, how long a step takes and what bounds it, and chooses the fastest stack
that fits. Any field of the stack can be fixed with --stack.FIELD VALUE.

  ithaca plan llama3_8b --gpus 8xH100-80GB --context 1M --host 1TB
  ithaca plan Qwen/Qwen3-8B --gpus 1xH200 --max-context --host 512GB
  ithaca plan llama3_8b --gpus 8xH100-80GB --context 1M --stack.recompute layer --stack.tile 8K
  ithaca plan llama3_8b --gpus 8xH100 --context 3M --host 2TB --compare engine=composed,recompute=layer
  ithaca plan llama32_1b --gpus 1xH200 --context 64K --dry-run
  ithaca plan llama3_8b --gpus 8xH100-80GB --max-context --dry-run   # executed at that length, and one step further

MODEL is a folder with config.json, that file, a model on the Hub (owner/name; only its config is fetched), or a preset:
{presets}.
"""
FIXED = "fields that stay as given; the planner chooses the others. Values are as in YAML (ithaca docs config)"
GPUS = "such as 8xH100-80GB, 1xH200, 2x8xA100-40GB (machines x GPUs)"


def add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan",
        help="say whether a run fits and how fast it will be, and choose its stack",
        description=_HELP.format(presets=", ".join(PRESETS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan, traceback=False)
    add_request(parser)
    parser.add_argument("--compare", metavar="FIELD=VALUE,...", help="a second plan with these fields, side by side")
    parser.add_argument("--explain", action="store_true", help="memory of every phase, and every part of the time")
    parser.add_argument(
        "--dry-run", action="store_true", help="execute the real code on fake tensors and count (needs no GPU)"
    )
    parser.add_argument("--layers", type=int, help="with --dry-run: run only so many layers, and count only those")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the plan as a page")


def add_request(parser: Any, *, gpus: bool = True) -> None:
    """What a plan is asked for, and a profile with the same words. gpus: whether they must be named."""
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json, that file, owner/name, or a preset")
    parser.add_argument("--gpus", required=gpus, help=GPUS if gpus else f"{GPUS}; not given: the GPU that is here")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--context", help="tokens of a row, such as 1M (1,048,576) or 1_000_000")
    length.add_argument("--max-context", action="store_true", help="the longest context that fits")
    parser.add_argument(
        "--rows", type=int, default=1, help="rows of a step, over all GPUs and micro-batches (default %(default)s)"
    )
    parser.add_argument(
        "--accumulation", type=int, default=1, help="micro-batches that those rows are split into (default %(default)s)"
    )
    parser.add_argument("--host", help="memory of one machine, such as 1TB; not given: what is usual, and said")
    parser.add_argument(
        "--disk", help="scratch space of one machine; not given: no disk is used unless you fix store=disk"
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw8bit or muon (default %(default)s)")
    parser.add_argument(
        "--offload-optimizer", action="store_true", help="weights, gradients and states wait in host memory"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument(
        "--lora-targets", metavar="NAME,...", help="linear layers that get an adapter (default: all of a layer)"
    )
    parser.add_argument(
        "--synchronous", action="store_false", dest="asynchronous",
        help="checkpoints are written while the run waits: no copy in host memory",
    )  # fmt: skip
    parser.add_argument("--deterministic", action="store_true", help="the same bits on every run (train.deterministic)")
    parser.add_argument("--kernel", help=f"attention kernel: {', '.join(GPU_KERNELS)} (default: what the engine takes)")
    add_stack_options(parser, FIXED, older="set")


# Words of `add_request` that are arguments of the planner's functions, under the same names
ASKED = (
    "gpus", "rows", "accumulation", "host", "disk", "optimizer", "offload_optimizer", "lora", "asynchronous", "deterministic",
    "kernel",
)  # fmt: skip


def request(options: argparse.Namespace) -> dict[str, Any]:
    """Those words as arguments of the planner's functions."""
    pinned, problems = read_stack(options)
    asked = {name: getattr(options, name) for name in ASKED}
    if options.lora_targets:
        asked["lora_targets"] = tuple(name.strip() for name in options.lora_targets.split(","))
        if not options.lora:
            problems.append("--lora-targets says where adapters go, but there are none; give --lora RANK too")
    require(problems, "this cannot be planned")
    return {**asked, **pinned}


def find(options: argparse.Namespace) -> Any:
    """The plan that was asked for."""
    from ..planner.search import max_context, plan

    if options.max_context:
        return max_context(options.model, say=say, **request(options))
    return plan(options.model, context=options.context, say=say, **request(options))


def run_plan(options: argparse.Namespace) -> int:
    from ..planner.search import plan
    from ..planner.text import describe, side_by_side

    at_least(1, layers=options.layers)
    changed, problems = read_fields(split_words("--compare", options.compare) if options.compare else [])
    require(problems, "there is nothing to compare with")
    planned = find(options)
    other = None
    if changed:
        other = plan(options.model, context=planned.context, say=say, **{**request(options), **changed})
    counted, tried = None, []
    if planned.executed and (options.layers is None or options.max_context):
        counted = _shown(planned.memory) if options.dry_run else None  # which is what the plan was made by
    elif options.dry_run and options.max_context and planned.fits:
        planned, tried = _confirm(planned, options)
        counted = next((_shown(attempt.memory) for attempt in tried if attempt.context == planned.context), None)
    elif options.dry_run:
        counted = _shown(_counted(planned, planned.context, options))
    if options.html:
        from ..observe.report import write_report

        write_report(options.html, plan=planned.json())
    if options.json:
        shown = planned.json()
        if counted is not None:
            shown["dry_run"] = counted
        if tried:
            shown["tried"] = [
                {"context": attempt.context, "peak": attempt.peak, "fits": not attempt.excess} for attempt in tried
            ]
        print(json.dumps([shown, other.json()] if other else shown, indent=1))
    elif other is not None:
        print("\n".join(side_by_side(planned, other)))
    else:
        print("\n".join(describe(planned, explain=options.explain, dry=counted, tried=tried)))
    return 0 if planned.fits else 5


def _confirm(plan: Any, options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The longest context by the dry run. -> the plan there, and what was tried"""
    from ..planner.confirm import confirmed
    from ..planner.search import look

    if options.layers:
        raise ValueError("--max-context --dry-run counts every layer; leave --layers out")
    context, tried = confirmed(plan, lambda tokens: _counted(plan, tokens, options), say)
    if context is None:
        return replace(plan, fits=False), tried
    there = look(replace(plan.job, context=context), plan.hardware)
    return replace(there, fits=True, reasons=plan.reasons), tried


def _shown(counted: Any) -> dict[str, Any]:
    return {
        "layers": counted.layers, "executed": counted.executed, "phases": counted.phases, "lines": counted.lines,
        "peak": counted.peak, "peak_phase": counted.peak_phase, "host": counted.host, "disk": counted.disk,
    }  # fmt: skip


def _counted(plan: Any, context: int, options: argparse.Namespace) -> Any:
    """The plan's stack, executed on fake tensors."""
    from ..planner.config import hf_config
    from ..planner.dry_run.run import dry_run

    with going_on(f"dry run at {format_tokens(context)}"):
        return dry_run(replace(plan.job, context=context), hf_config(options.model), layers=options.layers)
