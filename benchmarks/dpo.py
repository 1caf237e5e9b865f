"""A step of DPO at length on one GPU: TRL's own trainer beside ithaca's ways to the same loss.

    python benchmarks/dpo.py --contexts 16K,32K,64K,128K
    python benchmarks/dpo.py --shape tiny --contexts 64 --recipes trl,trainer,tree --cpu     # no GPU: does it still run?

A pair a step: a prompt of 15/16 of the context and two answers of the rest, bf16 weights (fp32 on a CPU), a reference of its own in
the same memory, gradient checkpointing or ithaca's stack that suits the length, SGD, random numbers from fixed seeds. The first
step warms up, the best of the others counts; "s a pair" is the whole step. The losses of the first step agree, or a row computes
something else. A case runs in a process of its own; one that runs out of memory or time is a row that says so, and its longer
contexts are left out.

    trl          trl.DPOTrainer, SDPA, checkpointing (its head computes log-probabilities by chunks)
    trl+liger    the same with use_liger_kernel=True
    trl+fa4      with Liger and attn_implementation="flash_attention_4"
    trainer      ithaca.integrations.DPOTrainer: the same rows
    tree         run.logprobs on a tree: the prompt is computed once, as `ithaca train` does it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rank_of_n import size
from side_by_side import ALL_SHAPES, Case, brief, out_of_memory, suited
from torch import Tensor

import ithaca
from ithaca.engine.objective.preference import Preference, preference_losses

RECIPES = ("trl", "trl+liger", "trl+fa4", "trainer", "tree")
BETA = 0.1


def pair(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """prompt, chosen, rejected"""
    ids = case.tokens()[0]
    answer = max(case.context // 16, 2)
    other = torch.randint(0, case.vocabulary, (answer,), generator=torch.Generator().manual_seed(2))
    return ids[:-answer], ids[-answer:], other


def models(case: Case, attention: str = "sdpa") -> tuple[Any, Any]:
    """What is trained, and a reference that is not quite it."""
    both = case.model(), case.model()
    for model in both:
        model.set_attn_implementation(attention)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in both[1].parameters():
            parameter *= 1 + 0.01 * torch.rand((), device=parameter.device)
    return both[0], both[1].eval().requires_grad_(False)


def trained(case: Case, recipe: str, steps: int, each: Callable[[float, float], None]) -> None:
    """By a trainer of TRL's kind."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers import models as words
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    from ithaca.integrations import DPOTrainer

    cuda = case.device.type == "cuda"

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.start = synchronized(cuda)

        def on_step_end(self, *given: Any, **named: Any) -> None:
            self.seconds = synchronized(cuda) - self.start

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if "loss" in (logs or {}):
                each(self.seconds, logs["loss"])

    prompt, chosen, rejected = pair(case)
    ids = torch.stack([torch.cat([prompt, chosen]), torch.cat([prompt, rejected])])
    answered = torch.zeros_like(ids)
    answered[:, len(prompt) :] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": answered}
    plain = Tokenizer(words.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    args = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=steps, optim="sgd",
        learning_rate=1e-6, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=not cuda, bf16=cuda, max_length=None, beta=BETA,
        use_liger_kernel=recipe in ("trl+liger", "trl+fa4"), gradient_checkpointing=recipe != "trainer",
    )  # fmt: skip
    model, reference = models(case, "flash_attention_4" if recipe == "trl+fa4" else "sdpa")
    row = {"prompt": "a", "chosen": "a", "rejected": "a"}
    kind, more = (DPOTrainer, {"stack": suited(case.context)}) if recipe == "trainer" else (trl.DPOTrainer, {})
    kind(
        model=model, ref_model=reference, args=args, processing_class=tokenizer, data_collator=lambda _: dict(inputs),
        train_dataset=Dataset.from_list([row] * 4), callbacks=[Clock()], **more,
    ).train()  # fmt: skip


