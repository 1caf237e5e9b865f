"""Configs on both sides of a plan: what a run's asks of it, and the Hugging Face config that a dry run builds a model from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..model.config import read_config
from .model import PRESETS


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


def preset_settings(name: str) -> dict[str, Any]:
    """A preset as Hugging Face's config takes it."""
    settings = dict(PRESETS[name])
    theta = settings.pop("rope_theta", None)
    return settings if theta is None else {**settings, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def hf_config(what: str) -> Any:
    from transformers import AutoConfig

    if what in PRESETS:
        settings = preset_settings(what)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    path = Path(what)
    return read_config(path if path.is_dir() else path.parent)
