"""How much host memory a rank needs to be filled from a folder of safetensors, against the promise: its shard and one tensor.

    python benchmarks/load_memory.py [--ranks 4 --layers 8 --hidden 2048 --vocabulary 32000 --experts 0 --dtype fp32]

Writes a model with random weights to a temporary folder, then fills a meta-built model from it on gloo workers, and reads what the
kernel says about each: the largest resident set during `prepare` (VmHWM, set back before) less the one just before it. That counts
everything, mapped file pages too. `load + FSDP` is what a user would do otherwise: `from_pretrained` on every rank, then shard.
--dtype bf16 stores the files in bf16 and fills fp32 masters, which goes through a buffer. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

import ithaca
from ithaca.base.processes.pool import Workers

MB = 1e6


def config(shape: dict[str, int]) -> Any:
    from transformers import AutoConfig

    heads = dict(num_attention_heads=16, num_key_value_heads=8, head_dim=shape["hidden"] // 16)
    common = dict(
        hidden_size=shape["hidden"], num_hidden_layers=shape["layers"], vocab_size=shape["vocabulary"], **heads
    )
    if shape["experts"]:
        moe = dict(num_experts=shape["experts"], num_experts_per_tok=2, moe_intermediate_size=shape["hidden"] // 2)
        return AutoConfig.for_model("qwen3_moe", **common, **moe, intermediate_size=shape["hidden"])
    return AutoConfig.for_model("llama", **common, intermediate_size=shape["hidden"] * 3)


def write(folder: Path, shape: dict[str, int], dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(shape), dtype=dtype)
    model.save_pretrained(folder, max_shard_size="200MB")


def fill(folder: str, shape: dict[str, int], way: str) -> dict[str, float]:
    """On one rank: bytes of its shards, of the largest parameter, and the peak while it was filled."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    small = dict(shape, layers=1, hidden=64, vocabulary=64)
    with torch.device("meta"):
        warm = AutoModelForCausalLM.from_config(config(small))
        model = AutoModelForCausalLM.from_config(config(shape))
    warm.to_empty(device="cpu")
    warm.initialize_weights()
    ithaca.prepare(warm, ithaca.Stack(), device="cpu")  # first-time imports are not what is measured
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there to be used again
    before = peak(reset=True)
    if way == "meta":
        run = ithaca.prepare(model, ithaca.Stack(), device="cpu", weights=folder)
    else:
        logging.disable_progress_bar()
        run = ithaca.prepare(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ithaca.Stack(), device="cpu"
        )
    parameters: list[Any] = list(run.model.parameters())
    return {
        "peak": peak() - before,
        "shard": sum(p.to_local().numel() * p.element_size() for p in parameters),
        "tensor": max(p.numel() * p.element_size() for p in parameters),
        "model": sum(p.numel() * p.element_size() for p in parameters),
    }


def peak(reset: bool = False) -> float:
    """Largest resident set so far; with reset, the present one, from which the next is counted."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS" if reset else "VmHWM"].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture; 0 = a dense model")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the files")
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "vocabulary", "experts")}
    print("| way | rank | model MB | shard MB | largest tensor MB | peak MB | peak / (shard + tensor) |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
        for way in ("meta", "load + FSDP"):
            with Workers(options.ranks, timeout=600) as workers:
                for rank, found in enumerate(workers.run(fill, folder, shape, way)):
                    cells = [f"{found[name] / MB:.0f}" for name in ("model", "shard", "tensor", "peak")]
                    share = found["peak"] / (found["shard"] + found["tensor"])
                    print(f"| {way} | {rank} | {' | '.join(cells)} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
