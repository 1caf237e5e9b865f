"""What a person sees of a run, and what is written down about it.

`flops` counts arithmetic, `rates` time and memory; a `StepRecord` holds the numbers of a step, `Metrics` writes them, `Display`
shows them; `log_to` sends messages to their places, and `explain` puts an error on one screen. Light to import: no torch.
Only these names are for use elsewhere.
"""

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
