"""`ithaca bench`: one command that says what a machine can do, and how far the plan is from it. Made to be sent to us.

verify     a few stacks of all its GPUs against the untouched model
links      how fast they talk to each other (kept for plans, as by `ithaca doctor --links`)
steps      memory and time of a model at several lengths, on all GPUs at once, beside the plan; of as many layers as there is
           time for
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.gpu_sharing import ranks_per_gpu
from ..base.units import format_bytes, format_tokens, parse_tokens
from ..stack import Stack
from .doctor import examined, without_names
from .measuring import going_on, in_one_process, say

_HELP = """\
Checks and measures this machine with real ranks, one for each GPU, and writes a report (Markdown and JSON) that names no host, user
or home folder. Nothing is sent anywhere: look at it, then attach it to an issue if you like.

  ithaca bench                                   llama3_8b at 64K, 256K and 1M tokens on all GPUs, in about 15 minutes
  ithaca bench qwen3_8b --contexts 128K --minutes 5
  ithaca bench --share-gpu --ranks 4             real NCCL ranks on one GPU: what is computed and held is real, time is not
  ithaca bench tiny_llama --cpu 2 --contexts 2K  no GPU: to see what it does
"""
CONTEXTS = "64K,256K,1M"
STEPS = 2  # that are timed, after one that warms up
_SHARE = 0.8  # of the minutes, for steps; the rest is for starting, verify and links
_STARTING = 20.0  # seconds to build and fill a model, and to compile kernels


@dataclass
class Report:
    about: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    verify: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(case["ok"] for case in self.verify)


def add_bench(verbs: Any) -> None:
    parser = verbs.add_parser(
        "bench",
        help="check and measure this machine with real ranks, beside the plan, as a report",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_bench)
    parser.add_argument(
        "model",
        nargs="?",
        default="llama3_8b",
        help="a preset, a folder with config.json, or owner/name (default %(default)s)",
    )
    parser.add_argument(
        "--contexts", default=CONTEXTS, help="tokens of a row, comma between them (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="for all of it (default %(default)s)")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU")
    parser.add_argument(
        "--share-gpu", action="store_true", help="let the ranks share the GPUs there are; time means nothing"
    )
    parser.add_argument("--cpu", type=int, metavar="N", help="N processes on the CPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/bench-DATE")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run_bench(options: argparse.Namespace) -> int:
    contexts = [parse_tokens(text) for text in options.contexts.split(",") if text.strip()]
    in_one_process("starts its own ranks, one for each GPU of this machine")
    if not contexts:
        raise ValueError("--contexts names none; write 64K,256K,1M")
    if not 0.1 <= options.minutes <= 10_000:
        raise ValueError(f"--minutes {options.minutes:g} must be from 0.1 to 10,000")
    if options.cpu is not None and (options.share_gpu or options.ranks):
        raise ValueError("--cpu N says how many ranks there are; leave out --ranks and --share-gpu")
    import torch

    from ..base.processes.pool import Workers

    on_cpu, gpus = options.cpu is not None, torch.cuda.device_count()
    ranks = options.cpu or options.ranks or gpus
    if ranks < 1 or ranks > 4096:
        raise ValueError(f"there are {gpus} GPUs here, and {ranks} ranks cannot be; without a GPU try --cpu 2")
    if not (on_cpu or options.share_gpu) and ranks > gpus:
        raise ValueError(f"--ranks {ranks}, but torch sees {gpus} GPUs; lower it, or rehearse with --share-gpu")
    hardware = _hardware(ranks, on_cpu, options.share_gpu)
    from ..engine.model.sizes import read_sizes
    from ..planner.search import plan  # before anything starts: is the model known?

    read_sizes(options.model)  # a report compares times with the plan's, so a model without arithmetic is refused
    plan(options.model, gpus=hardware, context=contexts[0], advise=False)
    folder = options.out or Path("runs") / f"bench-{date.today().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(
        {
            "ithaca": __version__, "date": date.today().isoformat(), "model": options.model, "ranks": ranks,
            "device": "CPU" if on_cpu else hardware.gpu.name, "shared": bool(options.share_gpu),
        }
    )  # fmt: skip
    until = time.monotonic() + 60 * options.minutes
    report.machine = examined()
    device = "cpu" if on_cpu else "cuda"
    with Workers(ranks, device=device, share_gpu=options.share_gpu, timeout=60 * options.minutes + 300) as pool:
        parts: list[Callable[[], None]] = [
            lambda: report.verify.extend(_verify(pool, ranks, device)),
            lambda: _links(report, pool, ranks, device, hardware),
            lambda: report.steps.extend(_steps(pool, options, contexts, hardware, device, until)),
        ]
        for part in parts:
            part()
            _write(report, folder)  # what is known so far, whatever comes next
    print(_markdown(report))
    say(f"written: {folder / 'report.md'} and report.json")
    return 0 if report.good else 1


def _hardware(ranks: int, on_cpu: bool, shared: bool) -> Any:
    """This machine, in the planner's words; for a CPU GPUs stand in, whose times nobody compares."""
    from ..engine.offload.host import available_memory
    from ..planner.hardware import Hardware, parse_gpus

    if on_cpu:
        return replace(parse_gpus(f"{ranks}xH100"), host=available_memory())
    import torch

    from ..training.automatic import gpu_here

    sharing = ranks_per_gpu(ranks, torch.cuda.device_count()) if shared else 1
    return Hardware(gpu_here(torch.device("cuda", 0), sharing=sharing), ranks, per_node=ranks, host=available_memory())


