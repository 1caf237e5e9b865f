"""The demo: a tiny Llama learns long-range recall on four CPU workers, is exported, and answers in words through transformers.

    make demo

Rows of 2,048 sentences say in their first eighth who lives where, and ask for it in their third quarter. Four workers (ulysses 2 ×
ring 2) share every row, and none of them holds both a fact and a question: what is learned here went through the exchanges. A
sentence is one token of the tokenizer that is made here and exported with the model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ithaca.data import Recall, recall_score

RUN = Path("runs/demo")
UNSEEN = 900_000  # rows from here on are never trained on
PEOPLE = ("Anna", "Ben", "Clara", "David")
TOWNS = ("Athens", "Cairo", "Delhi", "Lima", "Oslo", "Paris", "Rome", "Tokyo")
NOTHING, QUESTION, FACT = "Nothing happens.", "Where does {} live?", "{} lives in {}."


def main() -> int:
    began = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)
    step("training: ithaca train --recipe tiny_cpu --log.every 1")
    ithaca("train", "--recipe", "tiny_cpu", "--log.every", "1", "--run.folder", str(RUN))
    step(f"export: ithaca export {RUN} {RUN}/export --dtype fp32 --tokenizer {RUN}/words")
    tokenizer_of_sentences().save_pretrained(RUN / "words")
    ithaca("export", str(RUN), str(RUN / "export"), "--dtype", "fp32", "--tokenizer", str(RUN / "words"))
    step("the exported model in plain transformers, on rows it has never seen")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(RUN / "export", dtype=torch.float32)
    task = Recall(2048, model.config.vocab_size)
    right, asked = score(model, task)
    print(f"recall: {right} of {asked} answers right, {right / asked:.2%}; guessing gives {task.chance:.1%}")
    ask(model, task)
    page = (RUN / "report" / "index.html").resolve()
    print(
        f"\nDone in {time.perf_counter() - began:.0f} s. Try it:\n"
        f"  . {os.path.relpath(sys.prefix)}/bin/activate               first, so that your shell finds `ithaca`\n"
        f'  ithaca ask {RUN}/export --file {RUN}/story.txt "Where does Ben live?" --tokens 1 --cpu 1 --model.dtype fp32\n'
        "  ithaca verify llama3 --world 4 --stack.ulysses 2 --stack.ring 2    every gradient against the untouched model\n"
        "  ithaca recipes ls                    runs for real models;  ithaca docs: every page\n"
        f"  {RUN}/config.yaml                every setting of this run; `ithaca train {RUN}/config.yaml` resumes it\n"
        f"\nThe report, with every step, setting and its reason, is one page that needs no network: {RUN}/report/index.html\n"
        f"Open it with `ithaca report {RUN} --open`, or give this to a browser: {page.as_uri()}"
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


def tokenizer_of_sentences() -> PreTrainedTokenizerFast:
    """The tokens of the task (ithaca/data/pairs.py) as sentences, one a line: what is a number there has a name here."""
    facts = [FACT.format(person, town) for person in PEOPLE for town in TOWNS]
    sentences = [NOTHING, *map(QUESTION.format, PEOPLE), *TOWNS, *facts]
    made = Tokenizer(WordLevel({sentence: token for token, sentence in enumerate(sentences)}, unk_token=NOTHING))
    made.pre_tokenizer = Split(Regex("\n+"), "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"  # a story and a question are put together as they stand
    return tokenizer


def ask(model, task: Recall) -> None:
    """Ask in words, the way a user would: a story that says where four people live, and questions a thousand sentences later."""
    tokenizer = AutoTokenizer.from_pretrained(RUN / "export")
    ids, *_ = task.read(UNSEEN, 0, task.asked[0])
    story = tokenizer.batch_decode(ids[:, None])
    (RUN / "story.txt").write_text("\n".join(story) + "\n")
    facts = story[: task.context // 8]
    print(f"\nA story of {len(story):,} sentences ({RUN}/story.txt) begins:\n  {' '.join(facts[: len(PEOPLE)])} ...")
    print(f"and goes on with {len(story) - len(facts):,} times “{NOTHING}” Then it is asked:")
    for person in PEOPLE:
        question = QUESTION.format(person)
        prompt = tokenizer("\n".join([*story, question]), return_tensors="pt", return_token_type_ids=False)
        (told,) = model.generate(**prompt, max_new_tokens=1, do_sample=False)
        answer = tokenizer.decode(told[-1:])
        verdict = "right" if FACT.format(person, answer) in facts else "wrong"
        print(f"  {question:24} {answer:8} {verdict}")


if __name__ == "__main__":
    raise SystemExit(main())
