"""Whose log-probabilities a policy is compared with, where it is the model itself without its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The base model behind PEFT adapters. Gradients must not be asked for inside."""
    if not hasattr(model, "disable_adapter"):
        raise ValueError(
            "the model has no PEFT adapters that could be switched off for a reference; wrap it with peft.get_peft_model, or "
            "prepare a reference of its own"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with model.disable_adapter():
        # PEFT freezes them. In its first forward FSDP2 would take it that there is nothing to reduce, and leave gradients in the
        # compute dtype ever after.
        for parameter in trained:
            parameter.requires_grad_(True)
        yield
