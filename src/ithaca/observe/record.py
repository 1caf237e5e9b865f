"""One logged step: the fields of a line of metrics.jsonl, named and meant as in docs/run_folder.md.

The file, the trackers and the display all show the same record, so they cannot disagree.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int  # optimizer steps done
    loss: float  # mean over all supervised tokens of the step, on all ranks
    lr: float
    grad_norm: float  # over all parameters, before clipping
    tokens: int  # real tokens trained on so far
    samples: int  # rows trained on so far
    seconds: float
    tokens_per_second: float  # per GPU, or per process on the CPU
    mfu: float | None = None  # None where the peak is not known
    gpu_peak: int | None = None  # bytes, largest over ranks; None on the CPU
    host_peak: int = 0  # bytes of the store in host memory, largest over ranks
    disk_peak: int = 0  # bytes of the store on disk, largest over ranks
    copy_wait: float = 0.0  # seconds that computation waited for the store
    eval_loss: float | None = None  # of an evaluation after this step

    def line(self) -> dict[str, Any]:
        """The fields as metrics.jsonl has them: with the time, and eval_loss only after an evaluation."""
        values = asdict(self)
        if self.eval_loss is None:
            del values["eval_loss"]
        return {"step": values.pop("step"), "time": utc_now(), **values}


def check_finite(values: Mapping[str, Any]) -> None:
    """JSON has neither NaN nor infinity, and a run stops before it could write one."""
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            where = f" of step {values['step']}" if "step" in values else ""
            raise ValueError(f"{name}{where} is {value}; metrics are finite, so stop the run before this is written")


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
