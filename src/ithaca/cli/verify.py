"""`ithaca verify`: compare a stack with the untouched model, and say so in a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..base.gpu_sharing import sharing_variables, why_not_shared
from ..config import add_stack_options, read_stack
from ..stack import Stack, require

if TYPE_CHECKING:
    from ..verify.case import Case
    from ..verify.reference import Item

_HELP = """\
Runs the stack and the untouched Hugging Face model on the same batch and compares logits, loss and every parameter
gradient; then probes for leaks between packed documents and beyond sliding windows, odd lengths, ranks without any
supervised token, and accumulation over micro-batches. Exit status 1 if anything misses.

examples:
  ithaca verify llama3 --world 4 --stack.ulysses 2 --stack.ring 2 --stack.heads_per_stage 1 --stack.store host
  ithaca verify qwen2_28 --stack.ulysses 8            28 heads on 8 ranks
  ithaca verify ./my-model --stack.ulysses 2          your model's config, shrunk to a few small layers
  ithaca verify ./my-model --full --stack.ulysses 8   its real weights
  ithaca verify Qwen/Qwen3-8B --stack.ulysses 8       a model on the Hub; only its config is fetched
  ithaca verify --matrix --world 8                    every pair of settings, a few dozen cases
  torchrun --nproc-per-node 8 -m ithaca verify llama3 --stack.ulysses 8
"""


def add_verify(verbs: Any) -> None:
    parser = verbs.add_parser(
        "verify",
        help="prove that a stack computes what the untouched model computes",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_verify)
    parser.add_argument(
        "model", nargs="?", help="a preset (llama3, qwen3, gemma3, ...), a folder with config.json, or owner/name"
    )
    parser.add_argument("--world", type=int, default=None, help="processes to start (default: what the stack needs)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the visible GPUs, else CPU"
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="let ranks share the GPUs there are: real NCCL on one GPU (2.30 or newer); slower than on as many GPUs",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=None, help="default: float32 on CPU, bfloat16 on CUDA"
    )
    parser.add_argument("--length", type=int, default=1021, help="tokens of the test sequence (default %(default)s)")
    parser.add_argument("--lora", action="store_true", help="freeze the base and train LoRA adapters")
    parser.add_argument("--full", action="store_true", help="the whole model with its weights instead of a shrunk one")
    parser.add_argument("--matrix", action="store_true", help="sweep combinations that cover every pair of settings")
    parser.add_argument("--scratch", default=None, help="folder for --stack.store disk (default: the temporary folder)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a case may take (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    why = "the stack to verify, with defaults as in `ithaca docs config`. Without the word stack (--ulysses 2) they are understood"
    add_stack_options(parser, why, older="field")


def run_verify(options: argparse.Namespace) -> int:
    given, problems = read_stack(options, options.world)
    stack = Stack(**given)
    if not options.matrix and options.model is None:
        problems.append("no model given; name a preset such as llama3, a folder with config.json, or use --matrix")
    if options.matrix and (stack != Stack() or options.lora or options.full):
        problems.append("--matrix goes through the settings by itself; leave out --lora, --full and those of the stack")
    if options.length > 1 << 24:
        problems.append(f"--length {options.length} is too long for a check; use at most {1 << 24:,}")
    if options.length < 2:
        problems.append(f"--length {options.length} is too short; a token needs a next one to predict: use at least 2")
    if options.world is not None and not 1 <= options.world <= 4096:
        problems.append(f"--world {options.world} must be from 1 to 4096 processes")
    if not 0 < options.timeout < 1e9:
        problems.append(f"--timeout {options.timeout} must be a number of seconds above 0")
    require(problems, "this cannot be verified")
    if options.model is not None:
        from ..base.hub import fetch

        options.model = fetch(options.model, "model" if options.full else "config")
    device = _device(options, stack)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    if options.matrix:
        from ..verify.matrix import cases, cover

        world = options.world or 8
        todo = cases(cover(world), world, options.length)
        todo = [replace(case, device=device, dtype=dtype, scratch=options.scratch) for case in todo]
        if options.model:
            todo = [case for case in todo if case.model == options.model] or [replace(todo[0], model=options.model)]
        checks = ("logits", "case")
    else:
        from ..verify.case import Case

        assert options.model is not None
        world = options.world or _joined_world() or stack.context_ranks * stack.replicate
        todo = [
            Case(
                options.model, stack, world, device, dtype, options.length, lora=options.lora, full=options.full,
                scratch=options.scratch,
            )
        ]  # fmt: skip
        checks = None
    _check_model(todo)
    results = _run(todo, checks, device, options)
    if results is None:  # another rank prints
        return 0
    good = all(item.ok for _, items, _ in results for item in items)
    _print(results, good, options.json)
    return 0 if good else 1


def _check_model(todo: list[Case]) -> None:
    """Before any process starts: is the model there, and one we know?"""
    from ..base.hub import local
    from ..engine.model.presets import PRESETS, find_preset
    from ..verify.presets import config_of

    for case in todo:
        if local(case.model).is_dir():
            config_of(case.model, case.full)
        elif find_preset(case.model) is None:
            raise ValueError(
                f"{case.model!r} is neither a folder nor a preset; presets are {', '.join(PRESETS)}. A model on the Hub is "
                "named with its owner: owner/name"
            )


def _device(options: argparse.Namespace, stack: Stack) -> str:
    if options.share_gpu:
        why = "--device cpu was asked for; leave one of the two out" if options.device == "cpu" else why_not_shared()
        require([f"--share-gpu: {why}"] if why else [], "this cannot be verified")
    if options.device == "cpu":
        return "cpu"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU; use --device cpu")
    if options.share_gpu:
        return "cuda"
    need = options.world or (8 if options.matrix else stack.context_ranks * stack.replicate)
    available = torch.cuda.device_count()
    if options.device == "auto" and (available < need or options.dtype == "float32"):
        return "cpu"
    if available < need and not _joined_world():
        raise ValueError(
            f"--world {need} needs as many GPUs, but torch sees {available}; use --device cpu, fewer ranks, or --share-gpu"
        )
    return "cuda"


def _joined_world() -> int | None:
    """The world size where torchrun or a scheduler started us."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ) else None


