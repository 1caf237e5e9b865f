"""Going on from a checkpoint: is it still the same run? What changed is said; what would make it another one needs a yes.

train, stack, launch, checkpoint, eval, log     may change; what affects the result (train) is listed
data, model, objective                          refused without --allow-change: the rows would be others, the weights, or the loss
phases                                          the same: of those that have begun data is guarded, the rest may change
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ..base.exits import CHECKPOINT, CONFIG, DATA, Failed
from ..base.fields import COUNT, OBJECT, TEXT, OrNull, wrong
from ..config.nodes import load_plain
from ..config.schema import Config, Objective
from ..engine.run import Run
from ..storage import checkpoint as checkpoints
from ..storage.files import read_state
from ..storage.ranks import on_rank0
from . import best

log = logging.getLogger("ithaca")

_EXTRA = {"samples": COUNT, "tokens": COUNT, "config?": TEXT, "data?": OBJECT, "best?": OrNull(best.FIELDS)}
_SAID = ("train",)
_GUARDED = ("data", "model", "objective")
_HARMLESS = ("model.trust_remote_code", "model.lora.merge_on_export")


@dataclass(frozen=True)
class Resumed:
    name: str  # of the checkpoint
    step: int
    tokens: int
    lines: list[str]  # what to tell the user
    best: dict[str, Any] | None  # the record of evaluations (best.py)


def resume(
    folder: Path,
    run: Run,
    optimizer: torch.optim.Optimizer,
    config: Config,
    *,
    text: str,
    contents: Mapping[str, Any],
    allow_change: bool,
) -> Resumed | None:
    """Load the newest good checkpoint of a folder, if there is any. Collective.

    text: the config as checkpoints hold it; contents: what the data is now. Failed says what does not fit.
    """
    try:
        checkpoints.ready(folder, run)
        if not on_rank0(run.mesh.world, lambda: _swept(folder)):
            return None
        extra = checkpoints.load(folder, run, optimizer)
    except ValueError as error:
        raise Failed(CHECKPOINT, str(error)) from error
    state = read_state(folder / f"step-{extra['step']}")
    lines = check_same(state, config, text, contents=contents, allow_change=allow_change)
    moved = topology(state["world"], {"size": run.mesh.world.size, "stack": asdict(run.stack)}, extra["samples"])
    lines += [moved] if moved else []
    return Resumed(f"step-{extra['step']}", extra["step"], extra["tokens"], lines, extra.get("best"))


def _swept(folder: Path) -> bool:
    """Remove what interrupted saves have left. -> whether there are checkpoints"""
    for path in checkpoints.remove_unfinished(folder):
        log.warning("removed unfinished checkpoint %s (an interrupted save)", path.name)
    return bool(checkpoints.published(folder))


def check_same(
    state: dict[str, Any], config: Config, text: str, *, contents: Mapping[str, Any], allow_change: bool
) -> list[str]:
    """Failed if this is not the run that a checkpoint is of. state: its state.json; text: the config now; contents: what the data
    is, as far as it is known. -> what has changed, to be said"""
    extra, step, rows = state["extra"], state["step"], config.train.rows
    if problem := wrong(extra, _EXTRA):
        raise Failed(CHECKPOINT, f"step-{step} is of no run that goes on: extra.{problem}; start in another run.folder")
    if extra["samples"] != step * rows:
        raise Failed(
            CHECKPOINT,
            f"step-{step} was made with train.rows={extra['samples'] // max(step, 1)}, this run has {rows}: samples would be "
            "skipped or repeated; keep train.rows, or start in another run.folder",
        )
    other = sorted(name for name, was in extra.get("data", {}).items() if contents.get(name, was) != was)
    if other:
        raise Failed(
            DATA,
            f"{', '.join(other)} holds other data than step-{step} was trained on, so rows would be skipped or repeated; bring "
            "back the data that was packed then, or start in another run.folder",
        )
    said, refused = changes(extra.get("config") or text, text, step)
    if refused and not allow_change:
        raise Failed(CONFIG, refusal(step, refused))
    return [f"changed since step {step}: " + ", ".join([*refused, *said])] if said or refused else []


def changes(before: str, now: str, step: int) -> tuple[list[str], list[str]]:
    """Of two configs as text, the first of which was trained to `step`: (changes to mention, changes to refuse), each as
    `train.lr 1e-05 → 3e-05`."""
    configs = [load_plain(text, "the config of the checkpoint") for text in (before, now)]
    begun = _begun(configs[0].get("phases") or [], step)
    if all(config.get("phases") for config in configs):
        for config in configs:  # the longest of them, and no setting of its own
            config.get("data", {}).pop("context", None)
    for config in configs:
        config["phases"] = {str(number): phase for number, phase in enumerate(config.get("phases") or (), 1)}
    for config in configs:  # before there was a choice
        config.setdefault("objective", asdict(Objective()))
        config.setdefault("data", {}).setdefault("share_prefixes", "auto")
    for train in (
        config.get("train") or {} for config in configs
    ):  # what null comes to where auto has not made it true
        train["offload_optimizer"] = bool(train.get("offload_optimizer"))
    old, new = (flat(config) for config in configs)
    said, refused = [], []
    for name in sorted(old.keys() | new.keys()):
        if name in _HARMLESS or old.get(name) == new.get(name):
            continue
        section, *inner = name.split(".")
        text = f"{name} {_word(old.get(name))} → {_word(new.get(name))}"
        if section in _GUARDED or (section == "phases" and inner[0] in begun and inner[1] not in ("steps", "stack")):
            refused.append(text)
        elif section in _SAID or (section == "phases" and inner[1] != "stack"):
            said.append(text)
    return said, refused


def _begun(phases: list[dict[str, Any]], step: int) -> set[str]:
    """Numbers of the phases that steps up to `step` were taken in."""
    begins = [0, *accumulate(phase["steps"] for phase in phases)]
    return {str(number) for number, begin in enumerate(begins[:-1], 1) if begin < step}


def refusal(step: int, changed: list[str]) -> str:
    shown = "\n  ".join([*changed[:12], *([f"and {len(changed) - 12} more"] if len(changed) > 12 else [])])
    return (
        f"the run was trained with other settings up to step {step}:\n  {shown}\nGo on with the new ones with --allow-change, "
        "take the old ones back, or start in another run.folder"
    )


def topology(before: dict[str, Any], now: dict[str, Any], sample: int) -> str | None:
    """One line if the ranks or their layout changed. before, now: {"size": ..., "stack": {...}} as state.json has it."""
    shapes = [
        (world["size"], world["stack"].get("ulysses"), world["stack"].get("ring"), world["stack"].get("replicate"))
        for world in (before, now)
    ]
    if shapes[0] == shapes[1]:
        return None
    old, new = (f"{size} ranks (ulysses {u} × ring {r})" for size, u, r, _ in shapes)
    return f"layout changed: {old} → {new}; model and optimizer resharded, data goes on at sample {sample:,}"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Sections in sections as dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(flat(inner, f"{name}.{key}" if name else str(key)))
    return found


def _word(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
