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


NUMBERS = ("chosen_reward", "rejected_reward", "margin", "accuracy", "ratio", "clipped", "kl", "entropy")
"""Fields that only some objectives have."""


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
    )  # bytes of the store in host memory, what a disk store keeps near among them; largest over ranks
    disk_peak: int = _shown("disk", "room", "size", "disk", default=0)  # bytes of the store on disk, largest over ranks
    # seconds that computation waited for the store
    copy_wait: float = _shown(
        "copy wait", "speed", "duration", "wait", default=0.0, chart="Waiting for copies", kind="seconds"
    )
    # of pairs, the means of the step: β times the log-ratio to the reference, by how much that of the chosen answer is the larger,
    # and how often it is
    chosen_reward: float | None = _shown("chosen reward", "learning", "number", default=None)
    rejected_reward: float | None = _shown("rejected reward", "learning", "number", default=None)
    margin: float | None = _shown("margin", "learning", "number", "margin", default=None, chart="Reward margin")
    accuracy: float | None = _shown("accuracy", "learning", "share", "acc", default=None, chart="Preference accuracy")
    # of completions, the means over the tokens of the step: π / π_old, the share that is clipped, the divergence from the
    # reference, and the entropy of what is predicted
    ratio: float | None = _shown("ratio", "learning", "number", default=None, chart="Ratio to who sampled")
    clipped: float | None = _shown("clipped", "learning", "share", default=None, chart="Clipped tokens")
    kl: float | None = _shown("KL", "learning", "number", "kl", default=None, chart="Divergence from the reference")
    entropy: float | None = _shown("entropy", "learning", "number", "entropy", default=None, chart="Entropy")
    eval_loss: float | None = None  # of an evaluation after this step

    @classmethod
    def shown(cls) -> dict[str, Shown]:
        """By the name of the field."""
        return {metric.name: metric.metadata["shown"] for metric in fields(cls) if "shown" in metric.metadata}

    @classmethod
    def shown_of(cls, record: StepRecord | None) -> dict[str, Shown]:
        """The same without what only other objectives have."""
        lacks = [name for name in NUMBERS if record is None or getattr(record, name) is None]
        return {name: shown for name, shown in cls.shown().items() if name not in lacks}

    def line(self) -> dict[str, Any]:
        """The fields as metrics.jsonl has them: with the time, eval_loss only after an evaluation, and those of an objective only
        where it is the run's."""
        values = asdict(self)
        for name in ("eval_loss", *NUMBERS):
            if values[name] is None:
                del values[name]
        return {"step": values.pop("step"), "time": utc_now(), **values}


def check_finite(values: Mapping[str, Any]) -> None:
    """JSON has neither NaN nor infinity, and a run stops before it could write one."""
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            where = f" of step {values['step']}" if "step" in values else ""
            raise ValueError(f"{name}{where} is {value}; metrics are finite, so stop the run before this is written")


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