def _run(todo: list[Case], checks, device: str, options: argparse.Namespace):
    from ..verify.case import run_case

    if _joined_world():
        return _run_joined(todo, checks, device, options.share_gpu)
    from ..base.processes.pool import WorkerError, Workers

    results: list[tuple[Case, list[Item], float]] = []
    count = max(case.world for case in todo)
    with Workers(count, device=device, timeout=options.timeout, share_gpu=options.share_gpu) as workers:
        for number, case in enumerate(todo, 1):
            if not options.json:
                print(f"[{number}/{len(todo)}] {case}", file=sys.stderr, flush=True)
            start = time.perf_counter()
            try:
                items = workers.run(run_case, case, checks, world=case.world)[0]
            except WorkerError as error:
                if options.traceback:
                    raise
                # a request that cannot be carried out needs no traceback; a crash does, but is not a missed check either
                raise ValueError(_cause(error) if error.kind == "ValueError" else str(error)) from None
            results.append((case, items, time.perf_counter() - start))
            bad = [item for item in items if not item.ok]
            if bad and not options.json:
                print(f"    missed: {bad[0].name} {bad[0].error:.1e} {bad[0].where}", file=sys.stderr, flush=True)
    return results


def _cause(error: Exception) -> str:
    """What the workers raised, without their tracebacks."""
    return str(error).split("\n\nTraceback of rank")[0]


def _run_joined(todo: list[Case], checks, device: str, share_gpu: bool):
    """As one rank of a job that torchrun or a scheduler started."""
    import torch
    import torch.distributed as dist

    from ..verify.case import run_case

    if device == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if share_gpu:
            os.environ.update(sharing_variables(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), gpus))
        torch.cuda.set_device(local % gpus if share_gpu else local)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        results = []
        for case in todo:
            start = time.perf_counter()
            results.append((case, run_case(case, checks), time.perf_counter() - start))
        return results if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _finite(error: float) -> float | None:
    """JSON has no infinity and no NaN; such an error is a miss, and null."""
    return error if isfinite(error) else None


def _print(results, good: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                **asdict(case),
                "seconds": round(seconds, 2),
                "items": [{**asdict(item), "error": _finite(item.error), "ok": item.ok} for item in items],
            }
            for case, items, seconds in results
        ]
        print(json.dumps({"ok": good, "cases": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    if len(results) == 1:
        case, items, seconds = results[0]
        unit = "relative error" if case.dtype == "float32" else "distance from float32, over the untouched model's"
        table = Table(title=str(case), title_justify="left", caption=f"{unit}; {seconds:.1f} s", caption_justify="left")
        for column in ("", "check", "largest error", "limit", "where"):
            table.add_column(column, justify="right" if column in ("largest error", "limit") else "left")
        for item in items:
            table.add_row("ok" if item.ok else "MISS", item.name, f"{item.error:.2e}", f"{item.limit:.1e}", item.where)
    else:
        table = Table(title=f"{len(results)} cases", title_justify="left")
        for column in ("", "case", "largest error", "item", "where", "s"):
            table.add_column(column)
        for case, items, seconds in results:
            worst = max(items, key=lambda item: item.error / item.limit if item.limit else item.error)
            mark = "ok" if all(item.ok for item in items) else "MISS"
            table.add_row(mark, str(case), f"{worst.error:.2e}", worst.name, worst.where, f"{seconds:.1f}")
    console.print(table)
    missed = sum(not item.ok for _, items, _ in results for item in items)
    checked = sum(len(items) for _, items, _ in results)
    console.print(f"{checked} checks, all within their limits" if good else f"{missed} of {checked} checks missed")
