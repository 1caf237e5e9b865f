"""Late on purpose: a stream sleeps before what is queued on it, so that whoever forgot to wait for it reads too early."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import inf, isfinite
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.verify.case import Case, Measured, Session

BRIEF, LONG = (
    500_000,
    8_000_000,
)  # cycles of the longest sleeps: 0.3 and 4 ms on an H200; a small model's kernels take 0.01


class Late(TorchDispatchMode):
    """Every operation of torch and every collective passes here with the stream that it is queued on: compute, exchange or copy.

    A seed chooses which of them come late and by how much: every other one on the streams beside compute, which others wait for.
    One rank's host is late too. What a peer sends comes late by that."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        super().__init__()
        self.random = random.Random(1000 * seed + rank)
        self.late_host = seed % (world + 1) == rank  # one rank in turn, and one seed of world + 1 none
        self.sleeps = {"compute": 0, "beside": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._perhaps()
        result = func(*args, **(kwargs or {}))
        self._perhaps()
        return result

    def _perhaps(self) -> None:
        beside = torch.cuda.is_available() and torch.cuda.current_stream() != torch.cuda.default_stream()
        if self.random.random() > (0.5 if beside else 0.01):
            return
        self.sleeps["beside" if beside else "compute"] += 1
        if torch.cuda.is_available():
            torch.cuda._sleep(self.random.randrange(LONG if beside else BRIEF))
        if self.late_host and self.random.random() < 0.1:
            time.sleep(0.005 * self.random.random())


def late_runs(
    case: Case, seeds: list[int], repeats: int = 3, waiting: bool = True
) -> tuple[float, dict[int, float], dict[str, int]]:
    """-> how far undelayed repeats are from each other, how far each delayed run is from the first, and all sleeps.

    Distances are the largest over all gradients and the loss, relative to each one's norm. waiting: False = in delayed runs no
    stream waits for another."""
    session = Session(case)
    rank, data = session.run.mesh.world.rank, session.data()
    session.measure([data])  # kernels are compiled and tried before anything is compared
    plain = measure(session, data)
    spread = max(distance(measure(session, data), plain) for _ in range(repeats))
    distances, sleeps = {}, Counter[str]()
    for seed in seeds:
        late = Late(seed, rank, case.world)
        with late, nullcontext() if waiting else nobody_waits():
            delayed = measure(session, data)
        distances[seed] = distance(delayed, plain)
        sleeps.update(late.sleeps)
    return spread, distances, dict(sleeps)


@contextmanager
def nobody_waits() -> Iterator[None]:
    own = torch.cuda.Stream.wait_event, torch.cuda.Stream.wait_stream
    torch.cuda.Stream.wait_event = torch.cuda.Stream.wait_stream = lambda self, other: None
    try:
        yield
    finally:
        torch.cuda.Stream.wait_event, torch.cuda.Stream.wait_stream = own


def measure(session: Session, data: Any) -> Measured:
    measured = session.measure([data])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return measured


def distance(one: Measured, other: Measured) -> float:
    pairs = [(one.gradients[name], other.gradients[name]) for name in one.gradients] + [(one.loss, other.loss)]
    apart = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs if a is not None
    ]
    return max(apart) if all(map(isfinite, apart)) else inf
