"""What a checkpoint says about its run, beside tensors: enough to build the model again and to know who wrote it."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..engine.run import Run


def describe_model(run: Run) -> dict[str, Any]:
    """What is needed to build the model again, without its weights."""
    config = run.decoder.config
    generation = getattr(run.decoder.model, "generation_config", None)
    adapters = {name: each.to_dict() for name, each in getattr(run.model, "peft_config", {}).items()}
    return {
        "class": type(run.decoder.model).__name__.removeprefix("FSDP"),
        "name_or_path": str(getattr(config, "_name_or_path", "") or ""),
        "config": json.loads(config.to_json_string(use_diff=False)),
        "generation_config": json.loads(generation.to_json_string()) if generation is not None else None,
        "adapters": json.loads(json.dumps(adapters, default=_simple)),
    }


def _simple(value: Any) -> Any:
    """PEFT's configs hold sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("ithaca", "torch", "transformers", "peft", "torchao"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
