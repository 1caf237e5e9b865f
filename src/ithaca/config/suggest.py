"""What the user may have meant: the same name in another section, a close spelling, or another trainer's word for it."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from functools import cache

from .option import kinds
from .schema import Config

# Words of other trainers (transformers, axolotl, torchtitan, TRL) for our fields.
WORDS = {
    "seq_len": "data.context", "max_seq_len": "data.context", "max_seq_length": "data.context",
    "sequence_len": "data.context", "sequence_length": "data.context", "max_length": "data.context",
    "cutoff_len": "data.context", "block_size": "data.context", "context_length": "data.context",
    "learning_rate": "train.lr", "max_steps": "train.steps", "num_steps": "train.steps", "training_steps": "train.steps",
    "batch_size": "train.rows", "global_batch_size": "train.rows", "micro_batch_size": "train.accumulation",
    "gradient_accumulation_steps": "train.accumulation", "gradient_accumulation": "train.accumulation",
    "warmup_steps": "train.warmup", "warmup_ratio": "train.warmup", "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule", "max_grad_norm": "train.clip", "max_norm": "train.clip",
    "grad_clip": "train.clip", "adam_epsilon": "train.eps", "wd": "train.weight_decay",
    "model_name_or_path": "model.folder", "model_path": "model.folder", "base_model": "model.folder",
    "name_or_path": "model.folder", "precision": "model.dtype", "lora_r": "model.lora.rank", "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha", "target_modules": "model.lora.targets", "lora_target_modules": "model.lora.targets",
    "rope_scaling": "model.rope", "rope_parameters": "model.rope", "theta": "model.rope.rope_theta",
    "type": "model.rope.rope_type", "output_dir": "run.folder", "dump_folder": "run.folder", "run_name": "run.name",
    "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep_last", "keep_latest_k": "checkpoint.keep_last",
    "num_epochs": "train.epochs", "num_train_epochs": "train.epochs", "early_stopping_patience": "eval.stop_after",
    "early_stopping_threshold": "eval.improvement", "load_best_model_at_end": "eval.keep_best",
    "metric_for_best_model": "eval.metric", "mlflow_experiment_name": "log.mlflow", "decay_steps": "train.decay",
    "eval_steps": "eval.every", "logging_steps": "log.every", "wandb_project": "log.wandb", "datasets": "data.sources",
    "dataset": "data.sources", "dataset_path": "data.sources", "cp": "stack.ulysses", "context_parallel": "stack.ulysses",
    "context_parallel_degree": "stack.ulysses", "sequence_parallel_size": "stack.ulysses", "ring_attn": "stack.ring",
    "activation_checkpointing": "stack.recompute", "gradient_checkpointing": "stack.recompute",
    "activation_offloading": "stack.store", "nproc_per_node": "launch.workers", "nnodes": "launch.nodes",
}  # fmt: skip


@cache
def paths() -> tuple[str, ...]:
    """Every key of the config with its sections: train, train.steps, ...; items of lists as data.sources[].path."""
    return tuple(_paths(Config, ""))


def _paths(cls: type, prefix: str):
    for field in fields(cls):
        path, kind = prefix + field.name, kinds(cls)[field.name]
        yield path
        if kind.section is not None:
            yield from _paths(kind.section, path + ".")
        elif kind.items and kind.items[0].section is not None:
            yield from _paths(kind.items[0].section, path + "[].")


def unknown(path: str, siblings: list[str]) -> str:
    """The message for a key that does not exist; siblings: the names its section has."""
    parent, _, name = path.rpartition(".")
    matches = _meant(parent, name, siblings)
    if matches:
        return f"unknown key {path}; did you mean {_or(matches)}?"
    here = f"{parent} has" if parent else "there are"
    return f"unknown key {path}; {here} {', '.join(siblings)}"


def _meant(parent: str, name: str, siblings: list[str]) -> list[str]:
    here = f"{parent}." if parent else ""
    very_close = get_close_matches(name, siblings, n=1, cutoff=0.8)
    if very_close:
        return [here + very_close[0]]
    if name in WORDS:
        return [WORDS[name]]
    elsewhere = [path for path in paths() if path.rpartition(".")[2] == name and "." in path]
    if elsewhere:  # items of lists only where nothing else has the name
        return ([path for path in elsewhere if "[]" not in path] or elsewhere)[:3]
    close = get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return [here + close[0]]
    names = {path.rpartition(".")[2]: path for path in reversed(paths())}
    return [names[match] for match in get_close_matches(name, [*names], n=1, cutoff=0.8)]


def close_choice(text: str, choices: tuple[str, ...]) -> str:
    """'; did you mean cosine?' or nothing."""
    matches = get_close_matches(text, choices, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
