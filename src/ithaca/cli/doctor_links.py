"""`ithaca doctor --links`: measure how fast GPUs talk to each other, print it, and keep it where plans look."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from ..base.gpu_sharing import nccl_version
from ..planner.links import FILE, Links, keep_links

_NAMES = {"all_to_all": "all-to-all", "gather": "all-gather", "reduce": "reduce-scatter", "ring": "ring"}
_TRIED = 1 << 20  # bytes, on the CPU
_SECONDS = 300.0


def run_links(options: argparse.Namespace) -> int:
    import torch

    from ..training.launch import find_job

    if not options.links:
        raise ValueError("--cpu is for --links; give both")
    if options.cpu is not None and not 2 <= options.cpu <= 64:
        raise ValueError(f"--cpu {options.cpu}: links are between processes, from 2 to 64 of them")
    job = find_job(os.environ)
    if job is not None:
        return _joined(options, job)
    count = options.cpu or torch.cuda.device_count()
    if count < 2:
        raise ValueError(
            f"torch sees {count} GPU{'s' if count != 1 else ''} here, and links are between several; on several nodes start it "
            "with torchrun, or try it on the CPU with --cpu 2"
        )
    from ..base.processes.pool import Workers
    from ..observe.profiler.links import NBYTES, measure_links

    device, nbytes = ("cpu", _TRIED) if options.cpu else ("cuda", NBYTES)
    with Workers(count, device=device, timeout=_SECONDS) as ranks:
        rates = ranks.run(measure_links, device, nbytes)[0]
    _tell(options, rates, device, count, 1)
    return 0


def _joined(options: argparse.Namespace, job: Any) -> int:
    """As a rank of a job that torchrun or a scheduler started: GPUs of their own, which the roll call sees to."""
    from ..observe.profiler.links import NBYTES, measure_links
    from ..training.launch import join, leave

    if job.world < 2:
        raise ValueError("one rank has no links; start at least two, with a GPU each")
    device, nbytes = ("cpu", _TRIED) if options.cpu else ("cuda", NBYTES)
    join(job, device)
    rates = measure_links(device, nbytes)
    if job.rank == 0:
        _tell(options, rates, device, job.local_world, job.world // job.local_world)
    leave()
    return 0


def kept_links(rates: dict[str, float], device: str, per_node: int, nodes: int) -> tuple[Links, Path | None]:
    """The record, and where it is kept; None: nowhere."""
    import torch

    name, software = "CPU process", f"torch {torch.__version__}"
    if device == "cuda":
        from ..training.automatic import gpu_here

        name = gpu_here(torch.device("cuda", 0)).name
        software += f", NCCL {'.'.join(map(str, nccl_version() or ()))}"
    links = Links(name, per_node, nodes, **rates, date=date.today().isoformat(), software=software)
    return links, keep_links(links) if device == "cuda" else None


def _tell(options: argparse.Namespace, rates: dict[str, float], device: str, per_node: int, nodes: int) -> None:
    links, where = kept_links(rates, device, per_node, nodes)
    if options.json:
        print(json.dumps({**asdict(links), "kept": where is not None}, indent=1))
        return
    machines = "" if nodes == 1 else f" of {nodes} machines"
    print(
        f"links between {per_node * nodes} × {links.gpu}{machines}, {links.software}: GB/s that a rank sends to the others"
    )
    for field, words in _NAMES.items():
        print(f"  {words:<16}{rates[field] / 1e9:8.2f}")
    if where is None:
        why = "plans are for GPUs" if device == "cpu" else f"{FILE} is empty, or you have no home; it may name a file"
        print(f"not kept: {why}")
    else:
        print(f"kept: plans for {per_node * nodes}x{links.gpu} count with it from now on ({where})")
