"""TRL's SFTTrainer at 256K (ithaca docs trainers): torchrun --nproc-per-node 8 examples/sft_256k.py MODEL DATA.jsonl FOLDER

Without a GPU its ranks are processes on the CPU, to try it with a tiny model."""

import os
import sys

import torch
from datasets import load_dataset
from trl import SFTConfig

from ithaca import Stack
from ithaca.integrations import SFTTrainer


def main() -> None:
    model, data, folder = sys.argv[1:4]
    stack = Stack(ulysses=int(os.environ["WORLD_SIZE"]), recompute="keep_attention", store="host", tile=4096)
    more = {} if torch.cuda.is_available() else {"use_cpu": True, "dataloader_pin_memory": False}
    args = SFTConfig(
        folder, max_length=262_144, packing=True, per_device_train_batch_size=1, save_total_limit=2, **more
    )
    rows = load_dataset("json", data_files=data, split="train")
    trainer = SFTTrainer(model, args, train_dataset=rows, stack=stack)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
