"""From what a user points at to a model that can be run: a run folder, one of its checkpoints, a Hugging Face folder, or a name on
the Hub.

A run brings its own config; a Hugging Face folder gets one, with the context the model was made for. Either can be changed by
dotted overrides. The stack is not that of the run: results do not depend on it, a forward needs far less memory than training,
and the processes may be others, so all of them share each text, unless a stack is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.hub import fetch, find_name, local, short
from ..config import Config, load, missing
from ..config.dump import as_yaml
from ..config.schema import Objective
from ..data.fetch import fetch_model
from ..engine.model.config import read_settings
from ..engine.model.presets import PRESETS
from ..stack import require
from ..storage.files import CheckpointError, Gone, is_checkpoint, latest
from ..storage.place import step_of

if TYPE_CHECKING:
    import torch

    from ..engine.run import Run


@dataclass(frozen=True)
class Opened:
    """A model that was found, not loaded yet."""

    config: Config  # run.folder: where workers log
    checkpoint: Path | None  # None: the weights are those of config.model.folder
    step: int
    results: Path  # where an evaluation is written
    run: Path | None  # the run folder, where there is one
    named: bool = False  # whether this checkpoint was asked for, and not the newest


def find_model(source: Path, overrides: Sequence[str] = (), out: Path | None = None) -> Opened:
    """What `source` is, as a config and weights. Imports no torch. What it names on the Hub is fetched."""
    if (source / "config.yaml").is_file() or is_checkpoint(source):
        return _of_run(source, overrides, out)
    name = fetch(str(source))
    called, source = short(name) if find_name(name) else source.resolve().name, local(name)
    if not (source / "config.json").is_file():
        what = "has neither config.yaml (a run), manifest.json (a checkpoint) nor config.json (a Hugging Face model)"
        raise ValueError(f"{source} {what if source.is_dir() else 'is not a folder'}; name one of these")
    results = out or Path("runs") / f"eval-{called}"
    language = "words" if any(source.glob("tokenizer*")) else "ids"
    given = [f"model.folder={name}", f"data.context={_native(source)}", f"eval.language={language}"]
    given += ["train.steps=1", "data.sources=[{synthetic: recall}]"]  # stand-ins: nothing is trained here
    config = fetch_model(load(None, [*given, f"run.folder={results}", "run.name=eval", *overrides]).config)
    require(missing(config, PRESETS), "this model cannot be opened")
    return Opened(config, None, 0, results, None)


def _of_run(source: Path, overrides: Sequence[str], out: Path | None) -> Opened:
    checkpoint = source if is_checkpoint(source) else _newest(source / "checkpoints")
    run = checkpoint.parent.parent
    if not (run / "config.yaml").is_file():
        raise ValueError(
            f"{checkpoint} does not lie in a run folder (no {run / 'config.yaml'}), so its model is not known; export it with "
            "`ithaca export` and name that folder"
        )
    results = out or run / "eval"
    step = step_of(checkpoint) or 0
    trained = load(run / "config.yaml").config
    given = ["stack=auto", f"run.folder={results}", *_phase(trained, step), *_held_out(trained, step, run)]
    if trained.objective.kind != "sft":  # pairs and rollouts are measured beside their reference, while training
        given += ["eval.sources=[]", "eval.packed=null", "data.validation=null"]
    config = _as_texts(load(run / "config.yaml", [*given, *overrides]).config)
    name = find_name(config.model.folder)
    if name is not None and not name.is_pinned and not any(each.startswith("model.folder=") for each in overrides):
        raise ValueError(  # a run writes names on the Hub down with their commit: this was a path, and is not asked of anybody
            f"{config.model.folder}, the model of {run}, is not a folder here; name it with --model.folder"
        )
    config = fetch_model(config)
    return Opened(config, checkpoint, step, results, run, checkpoint == source)


def _as_texts(config: Config) -> Config:
    """Of any objective: here texts are measured, and questions asked."""
    if config.objective.kind == "sft":
        return config
    sources = tuple(replace(source, validation=None) for source in config.data.sources)
    return replace(config, objective=Objective(), data=replace(config.data, sources=sources))


def _held_out(config: Config, step: int, run: Path) -> list[str]:
    """Where what was held out of the training data lies: it was packed with it."""
    from ..config.curriculum import phase_at

    data = phase_at(config, step).data
    if not data.holds_out or config.eval.sources or config.eval.packed is not None:
        return []
    return [f"data.packed={data.packed or run / 'data'}"]


def _phase(config: Config, step: int) -> list[str]:
    """Of a run in phases, what the phase that made this checkpoint changes, as overrides."""
    if not config.phases:
        return []
    from ..config.curriculum import phase_at

    phase = phase_at(config, step)
    overrides = ["phases=[]", f"data.context={phase.data.context}", f"train.steps={phase.train.steps}"]
    if phase.model.rope is not None:
        given = {field.name: getattr(phase.model.rope, field.name) for field in fields(phase.model.rope)}
        overrides += [f"model.rope.{name}={as_yaml(value)}" for name, value in given.items() if value is not None]
    sources = [
        {"path": source.path, "validation": source.validation, "weight": source.weight}
        if source.path
        else {"synthetic": source.synthetic}
        for source in phase.data.sources
    ]
    return [*overrides, f"data.sources={json.dumps(sources)}"]


def _newest(folder: Path) -> Path:
    checkpoint = latest(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no complete checkpoint; train a little first, or name another run")
    return checkpoint


def _native(folder: Path) -> int:
    """The length a model was made for."""
    return read_settings(folder / "config.json").get("max_position_embeddings") or 4096


def load_model(opened: Opened, hf: Any, device: torch.device, length: int = 1) -> tuple[Run, Opened]:
    """Build and fill the model, as this rank, for texts of up to this length or those of its config. Collective.

    -> the model, and what it is: a run that goes on may have pruned the checkpoint that was its newest when it was looked for."""
    import torch.distributed as dist

    from ..engine.build import prepared, simple_stack
    from ..storage import checkpoint as checkpoints

    config = opened.config
    world = dist.get_world_size() if dist.is_initialized() else 1
    longest = max(config.data.context, *config.eval.lengths, length)
    stack = config.stack.chosen or simple_stack(longest, hf, world)
    run = prepared(config, hf, stack, device)
    if opened.checkpoint is None:
        return run, opened
    try:
        checkpoints.load(opened.checkpoint, run, None)
    except Gone:
        if opened.named or opened.run is None:
            raise
        folder, before = opened.checkpoint.parent, load(opened.run / "config.yaml").config
        step = checkpoints.load(folder, run, None)["step"]
        # of another phase it is another model: another context, other angles
        if _phase(before, step) != _phase(before, opened.step):
            raise
        opened = replace(opened, checkpoint=folder / f"step-{step}", step=step)
    return run, opened
