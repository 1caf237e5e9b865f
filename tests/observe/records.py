"""A record of a step, and the processes that several tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from ithaca.observe.record import StepRecord


def record(step: int = 1, **changes: Any) -> StepRecord:
    values: dict[str, Any] = dict(
        step=step, loss=2.5, lr=1e-5, grad_norm=0.8, tokens=step * 4096, samples=step, seconds=2.0, tokens_per_second=1024.0
    )  # fmt: skip
    return StepRecord(**{**values, **changes})


def start(code: str, *arguments: str, environment: dict[str, str] | None = None, **how: Any) -> subprocess.Popen:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**inherited, **(environment or {})}, **how)
