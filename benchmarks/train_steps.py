"""Real training steps of a known shape at a long context: `ithaca train` itself, on one row that repeats.

    python benchmarks/train_steps.py --shape llama32_1b --context 128K --steps 10
    python benchmarks/train_steps.py --shape llama32_3b --context 256K --steps 2 --set stack.recompute=keep_attention
    python benchmarks/train_steps.py --shape llama32_1b --context 8K --steps 6 --load --starts 2 --set checkpoint.every=2
    python benchmarks/train_steps.py --shape llama32_3b --context 720K --documents 45 --steps 3
    python benchmarks/train_steps.py --shape tiny --context 2K --steps 4 --set launch.cpu=2 --set stack.ulysses=2

Weights are random, tokens are drawn by Zipf's law with a fixed seed; the model, its optimizer and its data go the whole way of a
user's run: config, packing, launch, AdamW on fp32 masters, metrics, checkpoint at the end. What it writes goes into a temporary
folder and is removed. Prints the step table from metrics.jsonl; the first step also builds kernels and pins host memory. How much
less memory the machine has free is seen from outside of the run, so nothing else may run there.
--documents packs the row from so many, each of which attends to itself alone: the memory of the row in less time.
--load reads weights from a folder instead, and --starts repeats the run: how long after the command its first step ends.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from side_by_side import ALL_SHAPES, size

from ithaca.engine.offload.host import available_memory


def make_inputs(folder: Path, shape: str, context: int, documents: int) -> None:
    """A model folder with nothing but its config, and one row of tokens, a file for each document."""
    from transformers import AutoConfig

    family, depth, sizes = ALL_SHAPES[shape]
    AutoConfig.for_model(
        family, num_hidden_layers=depth, max_position_embeddings=context, bos_token_id=None, eos_token_id=None, **sizes
    ).save_pretrained(folder / "model")
    vocabulary = sizes["vocab_size"]
    odds = 1.0 / np.arange(1, vocabulary + 1)
    tokens = np.random.default_rng(0).choice(vocabulary, size=context, p=odds / odds.sum())
    (folder / "row").mkdir()
    for index, part in enumerate(np.array_split(tokens.astype(np.int32), documents)):
        np.save(folder / "row" / f"{index}.npy", part)


def write_weights(folder: Path) -> None:
    """In a process of its own: what it takes of the GPU and of the host is free again before the run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(
        "cuda" if torch.cuda.is_available() else "cpu"
    ):  # a billion random numbers take a CPU half a minute
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")


class Ran(NamedTuple):
    code: int
    seconds: float
    first: float | None  # after so many the first step was done
    steps: int  # bytes that the machine had less free than before, at most until the last step was done
    save: int  # and after it


def run(command: list[str], metrics: Path, last: int) -> Ran:
    begin, before = time.perf_counter(), available_memory()
    first, least, done = None, {False: before, True: before}, False
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.05)
        least[done] = min(least[done], available_memory())
        steps = metrics.read_text().count('"loss"') if not done and metrics.exists() else 0
        first = time.perf_counter() - begin if first is None and steps else first
        done = done or steps >= last
    spent = time.perf_counter() - begin
    return Ran(process.returncode, spent, first, before - least[False], before - least[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="llama32_1b")
    parser.add_argument("--context", type=size, default="128K")
    parser.add_argument("--documents", type=int, default=1, help="that the row is packed from")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--load", action="store_true", help="read weights from a folder, which is written before")
    parser.add_argument("--starts", type=int, default=1, help="run so many times; the table is of the last")
    parser.add_argument("--folder", help="where the temporary folder goes (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ithaca-train-", dir=options.folder) as made:
        folder = Path(made)
        make_inputs(folder, options.shape, options.context, options.documents)
        if options.load:
            writer = multiprocessing.get_context("spawn").Process(target=write_weights, args=(folder,))
            writer.start()
            writer.join()
            assert writer.exitcode == 0, "no weights were written"
        settings = {
            "model.folder": folder / "model",
            "model.random_init": str(not options.load).lower(),
            "data.context": options.context,
            "data.sources": f"[{{path: {folder / 'row'}/*.npy, format: tokens}}]",
            "data.eos": "false",
            "train.steps": options.steps,
            "train.lr": 3e-4,
            "train.warmup": 1,
            "train.schedule": "constant",
            "checkpoint.every": "null",
            **dict(pair.split("=", 1) for pair in options.set),
        }
        (folder / "run.yaml").write_text("{}\n")
        command = [sys.executable, "-m", "ithaca", "train", str(folder / "run.yaml")]
        command += [f"--{name}={value}" for name, value in settings.items()]
        code = 0
        for start in range(options.starts):
            out = folder / f"run-{start}"
            metrics = out / "metrics.jsonl"
            ran = run([*command, f"--run.folder={out}"], metrics, options.steps)
            code = ran.code
            when = "no step" if ran.first is None else f"the first step was done {ran.first:.1f} s after the command"
            print(
                f"\n{options.shape}, {options.context:,} tokens, exit code {code}, {ran.seconds:.0f} s in all, {when}"
            )
            print(
                f"host memory the machine had less: {ran.steps / 1e9:.1f} GB in steps, {ran.save / 1e9:.1f} GB after the last\n"
            )
        print(
            "| step | loss | gradient norm | seconds | tokens/s/GPU | MFU | peak GB | host GB | waited for copies s |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for line in metrics.read_text().splitlines() if metrics.exists() else ():
            step = json.loads(line)
            if "event" in step:
                print(f"<!-- {line} -->")
                continue
            peak, mfu = step["gpu_peak"] or 0, step["mfu"] or 0
            print(
                f"| {step['step']} | {step['loss']:.4f} | {step['grad_norm']:.3f} | {step['seconds']:.2f} | "
                f"{step['tokens_per_second']:.0f} | {mfu:.3f} | {peak / 1e9:.1f} | {step['host_peak'] / 1e9:.1f} | "
                f"{step['copy_wait']:.2f} |"
            )
        saved = sum(file.stat().st_size for file in out.rglob("*.distcp"))
        print(f"\ncheckpoint: {saved / 1e9:.1f} GB")
        raise SystemExit(code)


if __name__ == "__main__":
    main()
