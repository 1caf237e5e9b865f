"""Which kernel a layer gets, decided once.

Asked for by name, a backend that cannot do the job is an error; "auto" takes the first that can. Nothing falls back
silently, and what was chosen is logged once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from .backends import BACKENDS
from .kernel import Kernel

log = logging.getLogger("ithaca")


@dataclass(frozen=True)
class Need:
    """What a layer asks of a kernel."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    windowed: bool = False


@dataclass
class Kernels:
    """The backends of one run, made once, with the answers already given."""

    name: str  # "auto" or a backend's name
    chosen: dict[Need, Kernel] = field(default_factory=dict)
    made: dict[str, Kernel] = field(default_factory=dict)

    def resolve(self, need: Need) -> Kernel:
        if need not in self.chosen:
            self.chosen[need] = self._resolve(need)
            windows = " with a sliding window" if need.windowed else ""
            log.info("attention kernel%s: %s (asked for: %s)", windows, self.chosen[need].name, self.name)
        return self.chosen[need]

    def _resolve(self, need: Need) -> Kernel:
        names = list(BACKENDS) if self.name == "auto" else [self.name]
        reasons = []
        for name in names:
            kernel = self.made.setdefault(name, BACKENDS[name]())
            reason = kernel.problem(need.device, need.dtype, need.head_dim, need.windowed)
            if reason is None:
                return kernel
            reasons.append(f"{name}: {reason}")
        what = f"head_dim={need.head_dim}, {str(need.dtype).removeprefix('torch.')}, {need.device.type}"
        what += ", sliding window" if need.windowed else ""
        remedy = (
            "use attention='auto'"
            if self.name != "auto"
            else "see the reasons; bf16 on an NVIDIA GPU of Ampere or later works"
        )
        raise ValueError(f"no attention kernel for {what}; {'; '.join(reasons)}; remedy: {remedy}")