# -- the parts -----------------------------------------------------------------------------------------------------------


def stacks(ranks: int) -> list[Stack]:
    """Every way to share a sequence among so many ranks that the engine has, with a store and stages."""
    full: dict[str, Any] = dict(heads_per_stage=1, store="host", tile=61)
    found = [Stack(ulysses=ranks, **full), Stack(ulysses=ranks, engine="composed", recompute="layer", tile=61)]
    if ranks > 1:
        found.append(Stack(ring=ranks, **full))
    if ranks % 2 == 0 and ranks > 2:
        found += [Stack(ulysses=ranks // 2, ring=2, **full), Stack(ulysses=ranks // 2, replicate=2, **full)]
    return found


def _words(stack: Stack) -> str:
    """What is not as by default."""
    names = [name for name, value in asdict(Stack()).items() if getattr(stack, name) != value]
    return " ".join(f"{name}={stack.words(name)}" for name in names) or "as by default"


def _verify(pool: Any, ranks: int, device: str) -> Iterator[dict[str, Any]]:
    from ..base.processes.pool import WorkerError
    from ..verify.case import Case, run_case

    dtype = "float32" if device == "cpu" else "bfloat16"
    for stack in stacks(ranks):
        case = Case("llama3", stack, ranks, device, dtype)
        say(f"verify {_words(stack)}")
        row: dict[str, Any] = {"case": f"{case.model}, {case.dtype}: {_words(stack)}", "ok": False}
        try:
            items = pool.run(run_case, case, ("logits", "plain", "packed"), world=ranks)[0]
        except WorkerError as error:
            yield {**row, "error": str(error).partition("\n")[0]}
            continue
        worst = max(items, key=lambda item: item.error / item.limit)
        yield {
            **row,
            "ok": all(item.ok for item in items),
            "worst": worst.name,
            "of": worst.error,
            "limit": worst.limit,
        }


def _links(report: Report, pool: Any, ranks: int, device: str, hardware: Any) -> None:
    if ranks < 2:
        report.links = {"left out": "one rank has no links"}
        return
    from ..observe.profiler.links import NBYTES, check_collectives, measure_links
    from .doctor_links import kept_links

    say("links")
    if report.about["shared"]:
        pool.run(check_collectives, device, world=ranks)
        report.links = {"left out": "ranks that share a GPU have none; what they sent arrived"}
        return
    rates = pool.run(measure_links, device, NBYTES if device == "cuda" else 1 << 20, world=ranks)[0]
    links, _ = kept_links(rates, device, ranks, 1)
    report.links = asdict(links)


def _steps(
    pool: Any, options: argparse.Namespace, contexts: list[int], hardware: Any, device: str, until: float
) -> Iterator[dict[str, Any]]:
    from ..observe.profiler.bench import bench_rank
    from ..observe.profiler.wanted import Wanted, expected
    from ..planner.search import plan

    for place, context in enumerate(contexts):
        full_plan = plan(options.model, gpus=hardware, context=context, advise=False)
        row: dict[str, Any] = {"context": context, "stack": _words(full_plan.stack), "depth": full_plan.model.layers}
        if not full_plan.fits:
            yield {**row, "left out": "the plan says that it does not fit"}
            continue
        room = _SHARE * (until - time.monotonic()) / (len(contexts) - place) - _STARTING
        turns = hardware.count if options.share_gpu else 1  # ranks that share a GPU wait for each other
        whole = full_plan.speed.seconds * (1 + STEPS) * turns
        layers = full_plan.model.layers if whole <= room else int(full_plan.model.layers * room / whole)
        if layers < 1 and device == "cuda":
            yield {
                **row,
                "left out": f"one layer would take {whole / full_plan.model.layers:.0f} s; give more --minutes",
            }
            continue
        cpu = device == "cpu"
        layers = min(2, full_plan.model.layers) if cpu else layers
        wanted = Wanted(job=full_plan.job, model=options.model, layers=layers, steps=STEPS, cpu=cpu)
        words = f"{format_tokens(context)} tokens, {layers} of {full_plan.model.layers} layers"
        say(words)
        with going_on(words):
            yield row | _step_row(pool, bench_rank, wanted, full_plan, layers, expected)


def _step_row(pool: Any, bench_rank: Any, wanted: Any, full_plan: Any, layers: int, expected: Any) -> dict[str, Any]:
    from ..base.processes.pool import WorkerError

    row: dict[str, Any] = {"layers": layers}
    try:
        results = pool.run(bench_rank, wanted, world=wanted.job.world)
    except WorkerError as error:
        return {**row, "error": str(error).partition("\n")[0]}
    seconds = max(result.seconds for result in results)
    planned = expected(full_plan, wanted, results[0].kernel)
    return {
        **row,
        "kernel": results[0].kernel,
        "seconds": seconds,
        "planned_seconds": planned.speed.seconds,
        "tokens_per_second": results[0].tokens / seconds,  # of a GPU, for the layers that ran
        "at_least": results[0].tokens / (seconds * full_plan.model.layers / layers),  # for all of them
        "peaks": [result.peak for result in results],
        "planned_peak": planned.allocated,
        "around": results[0].context,
        "pinned": max(result.pinned for result in results),
    }


# -- words ---------------------------------------------------------------------------------------------------------------


def _write(report: Report, folder: Path) -> None:
    whole = without_names(asdict(report))
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(Report(**whole)) + "\n")


def _markdown(report: Report) -> str:
    about, gpu = report.about, report.about["device"] != "CPU"
    what = f"{about['ranks']} ranks that share a GPU," if about["shared"] else f"{about['ranks']} ×"
    lines = [f"# ithaca bench: {what} {about['device']}, {about['model']}", ""]
    lines.append(f"ithaca {about['ithaca']}, {about['date']}. " + _versions(report.machine))
    if about["shared"]:
        lines.append("Ranks, data and NCCL are real; the ranks take turns on the GPU, so times mean nothing.")
    lines += ["", "## Verify", "", "| | stack | worst | of its limit |", "|---|---|---|---|"]
    for case in report.verify:
        shown = case["case"]
        if "error" in case:
            lines.append(f"| FAILED | {shown} | {case['error']} | |")
        else:
            mark = "ok" if case["ok"] else "MISS"
            lines.append(f"| {mark} | {shown} | {case['worst']} | {case['of']:.2g} of {case['limit']:.2g} |")
    lines += ["", "## Links", ""]
    if not report.links or "left out" in report.links:
        lines.append(f"Not measured: {(report.links or {}).get('left out', 'not yet')}.")
    else:
        lines += [
            "GB/s that a rank sends to the others.",
            "",
            "| all-to-all | all-gather | reduce-scatter | ring |",
            "|---|---|---|---|",
        ]
        rates = (report.links[name] / 1e9 for name in ("all_to_all", "gather", "reduce", "ring"))
        lines.append("| " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")
    lines += ["", "## Steps", ""]
    lines += ["Forward, backward and AdamW of one row; peak: bytes of tensors on the rank that holds most.", ""]
    lines.append(
        "| context | layers | peak | plan | off | step | plan | off | tokens/s/GPU, all layers at least | stack |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in report.steps:
        lines.append(_row(row, gpu, bool(about["shared"])))
    return "\n".join(lines)


def _row(row: dict[str, Any], gpu: bool, shared: bool) -> str:
    context = format_tokens(row["context"])
    why = row.get("left out") or row.get("error")
    if why:
        return f"| {context} | {row.get('layers', '-')} of {row['depth']} | {why} | | | | | | | {row['stack']} |"
    peak, memory_off = "-", "-"
    if gpu:
        highest = max(row["peaks"])
        peak, memory_off = format_bytes(highest), f"{row['planned_peak'] / highest - 1:+.1%}"
    compared = gpu and not shared
    time_off = f"{row['planned_seconds'] / row['seconds'] - 1:+.1%}" if compared else "-"
    cells = [
        context, f"{row['layers']} of {row['depth']}", peak, format_bytes(row["planned_peak"]) if gpu else "-", memory_off,
        f"{row['seconds']:.2f} s", f"{row['planned_seconds']:.2f} s" if compared else "-", time_off,
        f"{row['at_least']:,.0f}" if compared else "-", row["stack"],
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _versions(machine: dict[str, Any]) -> str:
    packages, cuda = machine.get("packages", {}), machine.get("cuda", {})
    parts = {
        "torch": packages.get("torch"),
        "CUDA": cuda.get("cuda"),
        "NCCL": cuda.get("nccl"),
        "driver": cuda.get("driver"),
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value) + "."
