"""Small models, batches and reference numbers for the contract tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ithaca
from ithaca.engine.model.presets import preset_config
from ithaca.verify.case import full_gradients
from ithaca.verify.presets import build

VOCABULARY = 257


def tiny(preset: str = "llama3", **changes: Any) -> Any:
    """A preset's model: two layers, the same weights on every rank."""
    return build(preset_config(preset, **changes), seed=0)


def meta(preset: str = "llama3", **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(preset_config(preset, **changes))


def prepared(preset: str | nn.Module = "llama3", **stack: Any) -> ithaca.Run:
    """A model under a stack, on CPU wherever the tests run."""
    model = tiny(preset) if isinstance(preset, str) else preset
    return ithaca.prepare(model, ithaca.Stack(**stack), device="cpu")


def tokens(rows: int = 1, length: int = 48, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(run: ithaca.Run) -> dict[str, Tensor]:
    """Whole gradients by name, of those parameters that have one."""
    return {name: grad for name, grad in full_gradients(run.model).items() if grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative error among gradients of the same names."""
    assert ours.keys() == theirs.keys()
    sizes = {name: float(g.norm()) for name, g in theirs.items()}
    assert all(size > 0 or float(ours[name].norm()) == 0 for name, size in sizes.items())
    return max(float((ours[name] - g).norm()) / sizes[name] for name, g in theirs.items() if sizes[name])


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # pyright: ignore
