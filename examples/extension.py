"""Evidence that extension works, from nothing, on a CPU: a model that cannot read four times its length, and then can.

    make evidence          (or: python examples/extension.py [--out docs/developer/evidence])

1. A tiny Llama with random weights learns to look facts up at any distance in rows of 256 tokens.
2. It is asked for needles in texts of 256 to 1,024 tokens: beyond its length it fails where the needle lies far back.
3. Its exported folder is extended: YaRN with factor 4, and a short training at 1,024 tokens.
4. The same questions again. Every step is an `ithaca` command; this script types them and keeps the heat maps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ithaca.evaluation.heatmap import svg

NATIVE, FACTOR = 256, 4
LONG = NATIVE * FACTOR
LENGTHS = [NATIVE // 2, *range(NATIVE, LONG + 1, NATIVE)]
ENOUGH = 0.95  # of all cells after the extension; before it, the longest texts stay below BROKEN
BROKEN = 0.8
MODEL = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=NATIVE, initializer_range=0.1, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/developer/evidence"), help="folder for heat maps and numbers"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/extension"), help="folder for the runs")
    parser.add_argument("--cpu", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=400, help=f"steps at {NATIVE} tokens")
    parser.add_argument("--more", type=int, default=60, help=f"steps at {LONG} tokens")
    options = parser.parse_args()
    began = time.perf_counter()
    work = options.work
    shutil.rmtree(work, ignore_errors=True)
    MODEL.save_pretrained(work / "model")
    common = [
        "--cpu",
        str(options.cpu),
        "--model.dtype",
        "fp32",
        "--data.sources",
        "[{synthetic: needles}]",
        "--train.lr",
    ]
    quiet = ["--train.weight_decay", "0.0", "--train.warmup", "0.1", "--log.every", "20", "--checkpoint.every", "null"]
    yaml = ["--model.random_init", "true", "--data.context", str(NATIVE), "--train.steps", str(options.steps)]

    step(f"a model for {NATIVE} tokens")
    short = run_of(work / "short", work / "model")
    ithaca("train", short, *common, "1e-2", *quiet, *yaml, "--train.rows", "16")
    ithaca("export", work / "short-run", work / "short-model", "--dtype", "fp32")
    step(f"needles in up to {LONG:,} tokens, before")
    before = grid(work / "short-run", options)

    rope = ["--model.rope.rope_type", "yarn", "--model.rope.factor", str(FACTOR)]
    rope += ["--model.rope.original_max_position_embeddings", str(NATIVE)]
    step(f"extended to {LONG:,} tokens: yarn ×{FACTOR}, {options.more} steps")
    extended = run_of(work / "long", work / "short-model")
    longer = ["--data.context", str(LONG), "--train.steps", str(options.more), "--train.rows", "4", "--data.seed", "1"]
    ithaca("train", extended, *common, "2.5e-3", *quiet, *longer, *rope)
    step("needles, after")
    after = grid(work / "long-run", options)

    seconds = round(time.perf_counter() - began)
    options.out.mkdir(parents=True, exist_ok=True)
    words = {
        "before": f"Trained at {NATIVE} tokens",
        "after": f"Extended to {LONG:,}: YaRN ×{FACTOR}, {options.more} steps",
    }
    for name, record in (("before", before), ("after", after)):
        (options.out / f"extension-{name}.svg").write_text(svg(record["needle"], words[name]))
        (options.out / f"extension-{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    longest = sum(before["needle"]["accuracy"][-1]) / len(before["needle"]["depths"])
    worst = min(cell for row in after["needle"]["accuracy"] for cell in row)
    print(
        f"\nDone in {seconds} s. At {LONG:,} tokens {longest:.1%} of needles were found before the extension; after it "
        f"{after['needle']['mean']:.1%} over the grid, {worst:.1%} in its worst cell.\nHeat maps: {options.out}/extension-*.svg; "
        f"pages: {work}/short-run/report/index.html, {work}/long-run/report/index.html"
    )
    if longest > BROKEN or after["needle"]["mean"] < ENOUGH:
        print(f"expected at most {BROKEN:.0%} before and at least {ENOUGH:.0%} after", file=sys.stderr)
        return 1
    return 0


def run_of(path: Path, model: Path) -> Path:
    """A config file that names model and folder; the rest is on the command line."""
    file = path.with_suffix(".yaml")
    file.write_text(f"model: {{folder: {model}}}\nrun: {{folder: {path}-run}}\n")
    return file


def grid(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    asked = ["--eval.tasks", "needle", "--eval.lengths", ",".join(map(str, LENGTHS)), "--eval.depths", "9"]
    ithaca("eval", run, "--cpu", options.cpu, *asked, "--eval.samples", "16", "--eval.language", "pairs",
           "--eval.sources", "[{synthetic: needles}]", "--eval.rows", "16")  # fmt: skip
    records = [json.loads(path.read_text()) for path in (run / "eval").glob("step-*.json")]
    newest = max(records, key=lambda record: record["step"])
    return {name: value for name, value in newest.items() if name != "model"}  # where it lay on this machine


def ithaca(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "ithaca", *map(str, arguments)], check=True)


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
