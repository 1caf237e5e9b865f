"""The Hugging Face config of what a plan was made for: the dry run builds a model from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..model.config import read_config
from .model import PRESETS


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
