"""The plan's arithmetic beside the dry run, which executes the code: peak of a GPU and bytes in the store, case by case.

    python benchmarks/plan_accuracy.py [--only 1M]

Two to four layers of each shape, so that a case takes seconds; AdamW's states are counted. Needs no GPU. A row is marked where the
arithmetic is more than 5% above or 2% below.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from rank_of_n import size

from ithaca.config.schema import Lora
from ithaca.planner.config import hf_config
from ithaca.planner.dry_run import Case, dry_run
from ithaca.planner.memory import Job, predict
from ithaca.planner.model import read_sizes
from ithaca.stack import Stack

WHOLE = dict(shard_parameters=False)
HOST = dict(store="host")
UPIPE = dict(store="host", engine="composed", recompute="layer")
# shape, layers, context, ranks, fields of the stack; "lora", "rows" and "kernel" are of the run
CASES: list[tuple[str, int, str, int, dict]] = [
    ("llama32_1b", 3, "8K", 1, {}),
    ("llama32_1b", 3, "16K", 1, dict(**WHOLE, recompute="none", tile=None)),
    ("llama32_1b", 3, "16K", 1, dict(**WHOLE, recompute="layer", engine="composed", tile=None)),
    ("llama32_1b", 3, "32K", 1, dict(recompute="none", tile=None)),
    ("llama32_1b", 2, "64K", 1, dict(**WHOLE, tile=8192)),
    ("llama32_1b", 4, "64K", 1, dict(tile=8192)),
    ("llama32_1b", 3, "128K", 1, dict(**HOST, heads_per_stage=8, tile=8192)),
    ("llama32_1b", 3, "128K", 1, dict(**HOST, heads_per_stage=8, tile=8192, hold=False)),
    ("llama32_1b", 2, "256K", 1, dict(**HOST, **WHOLE, heads_per_stage=4)),
    ("llama32_1b", 2, "256K", 1, dict(**HOST, **WHOLE, heads_per_stage=8, tile=8192)),
    ("llama32_1b", 3, "1M", 1, dict(**HOST, heads_per_stage=4)),
    ("llama32_3b", 2, "256K", 1, dict(**HOST, heads_per_stage=6, tile=8192)),
    ("llama32_3b", 3, "512K", 4, dict(**HOST, ulysses=2, ring=2, heads_per_stage=4)),
    ("qwen3_4b", 3, "512K", 1, dict(**HOST, heads_per_stage=4, recompute="layer")),
    ("llama3_8b", 3, "32K", 1, {}),
    ("llama3_8b", 3, "128K", 1, dict(**HOST, lora=16, heads_per_stage=4)),
    ("llama3_8b", 3, "64K", 2, {}),
    ("llama3_8b", 3, "256K", 4, dict(**HOST, lora=16, heads_per_stage=2)),
    ("llama3_8b", 2, "16K", 8, dict(ulysses=1, rows=8)),
    ("llama3_8b", 3, "64K", 8, dict(engine="composed", recompute="none", tile=None)),
    ("llama3_8b", 3, "256K", 8, {}),
    ("llama3_8b", 3, "256K", 8, dict(engine="composed")),
    ("llama3_8b", 3, "256K", 8, dict(engine="composed", recompute="layer", tile=None)),
    ("llama3_8b", 3, "512K", 8, dict(**HOST, heads_per_stage=1, tile=16384)),
    ("llama3_8b", 3, "1M", 8, HOST),
    ("llama3_8b", 3, "1M", 8, dict(**HOST, heads_per_stage=2)),
    ("llama3_8b", 3, "1M", 8, dict(**HOST, heads_per_stage=1)),
    ("llama3_8b", 3, "1M", 8, dict(**HOST, heads_per_stage=1, engine="composed")),
    ("llama3_8b", 3, "1M", 8, dict(**UPIPE, heads_per_stage=1)),
    ("llama3_8b", 3, "1M", 8, dict(store="disk", heads_per_stage=1, recompute="layer")),
    ("llama3_8b", 3, "2M", 8, dict(**HOST, heads_per_stage=4)),
    ("llama3_8b", 3, "3M", 8, dict(**HOST, heads_per_stage=1)),
    ("llama3_8b", 3, "5M", 8, dict(**HOST, heads_per_stage=1)),
    ("qwen3_8b", 3, "256K", 8, UPIPE),
    ("qwen3_8b", 3, "512K", 8, dict(**HOST, heads_per_stage=1, kernel="cudnn")),
    ("qwen3_8b", 3, "1M", 8, dict(store="disk", heads_per_stage=2, tile=8192)),
    ("qwen3_32b", 2, "512K", 16, dict(ulysses=8, ring=2)),
    ("qwen3_32b", 3, "512K", 16, dict(**HOST, ulysses=8, ring=2, heads_per_stage=2, tile=16384)),
    ("qwen3_32b", 2, "2M", 16, dict(**HOST, ulysses=8, ring=2, heads_per_stage=1)),
    ("mistral_7b", 2, "128K", 1, dict(**HOST, heads_per_stage=8, kernel="flash")),
    ("mistral_7b", 3, "256K", 4, dict(**HOST, heads_per_stage=2, tile=2048)),
    ("mistral_7b", 3, "64K", 8, dict(recompute="layer", tile=2048)),
    ("mistral_7b", 3, "256K", 8, dict(recompute="layer", tile=16384, kernel="flash")),
    ("mistral_7b", 3, "2M", 8, dict(**HOST, heads_per_stage=1, tile=2048)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose line contains this")
    options = parser.parse_args()
    print("| shape | layers | tokens | ranks | stack | dry run GB | plan GB | off | store off |")
    print("|---|---|---|---|---|---|---|---|---|")
    apart = []
    for shape, layers, context, world, given in CASES:
        words = " ".join(f"{name}={value}" for name, value in given.items())
        if options.only not in f"{shape} {context} {world} {words}":
            continue
        fields = {"ulysses": world, **given}
        lora, rows, kernel = fields.pop("lora", 0), fields.pop("rows", 1), fields.pop("kernel", "fa4")
        stack, tokens = Stack(**fields), size(context)
        config = hf_config(shape)
        config.num_hidden_layers = layers
        adapters = Lora(rank=lora) if lora else None
        ran = dry_run(Case(config, stack, tokens, world=world, rows=rows, kernel=kernel, lora=adapters))
        sizes = replace(read_sizes(shape), layers=layers, windows=(None,) * layers)
        said = predict(Job(sizes, stack, tokens, world, rows, kernel, lora=lora))
        off, kept = said.peak / ran.peak - 1, max(ran.host, ran.disk)
        stored = f"{max(said.host, said.disk) / kept - 1:+.1%}" if kept else ""
        mark = "" if -0.02 <= off <= 0.05 else " **"
        numbers = f"{ran.peak / 1e9:.2f} | {said.peak / 1e9:.2f} | {off:+.1%}{mark} | {stored}"
        print(f"| {shape} | {layers} | {context} | {world} | {words} | {numbers} |", flush=True)
        apart.append(off)
    print(f"\n{len(apart)} cases, from {min(apart):+.1%} to {max(apart):+.1%}")


if __name__ == "__main__":
    main()
