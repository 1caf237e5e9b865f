"""`ithaca data pack` on generated text: speed, and the memory of all its processes together.

    python benchmarks/pack_text.py [--size 1GB --workers 2 --format jsonl]

Makes text in a temporary folder (words of a Zipf law, documents of log-normal length with a heavy tail; as one book with
--format txt), trains a small byte-level BPE tokenizer on some of it, packs it, and removes everything. Memory is the largest
sum of the resident sets of parent and workers, looked at twenty times a second: what they share is counted as often as it is
shared, so the truth is below it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from ithaca.base.units import parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GB", help="of the text (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--format", choices=("jsonl", "txt"), default="jsonl")
    parser.add_argument("--contexts", default="8K,128K,1M")
    parser.add_argument("--folder", help="where the temporary folder goes (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        print(json.dumps(measure(Path(name), options), indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    text, documents = make_text(folder, parse_bytes(options.size), options.format)
    train_tokenizer(folder / "tokenizer", folder / "sample.txt", options.vocabulary)
    print(f"made {text.stat().st_size / 1e6:,.0f} MB in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    command = [sys.executable, "-m", "ithaca", "data", "pack", str(text), "--tokenizer", str(folder / "tokenizer")]
    command += ["--out", str(folder / "packed"), "--workers", str(options.workers)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = watch(process)
    seconds = time.perf_counter() - started
    assert process.returncode == 0
    found = {
        "command": " ".join(sys.argv),
        "bytes": text.stat().st_size,
        "documents written": documents,
        "seconds": round(seconds, 1),
        "MB/s": round(text.stat().st_size / 1e6 / seconds, 2),
        "peak MB of all processes": round(peak / 1e6),
        "packed bytes": sum(path.stat().st_size for path in (folder / "packed").glob("*.bin")),
    }
    for context in options.contexts.split(","):
        found[f"rows at {context}"] = rows_at(folder / "packed", context)
    return found


def watch(process: subprocess.Popen) -> int:
    """The largest sum of resident sets until the process ends."""
    root, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        try:
            for each in [root, *root.children(recursive=True)]:
                total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # one has just ended
        peak = max(peak, total)
        time.sleep(0.05)
    return peak


def rows_at(folder: Path, context: str) -> dict:
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "ithaca",
        "data",
        "inspect",
        str(folder),
        "--context",
        context,
        "--samples",
        "0",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"refused": done.stderr.strip()}
    (rows,) = json.loads(done.stdout)["rows"]
    seconds = round(time.perf_counter() - started, 1)
    return {name: rows[name] for name in ("rows", "long_documents", "full")} | {"seconds, start included": seconds}


def make_text(folder: Path, size: int, form: str) -> tuple[Path, int]:
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    weights = 1 / np.arange(1, 27)
    lengths = rng.integers(2, 11, 50_000)
    words = np.array(["".join(rng.choice(letters, length, p=weights / weights.sum())) for length in lengths])
    ranks = 1 / np.arange(2, len(words) + 2)
    ranks /= ranks.sum()
    path, written, documents = folder / f"text.{form}", 0, 0
    with open(path, "w") as file, open(folder / "sample.txt", "w") as sample:
        while written < size:
            some = words[rng.choice(len(words), 1_000_000, p=ranks)]
            at = 0
            while at < len(some):
                heavy = rng.random() < 0.01
                count = int((rng.pareto(1.1) + 1) * 15_000 if heavy else rng.lognormal(np.log(700), 1.1)) + 1
                body = " ".join(some[at : at + count])
                at += count
                line = body + ".\n" if form == "txt" else json.dumps({"text": body}) + "\n"
                written += file.write(line)
                documents += 1
                if written < 5_000_000:
                    sample.write(body + "\n")
    return path, 1 if form == "txt" else documents


def train_tokenizer(folder: Path, sample: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(sample)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


if __name__ == "__main__":
    main()
