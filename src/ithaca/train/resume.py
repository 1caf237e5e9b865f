"""Going on from a checkpoint: is it still the same run? What changed is said; what would make it another one needs a yes.

train, stack, launch, checkpoint, eval, log     may change; what affects the result (train) is listed
data, model                                     refused without --allow-change: the rows would be others, or the weights
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from ..stack import Stack

_SAID = ("train",)
_GUARDED = ("data", "model")
_HARMLESS = ("model.trust_remote_code", "model.lora.merge_on_export")


def compare(state: dict[str, Any], text: str, stack: Stack, world: int) -> tuple[str | None, list[str]]:
    """state: a checkpoint's state.json; text: the config now. -> (what needs a yes, or None; lines to say)"""
    extra, lines = state["extra"], []
    said, refused = changes(extra.get("config") or text, text)
    if said or refused:
        lines.append(f"changed since step {state['step']}: " + ", ".join([*refused, *said]))
    moved = topology(state["world"], {"size": world, "stack": asdict(stack)}, extra["samples"])
    return refusal(state["step"], refused) if refused else None, [*lines, *([moved] if moved else [])]


def changes(before: str, now: str) -> tuple[list[str], list[str]]:
    """Of two configs as text: (changes to mention, changes to refuse), each as `train.lr 1e-05 → 3e-05`."""
    old, new = _flat(yaml.safe_load(before), ""), _flat(yaml.safe_load(now), "")
    said, refused = [], []
    for name in sorted(old.keys() | new.keys()):
        if name in _HARMLESS or old.get(name) == new.get(name):
            continue
        section = name.partition(".")[0]
        text = f"{name} {_word(old.get(name))} → {_word(new.get(name))}"
        if section in _GUARDED:
            refused.append(text)
        elif section in _SAID:
            said.append(text)
    return said, refused


def refusal(step: int, found: list[str]) -> str:
    shown = "\n  ".join([*found[:12], *([f"and {len(found) - 12} more"] if len(found) > 12 else [])])
    return (
        f"the run was trained with other settings up to step {step}:\n  {shown}\nGo on with the new ones with --allow-change, "
        "take the old ones back, or start in another run.folder"
    )


def topology(before: dict[str, Any], now: dict[str, Any], sample: int) -> str | None:
    """One line if the ranks or their layout changed. before, now: {"size": ..., "stack": {...}} as state.json has it."""
    shapes = [
        (each["size"], each["stack"].get("ulysses"), each["stack"].get("ring"), each["stack"].get("replicate"))
        for each in (before, now)
    ]
    if shapes[0] == shapes[1]:
        return None
    old, new = (f"{size} ranks (ulysses {u} × ring {r})" for size, u, r, _ in shapes)
    return f"layout changed: {old} → {new}; model and optimizer resharded, data goes on at sample {sample:,}"


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(_flat(inner, f"{name}.{key}" if name else str(key)))
    return found


def _word(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
