"""Small runs of real trainers, with a stack and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ithaca

from ..contract.tiny import VOCABULARY, tiny, whole

ROWS = 4  # of a micro-batch, over all data-parallel groups
ACCUMULATION = 2
PAD = 0


@contextmanager
def launched() -> Iterator[int]:
    """This worker as torchrun would have started it, for Accelerate, which looks at the environment. -> world size"""
    from accelerate.state import AcceleratorState, GradientState

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    local = rank % (torch.cuda.device_count() or world)  # ranks may share a GPU
    said = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = dict(os.environ)
    if world > 1:
        os.environ.update({name: str(value) for name, value in said.items()})
    try:
        yield world
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Of unequal lengths, with a masked beginning; one has no label at all."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(6, 25, (), generator=random))
        ids = torch.randint(1, VOCABULARY, (length,), generator=random).tolist()
        hidden = length if i == 5 else int(torch.randint(0, 5, (), generator=random))
        made.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return made


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(example["input_ids"]) for example in examples)

    def fill(name: str, value: int) -> Tensor:
        return torch.tensor([[*example[name], *[value] * (length - len(example[name]))] for example in examples])

    mask = [[1] * len(e["input_ids"]) + [0] * (length - len(e["input_ids"])) for e in examples]
    return {"input_ids": fill("input_ids", PAD), "labels": fill("labels", -100), "attention_mask": torch.tensor(mask)}


def settings(folder: str, world: int, stack: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """What TrainingArguments takes. Rows of a batch are the same on any number of ranks."""
    context = 1 if stack is None else ithaca.Stack(**stack).context_ranks
    each = ROWS // (world // context)
    return dict(
        output_dir=folder, per_device_train_batch_size=each, per_device_eval_batch_size=each,
        gradient_accumulation_steps=ACCUMULATION, max_steps=20, learning_rate=5e-3, weight_decay=0.1, max_grad_norm=0.5,
        adam_epsilon=1e-5,  # Adam takes gradients of mere rounding for a direction, and would go another way
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, seed=3,
        dataloader_pin_memory=False,
    ) | changes  # fmt: skip


def small(preset: str = "llama3", **changes: Any) -> Any:
    return tiny(preset, num_hidden_layers=1, **changes)


def hf_trainer(folder: str, world: int, stack: dict[str, Any] | None, **changes: Any) -> Any:
    import transformers

    from ithaca.integrations import Trainer

    args = transformers.TrainingArguments(**settings(folder, world, stack, **changes))
    common = dict(model=small(), args=args, data_collator=padded, train_dataset=rows(38), eval_dataset=rows(7, seed=1))
    return transformers.Trainer(**common) if stack is None else Trainer(**common, stack=ithaca.Stack(**stack))


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: whole(value).detach().clone() for name, value in trainer.model.state_dict().items()}


def train(
    make: Any, folder: str, stack: dict[str, Any] | None, resume: str | None = None, **changes: Any
) -> dict[str, Any]:
    """What a run logged and became."""
    with launched() as world:
        trainer = make(folder, world, stack, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return {
            "loss": logged(trainer, "loss"),
            "norm": logged(trainer, "grad_norm"),
            "eval": [trainer.evaluate()["eval_loss"]],
            "rate": logged(trainer, "learning_rate"),
            "weights": parameters(trainer),
            "files": sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else [],
        }


def tokenizer() -> Any:
    """Words w1, w2, ... of the tiny models' vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts of words, and answers of unequal lengths."""
    random = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=random))
        return "".join(f" w{i}" for i in torch.randint(2, VOCABULARY, (length,), generator=random).tolist())

    return [{"prompt": words(1, 6), "chosen": words(1, 9), "rejected": words(1, 9)} for _ in range(count)]


def other(model: Any) -> Any:
    """Near the model, but not it: a reference from which the first step already differs."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=random)
    return model


def dpo_trainer(
    folder: str, world: int, stack: dict[str, Any] | None, reference: str = "model", saved: str = "",
    preset: str = "llama3", **changes: Any,
) -> Any:  # fmt: skip
    """reference: a "model" of its own, "adapters" switched off, "before" the first step, or what was saved, loaded "again"."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from ithaca.integrations import DPOTrainer

    changes = {"max_length": 32, "precompute_ref_log_probs": reference == "before"} | changes
    common: dict[str, Any] = dict(
        model=AutoModelForCausalLM.from_pretrained(saved) if saved else small(preset),
        args=trl.DPOConfig(**settings(folder, world, stack, **changes)), processing_class=tokenizer(),
        ref_model=other(small(preset)) if reference == "model" else None,
        train_dataset=Dataset.from_list(pairs(19)), eval_dataset=Dataset.from_list(pairs(7, seed=1)),
    )  # fmt: skip
    if reference == "adapters":
        from peft import LoraConfig

        common["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return trl.DPOTrainer(**common) if stack is None else DPOTrainer(**common, stack=ithaca.Stack(**stack))


def sft_trainer(
    folder: str, world: int, stack: dict[str, Any] | None, lora: bool = False, preset: str = "llama3", **changes: Any
) -> Any:
    import trl
    from datasets import Dataset

    from ithaca.integrations import SFTTrainer

    changes = {"max_length": 32, "gradient_checkpointing": stack is not None} | changes  # on by default in TRL
    common: dict[str, Any] = dict(
        model=small(preset), args=trl.SFTConfig(**settings(folder, world, stack, **changes)), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(rows(38)), eval_dataset=Dataset.from_list(rows(7, seed=1)),
    )  # fmt: skip
    if lora:
        from peft import LoraConfig

        common["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return trl.SFTTrainer(**common) if stack is None else SFTTrainer(**common, stack=ithaca.Stack(**stack))
