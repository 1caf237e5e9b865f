"""One interface for every attention kernel, and the choice among them.

A kernel attends q [B, H, Sq, D] to k, v [B, K, Sk, D] (H a multiple of K, query head h using KV head h // (H/K)) and always
returns the output and the log-sum-exp of each row, [B, H, Sq] in float32. Its backward is explicit: it takes dout, out and
lse from outside. That is what lets a caller keep out and lse and skip the forward in backward, merge partial results of a
ring, or tile the queries: with the *final* out and lse, the gradients of any block of the score matrix are exact by themselves.

Only two shapes of mask exist here, because every mask we support is a sum of them (segments.py): a causal square, and a full
rectangle. Both may carry a window: with rows and columns aligned at the lower right corner, key j is seen by query i
if i + (Sk - Sq) - j <= window.

`resolve` picks the backend once per layer. Asked for by name, a backend that cannot do the job is an error; "auto" takes
the first that can. Nothing falls back silently.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("ithaca")


@dataclass
class Calls:
    """How often a kernel ran. Tests prove by it what was *not* computed again."""

    forward: int = 0
    backward: int = 0


class Kernel(Protocol):
    name: str
    packed: bool  # can attend many causal documents in one call
    calls: Calls

    def problem(self, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> str | None:
        """Why this kernel cannot do the job, or None."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None) -> tuple: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal, scale, window
    ) -> tuple: ...


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
        from .backends import BACKENDS

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
