"""A profile: what was measured beside what was planned, as the object that profile.json holds (docs/guides/profile.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from ...engine.model.sizes import ModelSizes
from ...planner.plan import Plan
from .measure import Measured
from .wanted import Wanted, expected, tensors

KERNELS = 200  # by time; the rest is microseconds
WITHOUT_GPU = (
    "torch's memory snapshot, and its count to check ours against",
    "the memory that kernels take inside (workspace), the allocator's slack and the CUDA context",
    "copies beside computation: on a CPU a copy is waited for",
    "the kernels of a GPU: attention, loss and norms run in the CPU's own, which hold other tensors",
)


@dataclass
class Profile:
    wanted: Wanted
    measured: Measured
    planned: Plan  # of what was run
    whole: ModelSizes  # of which a few layers may have been run

    @classmethod
    def of(cls, wanted: Wanted, measured: Measured, plan: Plan) -> Profile:
        return cls(wanted, measured, expected(plan, wanted, measured.kernels_of), plan.model)

    @property
    def gpu(self) -> bool:
        return not self.wanted.cpu

    @property
    def peak(self) -> int:
        return self.measured.account.peak

    @property
    def expected(self) -> dict[str, dict[str, int]]:
        return tensors(self.planned)

    @property
    def expected_peak(self) -> int:
        return self.planned.allocated

    @property
    def seconds(self) -> float:
        return median(step["seconds"] for step in self.measured.steps if step["seconds"] is not None)

    @property
    def tokens_per_second(self) -> float:
        return self.measured.tokens / self.seconds

    @property
    def allocated(self) -> int | None:
        """By torch, in steps that nobody watched."""
        return max((step["peak"] for step in self.measured.steps if step["peak"] is not None), default=None)  # pyright: ignore

    @property
    def copies(self) -> dict[str, Any] | None:
        store = self.measured.store
        if not store.bytes_out:
            return None
        traced = self.measured.copies
        return {
            "seconds": store.copy_seconds, "exposed": store.exposed_seconds, "bytes_out": store.bytes_out,
            "bytes_in": store.bytes_in, "to": store.kind,
            "traced": None if traced is None else {"seconds": traced[0], "alone": traced[1]},
        }  # fmt: skip

    @property
    def missing(self) -> list[str]:
        return [] if self.gpu else list(WITHOUT_GPU)

    def json(self) -> dict[str, Any]:
        plan, account, measured = self.planned.json(), self.measured.account, self.measured
        speed = self.planned.predicted if self.gpu else None
        return {
            "profile": 1,
            "model": self.whole.json(),
            "hardware": plan["hardware"],
            "device": measured.device,
            "torch": torch.__version__,
            "rank_of": self.wanted.job.world,
            "layers": self.planned.model.layers,
            "states": self.wanted.states,
            "context": self.wanted.job.context,
            "rows": self.wanted.job.rows,
            "stack": asdict(self.planned.stack),
            "kernel": measured.kernels_of,
            "peak": account.peak,
            "peak_phase": account.peak_phase,
            "categories": account.categories,
            "phases": account.phases,
            "allocated": {"counted": measured.allocated, "steps": self.allocated} if self.gpu else None,
            "around": measured.around or None,
            "planned": {
                "peak": self.expected_peak,
                "peak_phase": self.planned.memory.peak_phase,
                "phases": self.expected,
                "step": speed and speed.seconds,
                "tokens_per_second": speed and speed.tokens_per_second,
            },
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "busy": measured.busy,
            "copies": self.copies,
            "steps": measured.steps,
            "modules": [{"name": name, "bytes": nbytes} for name, nbytes in account.modules],
            "lines": [{"where": where, "bytes": nbytes} for where, nbytes in account.lines],
            "kernels": measured.kernels[:KERNELS],
            "timeline": account.timeline,
            "files": measured.files,
            "missing": self.missing,
        }
