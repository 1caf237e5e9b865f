"""The demo: a tiny Llama learns long-range recall on four CPU workers, is exported, and answers through plain transformers.

    make demo

Rows of 2,048 tokens state facts in their first eighth and ask for them in their third quarter. Four workers (ulysses 2 × ring 2)
share every row, and none of them holds both a fact and a question: what is learned here went through the exchanges.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ithaca.data import Recall, recall_score

RUN = Path("runs/demo")
UNSEEN = 900_000  # rows from here on are never trained on


def main() -> int:
    began = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)
    step("training: ithaca train --recipe tiny_cpu")
    ithaca("train", "--recipe", "tiny_cpu", "--run.folder", str(RUN))
    step(f"export: ithaca export {RUN} {RUN}/export")
    ithaca("export", str(RUN), str(RUN / "export"), "--dtype", "fp32")
    step("the exported model in plain transformers, on rows it has never seen")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(RUN / "export", dtype=torch.float32)
    task = Recall(2048, model.config.vocab_size)
    right, asked = score(model, task)
    print(f"recall: {right} of {asked} answers right, {right / asked:.2%}; guessing gives {task.chance:.1%}")
    print(answer(model, task))
    print(
        f"\nDone in {time.perf_counter() - began:.0f} s. Where to look next:\n"
        f"  {RUN}/config.yaml         every setting of this run; `ithaca train {RUN}/config.yaml` resumes it\n"
        f"  {RUN}/metrics.jsonl       loss, rates, memory of each step\n"
        f"  {RUN}/checkpoints         sharded checkpoints;  {RUN}/export: the Hugging Face folder\n"
        "  ithaca recipes ls              runs for real models;  ithaca docs: every page\n"
        "  ithaca verify llama3 --world 4 --stack.ulysses 2 --stack.ring 2    every gradient against the untouched model"
    )
    if right / asked < 0.5:
        print("the model did not learn the task: something is broken", file=sys.stderr)
        return 1
    return 0


def ithaca(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ithaca", *arguments], check=True)


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


@torch.no_grad()
def score(model, task: Recall, rows: int = 16) -> tuple[int, int]:
    right = asked = 0
    for row in range(UNSEEN, UNSEEN + rows):
        ids, labels, _ = task.read(row, 0, task.context)
        guesses = model(torch.from_numpy(ids)[None]).logits[0].argmax(-1)
        found = recall_score(guesses, torch.from_numpy(labels))
        right, asked = right + found[0], asked + found[1]
    return right, asked


def answer(model, task: Recall) -> str:
    """Ask one question the way a user would: generate the next token."""
    ids, labels, _ = task.read(UNSEEN, 0, task.context)
    at = task.asked[0]
    prompt = torch.from_numpy(ids[: at + 1])[None]
    (token,) = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)[
        0, at + 1 :
    ]
    verdict = "right" if int(token) == labels[at] else f"wrong, it is token {labels[at]}"
    return f"generate: after {at + 1:,} tokens, asked for key {ids[at] - 1}, it answers with token {int(token)} ({verdict})"


if __name__ == "__main__":
    raise SystemExit(main())
