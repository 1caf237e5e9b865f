"""Random states of Python, numpy and torch, as JSON.

A run that is resumed on as many ranks as it was saved on draws the same numbers as if it had not stopped: each rank gets its own
states back. On another number of ranks there is no such thing as the same numbers; each rank is then seeded by a hash
of (seed, step, rank), so that the resumed run is at least repeatable.
"""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy
import torch


def capture(device: torch.device) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": _text(bytes(torch.get_rng_state().numpy())),
        "python": [version, _text(numpy.array(numbers, dtype="<u8").tobytes()), gauss],
        "numpy": [
            str(kind),
            _text(numpy.asarray(keys).astype("<u4").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if device.type == "cuda":
        states["cuda"] = _text(bytes(torch.cuda.get_rng_state(device).numpy()))
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """ValueError if these are no states: they come from a file."""
    try:
        _restore(states, device)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the random states cannot be restored: {error}") from None


def _restore(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    values = numpy.frombuffer(base64.b64decode(numbers), dtype="<u8")
    random.setstate((version, tuple(int(value) for value in values), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached))
    if device.type == "cuda":
        if "cuda" in states:
            torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
        else:  # saved without a GPU
            torch.cuda.manual_seed(torch.initial_seed())


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed everything from where a run stands."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "little")
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # CUDA too


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
