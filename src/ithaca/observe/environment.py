"""Where a run ran: what somebody else needs to know to get the same numbers, written beside them (about.json)."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib import metadata
from typing import Any

from .. import __version__
from ..base.redact import redacted
from .record import utc_now

PACKAGES = (
    "torch", "transformers", "numpy", "safetensors", "accelerate", "peft", "triton", "flash-attn-4", "torchao", "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12",
)  # fmt: skip


def environment(device: str, world: int, nodes: int = 1) -> dict[str, Any]:
    """device: what a rank computes on. The command is that of this process, without secrets."""
    import psutil
    import torch

    return {
        "time": utc_now(),
        "command": redacted(shlex.join(["ithaca", *sys.argv[1:]] if sys.argv[0].endswith("__main__.py") else sys.argv)),
        "folder": os.getcwd(),
        "host": platform.node(),
        "device": device,
        "ranks": world,
        "nodes": nodes,
        "system": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "cuda": torch.version.cuda,
        "versions": {"ithaca": __version__, "python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    """Those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
