"""The plan's arithmetic beside the dry run, which executes the code, and beside a GPU: peak bytes, bytes in the store, and time.

    python benchmarks/plan_accuracy.py [--only 1M]                 # needs no GPU
    python benchmarks/plan_accuracy.py --save said.json            # the same, for a machine whose minutes are dear ...
    python benchmarks/plan_accuracy.py --measure --said said.json  # ... where this measures, and takes the dry runs from there
    python benchmarks/plan_accuracy.py --said said.json --measured measured.json  # or: what --measure wrote, here beside the rest

Two to four layers of each shape, so that a case takes seconds; AdamW's states are there. A row is marked where the arithmetic is
more than 5% above or 2% below, or the dry run more than 3% off.

--measure runs one step of each case for real, as rank 0 of N on torch's fake process group, shortest first, all in one process.
What is compared is torch.cuda.max_memory_allocated; host is the pinned memory that the store holds. Cases
marked "timed" run a few more steps, and the median of their times is compared with the plan's. --seconds stops before a case that
would probably end later. With --measured it writes what it finds to that file, runs no dry run that --said does not have, and
leaves out what is in it already.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rank_of_n import size

from ithaca.engine.job import Job, Memory
from ithaca.engine.model.sizes import read_sizes
from ithaca.planner.config import hf_config
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.hardware import parse_gpus
from ithaca.planner.memory import predict
from ithaca.planner.plan import WORKSPACE
from ithaca.planner.speed import estimate
from ithaca.stack import Stack

WHOLE = dict(shard_parameters=False)
HOST = dict(store="host")
UPIPE = dict(store="host", engine="composed", recompute="layer")
# shape, layers, context, ranks, fields of the stack; those of `Job` and "timed" are of the run
CASES: list[tuple[str, int, str, int, dict]] = [
    ("llama32_1b", 3, "8K", 1, {}),
    ("llama32_1b", 3, "16K", 1, dict(**WHOLE, recompute="none", tile=None)),
    ("llama32_1b", 3, "16K", 1, dict(**WHOLE, recompute="layer", engine="composed", tile=None)),
    ("llama32_1b", 3, "32K", 1, dict(recompute="none", tile=None)),
    ("llama32_1b", 2, "64K", 1, dict(**WHOLE, tile=8192)),
    ("llama32_1b", 4, "64K", 1, dict(tile=8192)),
    ("llama32_1b", 3, "128K", 1, dict(**HOST, heads_per_stage=8, tile=8192)),
    ("llama32_1b", 3, "128K", 1, dict(**HOST, heads_per_stage=8, tile=8192, hold=False)),
    ("llama32_1b", 3, "128K", 1, dict(store="disk", heads_per_stage=8, tile=8192)),
    ("llama32_1b", 2, "256K", 1, dict(**HOST, **WHOLE, heads_per_stage=4)),
    ("llama32_1b", 2, "256K", 1, dict(**HOST, **WHOLE, heads_per_stage=8, tile=8192)),
    ("llama32_1b", 4, "256K", 1, dict(store="2 host + 2 gpu", heads_per_stage=8, tile=8192)),
    ("llama32_1b", 2, "1M", 1, dict(**HOST, heads_per_stage=4)),
    ("llama32_3b", 2, "256K", 1, dict(**HOST, heads_per_stage=6, tile=8192)),
    ("llama32_3b", 3, "512K", 4, dict(**HOST, ulysses=2, ring=2, heads_per_stage=4)),
    ("qwen3_4b", 3, "512K", 1, dict(**HOST, heads_per_stage=4, recompute="layer")),
    ("llama3_8b", 3, "32K", 1, {}),
    ("llama3_8b", 3, "128K", 1, dict(**HOST, lora=16, heads_per_stage=4)),
    ("llama3_8b", 3, "64K", 2, {}),
    ("llama3_8b", 6, "64K", 2, dict(**HOST, heads_per_stage=8)),
    ("llama3_8b", 3, "256K", 4, dict(**HOST, lora=16, heads_per_stage=2)),
    ("llama3_8b", 2, "16K", 8, dict(ulysses=1, rows=8)),
    ("llama3_8b", 2, "8K", 8, {}),
    ("llama3_8b", 3, "64K", 8, dict(timed=True)),
    ("llama3_8b", 3, "64K", 8, dict(engine="composed", recompute="none", tile=None)),
    ("llama3_8b", 3, "256K", 8, dict(timed=True)),
    ("llama3_8b", 4, "256K", 8, dict(**HOST, recompute=("layer", "layer", "keep_attention", "keep_attention"))),
    ("llama3_8b", 4, "256K", 8, dict(store="disk", heads_per_stage=1)),
    ("llama3_8b", 3, "256K", 8, dict(engine="composed")),
    ("llama3_8b", 3, "256K", 8, dict(engine="composed", recompute="layer", tile=None)),
    ("llama3_8b", 3, "512K", 8, dict(**HOST, heads_per_stage=1, tile=16384)),
    ("llama3_8b", 2, "1M", 8, HOST),
    ("llama3_8b", 2, "1M", 8, dict(**HOST, heads_per_stage=2)),
    ("llama3_8b", 2, "1M", 8, dict(**HOST, heads_per_stage=1, timed=True)),
    ("llama3_8b", 2, "1M", 8, dict(**HOST, heads_per_stage=1, engine="composed")),
    ("llama3_8b", 2, "1M", 8, dict(**UPIPE, heads_per_stage=1)),
    ("llama3_8b", 2, "1M", 8, dict(store="disk", heads_per_stage=1, recompute="layer")),
    ("llama3_8b", 4, "1M", 8, dict(store="2 host + 2 gpu", heads_per_stage=1, hold=False)),
    ("llama3_8b", 2, "2M", 8, dict(**HOST, heads_per_stage=4)),
    ("llama3_8b", 3, "3M", 8, dict(**HOST, heads_per_stage=1)),
    ("llama3_8b", 3, "5M", 8, dict(**HOST, heads_per_stage=1)),
    ("qwen3_8b", 3, "256K", 8, UPIPE),
    ("qwen3_8b", 3, "512K", 8, dict(**HOST, heads_per_stage=1, kernel="cudnn")),
    ("qwen3_8b", 4, "512K", 8, dict(store="2 disk + 2 gpu", heads_per_stage=2, recompute="2 layer + 2 keep_attention")),
    ("qwen3_8b", 2, "1M", 8, dict(store="disk", heads_per_stage=2, tile=8192)),
    ("qwen3_32b", 2, "64K", 16, dict(ulysses=8, ring=2)),
    ("qwen3_32b", 2, "512K", 16, dict(ulysses=8, ring=2)),
    ("qwen3_32b", 3, "512K", 16, dict(**HOST, ulysses=8, ring=2, heads_per_stage=2, tile=16384)),
    ("qwen3_32b", 2, "2M", 16, dict(**HOST, ulysses=8, ring=2, heads_per_stage=1)),
    ("mistral_7b", 2, "128K", 1, dict(**HOST, heads_per_stage=8, kernel="flash")),
    ("mistral_7b", 3, "256K", 4, dict(**HOST, heads_per_stage=2, tile=2048)),
    ("mistral_7b", 3, "64K", 8, dict(recompute="layer", tile=2048)),
    ("mistral_7b", 3, "256K", 8, dict(recompute="layer", tile=16384, kernel="flash")),
    ("mistral_7b", 2, "2M", 8, dict(**HOST, heads_per_stage=1, tile=2048)),
    # weights and states on the host, adapters on some linears, several micro-batches
    ("llama32_3b", 8, "32K", 1, dict(tile=8192, offload=True, timed=True, kernel="cudnn")),
    ("llama32_1b", 4, "32K", 1, dict(tile=8192, offload=True, rows=2, accumulation=2, timed=True, kernel="cudnn")),
    ("llama32_1b", 4, "32K", 1, dict(tile=8192, rows=2, accumulation=2, timed=True, kernel="cudnn")),
    (
        "llama31_8b",
        8,
        "64K",
        1,
        dict(**HOST, heads_per_stage=8, tile=8192, lora=16, offload=True, timed=True, kernel="cudnn"),
    ),
    (
        "llama31_8b",
        8,
        "64K",
        1,
        dict(**HOST, heads_per_stage=8, lora=16, targets=("q_proj", "v_proj"), timed=True, kernel="cudnn"),
    ),
    ("llama3_8b", 3, "64K", 4, dict(lora=16, offload=True)),
    ("llama3_8b", 3, "32K", 4, dict(ulysses=1, rows=4, **WHOLE)),
]
OF_RUN = ("lora", "targets", "rows", "accumulation", "kernel", "offload")
DEVICE = torch.device("cuda", 0)
LONGEST = 2**21  # that --measure runs: beyond it a step takes minutes


@dataclass
class Row:
    shape: str
    layers: int
    context: str
    world: int
    given: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        stack = " ".join(f"{name}={value}" for name, value in self.given.items())
        return f"{self.shape} {self.layers} {self.context} {self.world} {stack}".strip()

    @cached_property
    def job(self) -> Job:
        fields = {"ulysses": self.world, **self.given}
        fields.pop("timed", None)
        run = {name: fields.pop(name) for name in OF_RUN if name in fields}
        sizes = replace(read_sizes(self.shape), layers=self.layers, windows=(None,) * self.layers)
        return Job(sizes, Stack(**fields), size(self.context), self.world, **run)

    @cached_property
    def config(self) -> Any:
        config = hf_config(self.shape)
        config.num_hidden_layers = self.layers
        return config

    @cached_property
    def said(self) -> Memory:
        return predict(self.job)

    @cached_property
    def seconds(self) -> float:
        return estimate(self.job, parse_gpus(f"{self.world}xH200")).seconds

    @cached_property
    def ran(self) -> dict[str, int]:
        found = dry_run(self.job, self.config)
        return {"peak": found.peak, "stored": max(found.host, found.disk)}

    def line(self) -> str:
        stored = max(self.said.host, self.said.disk)
        off = self.said.peak / self.ran["peak"] - 1
        cells = [f"{self.ran['peak'] / 1e9:.2f}", f"{self.said.peak / 1e9:.2f}", _off(off, -0.02, 0.05)]
        cells.append(f"{stored / self.ran['stored'] - 1:+.1%}" if self.ran["stored"] else "")
        if "problem" in self.measured:
            cells += [self.measured["problem"], "", "", "", ""]
        elif self.measured:
            peak, host = self.measured["peak"], self.measured["host"]
            cells += [
                f"{peak / 1e9:.2f}",
                _off((self.ran["peak"] + WORKSPACE) / peak - 1, -0.03, 0.03),
                _off((self.said.peak + WORKSPACE) / peak - 1, -0.02, 0.05),
                _off((self.said.host - self.said.offloaded) / host - 1, -0.02, 0.02) if host else "",
            ]
            second = self.measured.get("seconds")
            cells.append(f"{second:.2f} s, plan {_off(self.seconds / second - 1, -0.15, 0.15)}" if second else "")
        stack = " ".join(f"{name}={value}" for name, value in self.given.items())
        return f"| {self.shape} | {self.layers} | {self.context} | {self.world} | {stack} | {' | '.join(cells)} |"

    def _measure(self) -> None:
        from ithaca.observe.profiler.steps import ready

        job = self.job
        if job.kernel != "fa4":
            job = replace(job, stack=replace(job.stack, attention=job.kernel))
        try:
            with ready(job, self.config, DEVICE) as step:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                step()
                torch.cuda.synchronize()
                store = step.run.report()["store"]
                host = store.held_bytes if store.kind == "host" else 0
                self.measured = {"peak": torch.cuda.max_memory_allocated(), "host": host}
                times: list[float] = []
                while self.given.get("timed") and len(times) < 5 and sum(times) < 10:
                    begin = time.perf_counter()
                    step()
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - begin)
                if times:
                    self.measured["seconds"] = median(times)
        except torch.OutOfMemoryError:
            self.measured = {"problem": "out of memory"}
        except Exception as error:  # one case must not take the others with it
            self.measured = {"problem": f"{type(error).__name__}: {str(error)[:80]}"}

    def measure(self) -> None:
        """With nothing left of the case before: a model is a circle of objects, which only the collector frees."""
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
        self._measure()
        self.measured["left"] = left


def _off(share: float, low: float, high: float) -> str:
    return f"{share:+.1%}" if low <= share <= high else f"{share:+.1%} **"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--save", type=Path, help="write what the dry runs said, as JSON")
    parser.add_argument("--said", type=Path, help="take the dry runs from this file")
    parser.add_argument("--measure", action="store_true", help="run each case on the GPU of this machine")
    parser.add_argument(
        "--measured", type=Path, help="what a GPU measured, as JSON: written by --measure, read without it"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="with --measure: no case that would end later"
    )
    options = parser.parse_args()
    begin = time.perf_counter()
    rows = [row for row in (Row(*each) for each in CASES) if options.only in row.words]
    known = json.loads(options.said.read_text()) if options.said else {}
    found = json.loads(options.measured.read_text()) if options.measured and options.measured.exists() else {}
    head = "| shape | layers | tokens | ranks | stack | dry run GB | plan GB | off | store off |"
    if found and not options.measure:
        rows = [row for row in rows if row.words in found]
        for row in rows:
            row.measured = found[row.words]
    if options.measure:
        rows = sorted((row for row in rows if row.job.context <= LONGEST), key=lambda row: row.seconds)
        rows = [row for row in rows if row.words not in found]
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {_commit()}\n")
    if found or options.measure:
        head += " measured GB | dry run off | plan off | host off | step |"
    print(head + "\n" + "|---" * (head.count("|") - 1) + "|")
    done = []
    for row in rows:
        if options.measure:
            if (
                time.perf_counter() - begin + 1.3 * row.seconds * (2 if row.given.get("timed") else 1) + 3
                > options.seconds
            ):
                break
            row.measure()
            if options.measured:
                found[row.words] = row.measured
                options.measured.write_text(json.dumps(found, indent=1))
        if row.words in known:
            row.ran = known[row.words]
        elif options.measure and options.measured:
            print(row.words, row.measured, flush=True)
            continue
        print(row.line(), flush=True)
        done.append(row)
    if options.save:
        options.save.write_text(json.dumps({row.words: row.ran for row in done}, indent=1))
    if not done:
        return
    apart = [row.said.peak / row.ran["peak"] - 1 for row in done]
    print(
        f"\n{len(done)} of {len(rows)} cases; plan against dry run from {min(apart):+.1%} to {max(apart):+.1%}", end=""
    )
    peaks = [(row, row.measured["peak"]) for row in done if "peak" in row.measured]
    if peaks:
        ran = [(row.ran["peak"] + WORKSPACE) / peak - 1 for row, peak in peaks]
        said = [(row.said.peak + WORKSPACE) / peak - 1 for row, peak in peaks]
        print(
            f"; {len(peaks)} measured: dry run from {min(ran):+.1%} to {max(ran):+.1%}, plan {min(said):+.1%} to {max(said):+.1%}",
            end="",
        )
    print(f"; {time.perf_counter() - begin:.0f} s")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
