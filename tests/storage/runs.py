"""Small training runs for the tests of checkpoints: a model, a stack, AdamW with groups and clipping."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import ithaca
from ithaca.engine.model.presets import preset_config
from ithaca.storage.checkpoint import load, save
from ithaca.storage.low_bit import wide_copy
from ithaca.verify.presets import add_lora, build


def tokens(step: int, rows: int = 4, length: int = 12) -> Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(step))


def tiny(preset: str = "llama3", *, seed: int = 0, lora: bool = False, **changes: Any) -> Any:
    model = build(preset_config(preset, **changes), seed=seed)
    return add_lora(model, seed=1) if lora else model


def started(preset: str = "llama3", stack: dict[str, Any] | None = None, **model: Any) -> tuple[ithaca.Run, Any]:
    """A run and its optimizer, with two groups."""
    run = ithaca.prepare(tiny(preset, **model), ithaca.Stack(**(stack or {})), device="cpu")
    trained = [p for p in run.model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return run, torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def train(run: ithaca.Run, optimizer: Any, steps: range, noise: bool = True) -> list[float]:
    """Losses of these steps. Data, learning rate and noise on the data depend on the step, or on the random states."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        ids = (tokens(step) + (shared_noise() if noise else 0)) % 257
        loss = run.loss(run.shard(ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shared_noise() -> int:
    """Draws from all random states; the same on all ranks, as they were seeded alike."""
    return int(torch.randint(0, 50, ())) + random.randrange(50) + int(numpy.random.randint(50))


def seeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def weights(run: ithaca.Run) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in run.model.named_parameters()}


def state_of(run: ithaca.Run, optimizer: Any) -> dict[str, Any]:
    """The optimizer's states, whole, by name."""
    names = {p: name for name, p in run.model.named_parameters()}
    return {
        f"{names[p]}.{key}": whole(wide_copy(value)).clone() if isinstance(value, Tensor) else value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def trained_and_saved(folder: str, preset: str = "llama3", stack: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two steps, a checkpoint, and two more. -> losses of the last two, weights, everything at the moment of the checkpoint"""
    model = {key: value for key, value in options.items() if key not in ("asynchronous", "moment")}
    run, optimizer = started(preset, stack, **model)
    seeded()
    train(run, optimizer, range(2))
    moment = {**weights(run), **state_of(run, optimizer)} if options.get("moment") else {}
    later = options.get("asynchronous", False)
    saving = save(Path(folder), run, optimizer, {"cursor": 24}, step=2, asynchronous=later)
    losses = train(run, optimizer, range(2, 4))  # while it is being written, if asynchronous
    assert (saving.path is None) == later
    saving.wait()
    return losses, weights(run), moment


def resumed(folder: str, preset: str = "llama3", stack: dict[str, Any] | None = None, **model: Any) -> Any:
    """Two more steps from the checkpoint, in a model that begins with other weights. -> losses, weights"""
    run, optimizer = started(preset, stack, **{"seed": 0 if model.get("lora") else 5, **model})
    extra = load(Path(folder), run, optimizer)
    assert extra == {"step": 2, "cursor": 24}
    return train(run, optimizer, range(2, 4)), weights(run)
