"""A loop of your own with Accelerate: torchrun --nproc-per-node 8 examples/accelerate_loop.py MODEL TEXT FOLDER 65536

Neither the model nor the data loader is given to `accelerator.prepare`: the stack shards the model, and every rank reads the whole
batch, of which `run.shard` takes its tokens. The optimizer and its schedule may be.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import ithaca

ROWS, ACCUMULATION = 1, 2


def main() -> list[float]:
    folder, text, out, context = *sys.argv[1:4], int(sys.argv[4])
    accelerator = Accelerator()
    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text())["input_ids"]
    loader = DataLoader(torch.tensor(ids[: len(ids) // context * context]).view(-1, context), batch_size=ROWS)  # pyright: ignore

    model = AutoModelForCausalLM.from_pretrained(folder)
    run = ithaca.prepare(model, ithaca.Stack(ulysses=accelerator.num_processes), device=accelerator.device.type)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))  # behind prepare: of the shards
    losses, stream = [], iter(loader)
    while batches := [run.shard(rows) for rows in islice(stream, ACCUMULATION)]:
        supervised = sum(batch.supervised for batch in batches)  # of the step: micro-batches may have unequal numbers
        losses.append(0.0)
        for batch in batches:
            loss = run.loss(batch, supervised=supervised)
            accelerator.backward(loss)
            losses[-1] += loss.item()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {losses[-1]:.4f}")
    model.save_pretrained(out)  # on every rank: rank 0 writes
    return losses


if __name__ == "__main__":
    main()
