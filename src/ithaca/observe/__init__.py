"""What a person sees of a run, and what is written down about it.

`flops` counts arithmetic, `rates` time and memory; a `StepRecord` holds the numbers of a step, `Metrics` writes them, `Display`
shows them; `log_to` sends messages to their places, and `explain` puts an error on one screen. Light to import: no torch, and rich
only with what draws. Only these names are for use elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .display import Display
    from .flops import mfu, model_flops, peak_flops
    from .logs import explain, log_to
    from .metrics import Metrics, read_metrics
    from .rates import Gauge, StepTimer, largest, tokens_per_second
    from .record import StepRecord
    from .text import Facts, headline, plain_line

__all__ = [
    "Display",
    "Facts",
    "Gauge",
    "Metrics",
    "StepRecord",
    "StepTimer",
    "explain",
    "headline",
    "largest",
    "log_to",
    "mfu",
    "model_flops",
    "peak_flops",
    "plain_line",
    "read_metrics",
    "tokens_per_second",
]

_WHERE = {
    "display": ("Display",),
    "flops": ("mfu", "model_flops", "peak_flops"),
    "logs": ("explain", "log_to"),
    "metrics": ("Metrics", "read_metrics"),
    "rates": ("Gauge", "StepTimer", "largest", "tokens_per_second"),
    "record": ("StepRecord",),
    "text": ("Facts", "headline", "plain_line"),
}


def __getattr__(name: str) -> Any:
    # a plan asks for the table of peaks, and must not need what draws a run
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
