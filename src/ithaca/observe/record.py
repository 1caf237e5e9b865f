"""One logged step: the fields of a line of metrics.jsonl, named and meant as in docs/reference/run_folder.md.

The file, the trackers and the display all show the same record, so they cannot disagree.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any


@dataclass(frozen=True)
class Shown:
    """How a number is shown. A new metric is a field of StepRecord that says so, and a line of training/trainer.py."""

    label: str  # in the panel
    column: str  # of the panel: learning, speed or room
    form: str  # how it is written: a name of text.FORMS
    short: str | None = None  # its key in a line of text; None = not there
    chart: str | None = None  # its title in the report; None = no chart of its own
    kind: str = "number"  # of number, in that chart


def _shown(*given: str, **more: Any) -> Any:
    default = {name: more.pop(name) for name in ("default",) if name in more}
    return field(metadata={"shown": Shown(*given, **more)}, **default)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int  # optimizer steps done
    loss: float = _shown(
        "loss", "learning", "loss", "loss"
    )  # mean over all supervised tokens of the step, on all ranks
    lr: float = _shown("learning rate", "learning", "scientific", "lr", chart="Learning rate")
    # over all parameters, before clipping
    grad_norm: float = _shown("gradient norm", "learning", "number", "grad", chart="Gradient norm")
    tokens: int  # real tokens trained on so far
    samples: int  # rows trained on so far
    tokens_per_second: float = _shown("tokens/s/GPU", "speed", "rate", "tok/s")  # per GPU, or per process on the CPU
    mfu: float | None = _shown("MFU", "speed", "share", "mfu", default=None)  # None where the peak is not known
    seconds: float = _shown("step time", "speed", "duration")
    # bytes, largest over ranks; None on the CPU
    gpu_peak: int | None = _shown("GPU peak", "room", "size", "gpu", default=None)
    host_peak: int = _shown(
        "host", "room", "size", "host", default=0
    )  # bytes of the store in host memory, largest over ranks
    disk_peak: int = _shown("disk", "room", "size", "disk", default=0)  # bytes of the store on disk, largest over ranks
    # seconds that computation waited for the store
    copy_wait: float = _shown(
        "copy wait", "speed", "duration", "wait", default=0.0, chart="Waiting for copies", kind="seconds"
    )
    eval_loss: float | None = None  # of an evaluation after this step

    @classmethod
    def shown(cls) -> dict[str, Shown]:
        """By the name of the field."""
        return {metric.name: metric.metadata["shown"] for metric in fields(cls) if "shown" in metric.metadata}

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
