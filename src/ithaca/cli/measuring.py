"""What verbs that take a while share: what `ithaca profile` and `ithaca ladder --measure` ask of the machine before they run
anything on it, and how they say that they are at work."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..base.exits import MEMORY, Failed
from ..base.units import format_bytes
from ..training.launch.environment import find_job


def say(line: str) -> None:
    """What goes on, beside what is printed for programs."""
    print(f"ithaca: {line}", file=sys.stderr, flush=True)


@contextmanager
def going_on(what: str, every: float = 15.0) -> Iterator[None]:
    """Say now and then that it does, so that nobody takes minutes of work for a hang."""
    begin, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(every):
            say(f"{what}: {time.monotonic() - begin:.0f} s so far")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not least <= value <= 1_000_000:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}, and at most 1,000,000")


def in_one_process(instead: str) -> None:
    """Refuse a job of several. instead: what this does by itself."""
    job = find_job(os.environ)
    if job is not None and job.world > 1:
        raise ValueError(
            f"a launcher started {job.world} processes, but this {instead}; start it without torchrun or srun"
        )


def on_cpu(options: argparse.Namespace) -> bool:
    """Whether to measure on the CPU: asked for, or for want of a GPU."""
    in_one_process("runs in one, as rank 0 of those that --gpus names")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says when it starts; read when torch is imported
    import torch

    if not options.cpu and not torch.cuda.is_available():
        say("there is no GPU here, so CPU tensors are measured")
    return options.cpu or not torch.cuda.is_available()


def limit_of(gpu: Any) -> int:
    """Bytes that the allocator may have, so that a larger GPU stands for the one that was named."""
    from ..planner.plan import CONTEXT

    return int(gpu.memory - CONTEXT)


def check_room(plan: Any, wanted: Any) -> None:
    """A GPU says by itself when it is full; a machine without one would swap for hours."""
    import psutil

    from ..observe.profiler.wanted import ROOM, expected

    if not wanted.cpu:
        return
    need = expected(plan, wanted, "cpu").memory.peak
    free = psutil.virtual_memory().available
    if need > ROOM * free:
        raise Failed(
            MEMORY,
            f"this would take {format_bytes(need)} of CPU tensors, and {format_bytes(free)} of memory are free; take a shorter "
            "--context or fewer --layers, or a machine with a GPU",
        )
