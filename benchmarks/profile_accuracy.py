"""Plan, dry run and measurement beside each other, on the GPU that is here: one table for one commit.

    python benchmarks/profile_accuracy.py [--only 1M] [--cpu]

Each case is an `ithaca profile` in a process of its own (a few layers, as rank 0 of N), and a dry run of the same stack with the
attention kernel that ran. GB of tensors at the peak: planned by arithmetic, by the dry run, as counted by category, and torch's own
maximum in the counted step and in steps that nobody watched. "off" is of the last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

from ithaca.planner.dry_run import dry_run
from ithaca.profiler.wanted import Wanted

# model, context, ranks, layers, fields of the stack
CASES = [
    ("llama32_1b", "16K", 1, 4, "recompute=none,tile=none"),
    ("llama32_1b", "64K", 1, 4, "tile=8192"),
    ("llama32_1b", "256K", 1, 2, "store=host,heads_per_stage=8,tile=8192"),
    ("llama32_1b", "256K", 1, 2, "store=host,heads_per_stage=8,tile=8192,attention=cudnn"),
    ("llama3_8b", "256K", 8, 2, "ulysses=8,engine=composed,recompute=layer"),
    ("llama3_8b", "512K", 8, 2, "ulysses=8,store=host,heads_per_stage=1"),
    ("llama3_8b", "1M", 8, 2, "ulysses=8,store=host,heads_per_stage=1"),
    ("qwen3_8b", "256K", 8, 2, "ulysses=8,store=disk,heads_per_stage=2"),
]
SMALL = [("{tiny}", "1K", 2, 2, "ulysses=2,store=host,tile=256"), ("{tiny}", "512", 1, 2, "tile=128")]  # without a GPU
TINY = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "vocab_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 65536,
}  # fmt: skip


def profiled(model: str, context: str, ranks: int, layers: int, fields: str, cpu: bool) -> dict[str, Any] | str:
    """The profile, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory() as out:
        gpus = ["--gpus", f"{ranks}xH200", "--cpu"] if cpu else ["--rank-of", str(ranks)]
        command = [
            sys.executable,
            "-m",
            "ithaca",
            "profile",
            model,
            "--context",
            context,
            "--layers",
            str(layers),
            *gpus,
        ]
        done = subprocess.run([*command, "--set", fields, "--out", out, "--json"], capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout)


def dry_peak(found: dict[str, Any], model: str, layers: int) -> int:
    asked = {"model": model, "stack": found["stack"], "context": found["context"], "world": found["rank_of"]}
    wanted = Wanted.read(asked)
    return dry_run(replace(wanted.case(), kernel=found["kernel"]), layers=layers).peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--cpu", action="store_true", help="two tiny cases on CPU tensors: does it still run?")
    options = parser.parse_args()
    print("| model | tokens | rank of | layers | stack | kernel | plan | dry run | counted | torch, same step | torch | plan off | "
          "counted off | s a step |")  # fmt: skip
    print("|---" * 14 + "|")
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as file:
            json.dump(TINY, file)
        for model, context, ranks, layers, fields in SMALL if options.cpu else CASES:
            model = model.format(tiny=folder)
            case = f"{model.rpartition('/')[2]} | {context} | {ranks} | {layers} | {fields}"
            if options.only not in case:
                continue
            found = profiled(model, context, ranks, layers, fields, options.cpu)
            if isinstance(found, str):
                print(f"| {case} | {found} |", flush=True)
                continue
            torch = found["allocated"] or {"counted": found["peak"], "steps": found["peak"]}
            sizes = [
                found["planned"]["peak"],
                dry_peak(found, model, layers),
                found["peak"],
                torch["counted"],
                torch["steps"],
            ]
            told = " | ".join(f"{each / 1e9:.4g}" for each in sizes)
            off = " | ".join(f"{each / torch['steps'] - 1:+.1%}" for each in (sizes[0], sizes[2]))
            print(f"| {case} | {found['kernel']} | {told} | {off} | {found['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
