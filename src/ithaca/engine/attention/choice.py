"""Which kernel a layer gets, decided once.

Asked for by name, a backend that cannot do the job is an error; "auto" takes the first that can. Nothing falls back
silently, and what was chosen is logged once. A plan for this machine asks here too (`kernels_here`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from .backends import BACKENDS
from .kernel import Kernel
from .scan import MixerKernels

log = logging.getLogger("ithaca")


@dataclass(frozen=True)
class Need:
    """What a layer asks of a kernel."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    windowed: bool = False
    softcapped: bool = False
    value_dim: int | None = None  # of v, None = head_dim

    @property
    def extras(self) -> list[str]:
        """What is not in every layer, in words."""
        other = self.value_dim not in (None, self.head_dim)
        said = {"a sliding window": self.windowed, "a soft cap": self.softcapped, f"value_dim={self.value_dim}": other}
        return [words for words, holds in said.items() if holds]


@dataclass
class Kernels:
    """The backends of one run, made once, with the answers already given."""

    name: str  # "auto" or a backend's name
    chosen: dict[Need, Kernel] = field(default_factory=dict)
    made: dict[str, Kernel] = field(default_factory=dict)
    mixers: MixerKernels = field(default_factory=MixerKernels)

    def resolve(self, need: Need) -> Kernel:
        if need not in self.chosen:
            self.chosen[need] = self._resolve(need)
            kind = f" with {' and '.join(need.extras)}" if need.extras else ""
            log.info("attention kernel%s: %s (asked for: %s)", kind, self.chosen[need].name, self.name)
        return self.chosen[need]

    def _resolve(self, need: Need) -> Kernel:
        names = list(BACKENDS) if self.name == "auto" else [self.name]
        reasons = []
        for name in names:
            kernel = self.made.setdefault(name, BACKENDS[name]())
            reason = kernel.problem(
                need.device, need.dtype, need.head_dim, need.windowed,
                softcapped=need.softcapped, value_dim=need.value_dim,
            )  # fmt: skip
            if reason is None:
                if kernel.name == "math" and reasons:
                    log.log(
                        logging.INFO if need.device.type == "cpu" else logging.WARNING,
                        "attention kernel math, by plain matrix products, is slow; others: %s",
                        "; ".join(reasons),
                    )
                return kernel
            reasons.append(f"{name}: {reason}")
        what = f"head_dim={need.head_dim}, {str(need.dtype).removeprefix('torch.')}, {need.device.type}"
        what = ", ".join([what, *need.extras])
        remedy = (
            "use attention='auto'"
            if self.name != "auto"
            else "see the reasons; bf16 on an NVIDIA GPU of Ampere or later works"
        )
        raise ValueError(f"no attention kernel for {what}; {'; '.join(reasons)}; remedy: {remedy}")


def kernels_here(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, kinds: Collection[bool] = (False,)
) -> tuple[str, str]:
    """What a run on this machine attends with, in layers that see everything and in those with a window. The same choice as
    `prepare` makes, so asking loads and tries the kernels. kinds: of the model's layers, whether they have a window."""
    kernels = Kernels(name)
    whole, windowed = (
        kernels._resolve(Need(device, dtype, head_dim, kind)).name if kind in kinds else "" for kind in (False, True)
    )
    return whole, windowed
