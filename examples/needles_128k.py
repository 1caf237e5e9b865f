"""Evidence on one GPU: a small model that grows to 128K tokens in phases, and finds needles over the whole range.

    python examples/needles_128k.py                                    # one H200: about five minutes
    python examples/needles_128k.py --cpu 2 --contexts 128,512 --steps 250,20 --rows 16 --out /tmp/small

One run with a length curriculum (`phases`): look-ups are learned where rows are short and steps take milliseconds, and each longer
phase teaches the same model to pick one fact out of eight times as many tokens. Then `ithaca eval`: the grid of needles up to
the last context, and loss by position on rows that were never trained on. Both go to --out as JSON and SVG.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from transformers import LlamaConfig

from ithaca.base.units import parse_tokens
from ithaca.evaluation.heatmap import svg


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="256,2K,16K,128K", help="of the phases (default: %(default)s)")
    parser.add_argument("--steps", default="800,300,200,60", help="of the phases (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--lr", default="1e-2")
    parser.add_argument("--cpu", type=int, default=None, help="processes on the CPU; default: the GPUs")
    parser.add_argument("--work", type=Path, default=Path("runs/needles_128k"))
    parser.add_argument("--out", type=Path, default=Path("docs/developer/evidence"))
    options = parser.parse_args()
    contexts = [parse_tokens(each) for each in options.contexts.split(",")]
    steps = [int(each) for each in options.steps.split(",")]
    began, work, longest = time.perf_counter(), options.work, contexts[-1]
    shutil.rmtree(work, ignore_errors=True)
    LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=contexts[0], initializer_range=0.1, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7}, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    ).save_pretrained(work / "model")  # fmt: skip
    phases = "".join(f"  - {{context: {c}, steps: {n}}}\n" for c, n in zip(contexts, steps, strict=True))
    (work / "run.yaml").write_text(
        f"description: needles in up to {longest:,} tokens, by a length curriculum\n"
        f"model: {{folder: {work / 'model'}, random_init: true, dtype: {'fp32' if options.cpu else 'bf16'}}}\n"
        "data: {sources: [{synthetic: needles}]}\nstack: auto\n"
        f"train: {{rows: {options.rows}, lr: {options.lr}, min_lr: 5e-4, warmup: 20, weight_decay: 0.0}}\n"
        f"phases:\n{phases}checkpoint: {{every: null}}\nlog: {{every: 10}}\nrun: {{folder: {work / 'run'}}}\n"
    )
    where = ["--cpu", str(options.cpu)] if options.cpu else []
    ithaca("train", work / "run.yaml", *where)
    trained = time.perf_counter() - began
    lengths = sorted({max(longest // 16, 64), longest // 4, longest // 2, longest * 3 // 4, longest})
    asked = [
        "--eval.lengths",
        ",".join(map(str, lengths)),
        "--eval.depths",
        "9",
        "--eval.samples",
        "8",
        "--eval.rows",
        "8",
    ]
    ithaca("eval", work / "run", *where, *asked, "--eval.tasks", "needle", "--eval.sources", "[{synthetic: needles}]")
    (path,) = (work / "run" / "eval").glob("step-*.json")
    record = json.loads(path.read_text())
    del record["model"]  # where it lay on this machine
    needle, positions = record["needle"], record["held_out"]["positions"]
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"needles-{longest}"
    (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / f"{name}.svg").write_text(svg(needle, f"Phases {options.contexts}, {sum(steps)} steps"))
    first, last = positions[0]["loss"], positions[-1]["loss"]
    print(
        f"\ntrained in {trained:.0f} s, all in {time.perf_counter() - began:.0f} s: {needle['mean']:.1%} of needles found in up to "
        f"{longest:,} tokens, {min(map(min, needle['accuracy'])):.0%} in the worst cell; loss goes from {first:.3f} in the first "
        f"{positions[0]['to']} positions to {last:.3f} in the last half.\n{options.out / name}.svg and .json; "
        f"page: {work / 'run' / 'report' / 'index.html'}"
    )
    return 0 if needle["mean"] >= 0.9 and last < first else 1


def ithaca(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "ithaca", *map(str, arguments)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
