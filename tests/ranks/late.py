"""Late on purpose: a stream sleeps before what is queued on it, so that whoever forgot to wait for it reads too early."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.verify.case import Case, Measured, Session

CYCLES = 4_000_000  # of the longest sleep: 2 ms on an H200, several kernels of a small model


class Late(TorchDispatchMode):
    """Every operation of torch and every collective passes here with the stream that it is queued on: compute, exchange or copy.

    A seed chooses which of them come late, which rank's host does, and by how much."""

    def __init__(self, seed: int, rank: int, world: int, share: float = 0.04) -> None:
        super().__init__()
        self.random = random.Random(1000 * seed + rank)
        self.share = share
        self.late_host = seed % (world + 1) == rank  # one rank in turn, and one seed of world + 1 none
        self.sleeps = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chance = self.random.random()
        if chance < self.share:
            self._sleep()
        result = func(*args, **(kwargs or {}))
        if chance > 1 - self.share:
            self._sleep()
        return result

    def _sleep(self) -> None:
        self.sleeps += 1
        if torch.cuda.is_available():
            torch.cuda._sleep(self.random.randrange(CYCLES))
        if self.late_host and self.random.random() < 0.1:
            time.sleep(0.005 * self.random.random())


def late_runs(case: Case, seeds: list[int], repeats: int = 3) -> tuple[float, dict[int, float], int]:
    """-> how far undelayed repeats are from each other, how far each delayed run is from the first, and the fewest sleeps of one.

    Distances are the largest over all gradients and the loss, relative to each one's norm."""
    session = Session(case)
    rank, data = session.run.mesh.world.rank, session.data()
    session.measure([data])  # kernels are compiled and tried before anything is compared
    plain = measure(session, data)
    spread = max(distance(measure(session, data), plain) for _ in range(repeats))
    distances, fewest = {}, 1 << 30
    for seed in seeds:
        late = Late(seed, rank, case.world)
        with late:
            delayed = measure(session, data)
        distances[seed] = distance(delayed, plain)
        fewest = min(fewest, late.sleeps)
    return spread, distances, fewest


def measure(session: Session, data: Any) -> Measured:
    measured = session.measure([data])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return measured


def distance(one: Measured, other: Measured) -> float:
    pairs = [(one.gradients[name], other.gradients[name]) for name in one.gradients] + [(one.loss, other.loss)]
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs if a is not None
    )
