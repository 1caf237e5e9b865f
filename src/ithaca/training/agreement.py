"""What only one rank can know, agreed on by all between steps: a signal that one of them got, a file called SAVE, a save that one
has not finished writing. One small all-reduce a step. How long each rank worked alone (own_time.py) goes with it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import torch

from ..base.processes.signals import Stop
from ..base.run_folder import RunFolder
from ..engine.mesh import Group
from ..observe.rates import largest


@dataclass(frozen=True)
class Agreed:
    stop: str | None  # the signal that asks for it
    save: bool
    writing: bool  # a rank is still writing a checkpoint
    own: list[float]  # seconds of each rank


class Agreement:
    def __init__(self, folder: RunFolder, stop: Stop, world: Group, device: torch.device) -> None:
        self.folder, self.stop, self.world, self.device = folder, stop, world, device

    def after_step(self, writing: bool, own: float) -> Agreed:
        """Collective, as is `to_stop`."""
        rank, size = self.world.rank, self.world.size
        values = {
            "stop": self._signal,
            "save": float(rank == 0 and self.folder.wish.exists()),
            "writing": float(writing),
            **{f"own {index}": own if index == rank else -1.0 for index in range(size)},
        }
        agreed = largest(values, self.world, self.device)
        times = [agreed[f"own {index}"] for index in range(size)]
        return Agreed(_name(agreed["stop"]), bool(agreed["save"]), bool(agreed["writing"]), times)

    def to_stop(self) -> str | None:
        return _name(largest({"stop": self._signal}, self.world, self.device)["stop"])

    @property
    def _signal(self) -> float:
        return 0.0 if self.stop.name is None else float(signal.Signals[self.stop.name])


def _name(number: float) -> str | None:
    return signal.Signals(int(number)).name if number else None