def by_tree(case: Case, steps: int, each: Callable[[float, float], None]) -> None:
    cuda, stack = case.device.type == "cuda", suited(case.context)
    model, reference = models(case)
    run, beside = (ithaca.prepare(each, stack, device=case.device) for each in (model, reference))
    prompt, chosen, rejected = pair(case)
    ids = torch.cat([prompt, chosen, rejected])
    labels = ids.clone()
    labels[: len(prompt)] = -100
    documents = [(len(prompt), None), (len(chosen), 0), (len(rejected), 0)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        start = synchronized(cuda)
        optimizer.zero_grad()
        batch = run.shard(ids[None], labels=labels[None], documents=[documents])
        with torch.no_grad():
            other = run.by_document(batch, beside.logprobs(batch))[1:]
        ours = run.by_document(batch, run.logprobs(batch))[1:]  # the node of the prompt has no label
        lengths = torch.tensor([[len(chosen), len(rejected)]], device=case.device)
        losses, _ = preference_losses(ours[None], other[None], lengths, Preference(beta=BETA))
        losses.sum().backward()
        optimizer.step()
        each(synchronized(cuda) - start, float(losses.detach().sum()))


def synchronized(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def run_case(options: argparse.Namespace) -> None:
    """Prints a line of JSON after every step."""
    warnings.simplefilter("ignore")
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    case = Case(
        options.case, options.contexts[0], options.shape, options.layers or ALL_SHAPES[options.shape][1], device
    )

    def each(seconds: float, loss: float) -> None:
        peak = 0 if options.cpu else torch.cuda.max_memory_allocated()
        print("step " + json.dumps({"seconds": seconds, "loss": loss, "peak": peak}), flush=True)

    try:
        by_tree(case, options.steps, each) if options.case == "tree" else trained(
            case, options.case, options.steps, each
        )
    except Exception as error:
        print("step " + json.dumps({"failed": "out of memory" if out_of_memory(error) else brief(error)}), flush=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="llama32_1b")
    parser.add_argument("--layers", type=int, help="fewer than it has")
    parser.add_argument("--contexts", type=lambda text: [size(each) for each in text.split(",")], default="16K,32K,64K")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--case-seconds", type=float, default=120.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return run_case(options)
    recipes = options.recipes.split(",")
    if unknown := set(recipes) - set(RECIPES):
        parser.error(f"--recipes: {', '.join(sorted(unknown))} is not one of {', '.join(RECIPES)}")
    print(
        "| context | recipe | s a pair | tokens/s | peak GB | loss of the first step |\n|---|---|---:|---:|---:|---:|"
    )
    failed: set[str] = set()
    for context in options.contexts:
        for recipe in recipes:
            if recipe not in failed and (why := shown(options, context, recipe)):
                print(f"| {context:,} | {recipe} | {why} | | | |", flush=True)
                failed.add(recipe)


def shown(options: argparse.Namespace, context: int, recipe: str) -> str | None:
    """A row, or why there is none."""
    given = [sys.executable, __file__, "--case", recipe, "--contexts", str(context), "--shape", options.shape]
    given += ["--steps", str(options.steps)]
    given += ["--layers", str(options.layers)] if options.layers else []
    given += ["--cpu"] if options.cpu else []
    try:
        ended = subprocess.run(given, capture_output=True, text=True, timeout=options.case_seconds)
    except subprocess.TimeoutExpired:
        return f"no end within {options.case_seconds:.0f} s"
    steps = [json.loads(line.removeprefix("step ")) for line in ended.stdout.splitlines() if line.startswith("step ")]
    if failed := [step["failed"] for step in steps if "failed" in step]:
        sys.stderr.write(ended.stderr)
        return failed[0]
    if ended.returncode or len(steps) < options.steps:
        sys.stderr.write(ended.stderr)
        return f"ended with {ended.returncode} after {len(steps)} steps"
    seconds, peak = min(step["seconds"] for step in steps[1:] or steps), max(step["peak"] for step in steps) / 1e9
    rate = 2 * context / seconds  # of the two rows that the pair stands for
    print(f"| {context:,} | {recipe} | {seconds:.2f} | {rate:,.0f} | {peak:.1f} | {steps[0]['loss']:.6f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
