"""Configs on both sides of a plan: what a run's asks of it, and the Hugging Face config that a dry run builds a model from."""

from __future__ import annotations

from typing import Any

from ..base.hub import folder
from ..config.schema import Config
from ..engine.model.config import read_config
from ..engine.model.presets import PRESETS, preset_config


def requested(config: Config) -> dict[str, Any]:
    """The arguments of `plan` that a run's config has, beside model, GPUs and stack. Every setting that changes memory or time is
    here, or in those; a test walks the schema."""
    train, lora, checkpoint = config.train, config.model.lora, config.checkpoint
    adapters = {} if lora is None else {"lora": lora.rank, "lora_targets": lora.targets}
    return {
        "context": config.data.context,
        "rows": train.rows,
        "accumulation": train.accumulation,
        "optimizer": train.optimizer,
        "offload_optimizer": train.offload_optimizer,
        "deterministic": train.deterministic,
        # the last one is waited for
        "asynchronous": checkpoint.asynchronous and checkpoint.every is not None and checkpoint.every < train.steps,
        **adapters,
    }


def hf_config(what: str) -> Any:
    if what in PRESETS:
        return preset_config(what)
    path = folder(what)
    return read_config(path if path.is_dir() else path.parent)
