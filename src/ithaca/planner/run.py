"""The plan of a run as its YAML file or recipe describes it, for GPUs that need not be here.

What the file fixes stays: `stack: auto` is searched, a stack is looked at as it is, phases are planned one by one, and memory and
time are counted as `ithaca train` counts them when it starts (`requested`). What a file cannot say is which GPUs it is for. They
are named with --gpus, or by the name of the run, as recipes have it (llama3_8b_1m_8xh100); anything else is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base.units import format_tokens
from ..config import Config, Loaded, load, recipe_names
from ..config.curriculum import phase_configs
from ..engine.model.presets import PRESETS, PUBLISHED
from ..stack import Stack
from .config import requested
from .gpus import GB, GPUS
from .hardware import Hardware, parse_gpus
from .plan import Plan
from .reasons import reasons_of
from .search import max_context, plan

Taken = tuple[str, str, str]  # what, its value, and where that was said


@dataclass(frozen=True)
class Part:
    """The run, or one of its phases."""

    title: str
    model: str
    asked: dict[str, Any]  # arguments of `plan`, without GPUs and machines
    has_rope: bool  # positions beyond the model's own are taken care of
    loaded: Loaded
    stack_path: str  # where its stack is said: "stack", or that of a phase

    @property
    def fixed(self) -> Stack | None:
        return self.asked["stack"]

    def plan(self, longest: bool = False, changed: Mapping[str, Any] = MappingProxyType({}), **machines: Any) -> Plan:
        """machines: gpus, host, disk, kernel, say: of `plan`. longest: at the longest context that fits instead of its own.
        changed: fields of the stack that are others."""
        asked = {**self.asked, **machines}
        asked |= changed if self.fixed is None else {"stack": replace(self.fixed, **changed)}
        if longest:
            del asked["context"]
            found = max_context(self.model, **asked)
        else:
            found = plan(self.model, **asked)
        if self.fixed is not None:
            found = self._explained(found, asked)
        if self.has_rope:
            found.job = replace(found.job, model=replace(found.model, longest=None))
        return found

    def _explained(self, found: Plan, asked: dict[str, Any]) -> Plan:
        """With where each field of the stack was said, and what `auto` would do where it does not fit."""
        every = {field.name for field in fields(Stack)}
        reasons = [
            (
                name,
                value,
                why if name == "attention" and self.fixed and self.fixed.attention == "auto" else self._said(name),
            )
            for name, value, why in reasons_of(found, dict.fromkeys(every), asked.get("kernel"))
        ]
        advice = []
        if not found.fits and not found.executed:
            free = plan(self.model, **{**asked, "context": found.context, "stack": None})
            advice = [f"--stack auto: {free.peak / 1e9:.1f} GB a GPU"] if free.fits else free.advice
        return replace(found, reasons=reasons, advice=advice)

    def _said(self, name: str) -> str:
        place = self.loaded.origins.get(f"{self.stack_path}.{name}")
        return "default of a stack that is given" if place is None else str(place)


def preset_of(folder: str) -> str | None:
    """The preset with the sizes of a model on the Hub; a folder of that name is read instead."""
    return None if Path(folder).exists() else PUBLISHED.get(folder)


def find_run(what: str) -> tuple[Path | None, str | None] | None:
    """The file or the recipe that a word names: a YAML file, a run folder, or the name of a recipe. None: it names neither."""
    path = Path(what)
    if path.suffix.lower() in (".yaml", ".yml"):
        return path, None
    if (path / "config.yaml").is_file() and not (path / "config.json").exists():
        return path / "config.yaml", None
    return (None, what) if what in recipe_names() and not path.exists() else None


def load_run(what: str, overrides: Sequence[str]) -> Loaded:
    found = find_run(what)
    assert found is not None
    return load(found[0], overrides, found[1])


def parts_of(loaded: Loaded) -> list[Part]:
    """The run as the planner's questions, one for each phase."""
    config = loaded.config
    if config.model.dtype != "bf16":
        raise ValueError(
            f"model.dtype: {config.model.dtype} ({_place(loaded, 'model.dtype')}) is not counted: plans are of layers that "
            "compute in bf16; add --model.dtype bf16 to plan it so"
        )
    model, parts = preset_of(config.model.folder) or config.model.folder, []
    for number, part in enumerate(phase_configs(config)):
        if not part.train.steps:  # as many as its epochs take, which only the data tells: long enough for checkpoints
            part = replace(part, train=replace(part.train, steps=2**60))
        own_stack = bool(config.phases) and config.phases[number].stack is not None
        title = (
            f"phase {number + 1} of {len(config.phases)}, {part.train.steps:,} steps in all" if config.phases else ""
        )
        rope = part.model.rope is not None or part.model.random_init or config.model.folder in PRESETS
        stack_path = f"phases[{number}].stack" if own_stack else "stack"
        asked = {**requested(part), "stack": part.stack.chosen}
        parts.append(Part(title, model, asked, rope, loaded, stack_path))
    return parts


def hardware_of(loaded: Loaded, gpus: str | None) -> tuple[Hardware, str]:
    """The GPUs of a run, and where they were said. gpus: what --gpus says."""
    config, launch = loaded.config, loaded.config.launch
    if gpus is not None:
        return _limited(parse_gpus(gpus), config), "--gpus"
    if launch.cpu is not None:
        raise ValueError(
            f"this run is for {launch.cpu} processes on a CPU (launch.cpu, {_place(loaded, 'launch.cpu')}), and plans are of GPUs; "
            "name some with --gpus 4xH100-80GB to plan it for them"
        )
    name = loaded.recipe or config.run.name
    last = name.rpartition("_")[2]
    try:
        named = parse_gpus(last)
    except ValueError:
        counted = f"launch.workers: {launch.workers}, but not which" if launch.workers else "neither how many nor which"
        raise ValueError(
            f"which GPUs is {name} for? The file says {counted}; give --gpus, such as --gpus "
            f"{launch.workers or 8}x{_example(launch.gpu_memory)} (a name that ends with them, as _8xh100, says it too)"
        ) from None
    if launch.world is not None and launch.world != named.count:
        raise ValueError(
            f"the name {name} says {named.count} GPUs, and launch.workers × launch.nodes are {launch.world}; give --gpus"
        )
    if launch.workers is not None:
        named = replace(named, per_node=launch.workers if launch.nodes > 1 else named.per_node)
    return _limited(named, config), f"the name {name}"


def _example(limit: int | None) -> str:
    """A GPU that a run with this `launch.gpu_memory` may be meant for: of that size, the fastest."""
    if limit is None:
        return "H100-80GB"
    found = min(GPUS.values(), key=lambda gpu: (abs(gpu.label * GB - limit), not gpu.cuda, -gpu.peak))
    return f"{found.name}-{found.label}GB"


def _limited(hardware: Hardware, config: Config) -> Hardware:
    """With no more memory than the run may use."""
    limit, gpu = config.launch.gpu_memory, hardware.gpu
    if limit is None or limit >= gpu.memory:
        return hardware
    return replace(hardware, gpu=replace(gpu, memory=limit, label=round(limit / 1e9)))


def taken(loaded: Loaded, hardware: Hardware | None, said: str) -> list[Taken]:
    """What the plan took from the file, and where that stands in it. hardware: None = several, which a comparison names itself."""
    config = loaded.config
    preset = preset_of(config.model.folder)
    model = config.model.folder + (f", as the preset {preset} has it" if preset else "")
    rows: list[Taken] = [("model", model, _place(loaded, "model.folder"))]
    if config.phases:
        contexts = ", ".join(format_tokens(phase.context) for phase in config.phases)
        rows.append(("contexts", contexts, _place(loaded, "phases")))
    else:
        rows.append(("context", format_tokens(config.data.context), _place(loaded, "data.context")))
    train = config.train
    rows.append(("rows", f"{train.rows:,}", _place(loaded, "train.rows")))
    if train.accumulation > 1:
        rows.append(("accumulation", f"{train.accumulation:,}", _place(loaded, "train.accumulation")))
    rows.append(("optimizer", train.optimizer, _place(loaded, "train.optimizer")))
    if train.offload_optimizer is not None:
        said_so = "true" if train.offload_optimizer else "false"
        rows.append(("offload_optimizer", said_so, _place(loaded, "train.offload_optimizer")))
    if config.model.lora is not None:
        rows.append(("lora", f"rank {config.model.lora.rank}", _place(loaded, "model.lora")))
    if config.model.quantize is not None:
        rows.append(("quantize", config.model.quantize, _place(loaded, "model.quantize")))
    if config.objective.kind != "sft":
        rows.append(("objective", config.objective.kind, _place(loaded, "objective")))
    stack = "auto: searched" if config.stack.auto else "kept as it is given"
    fields_given = [f"stack.{field.name}" for field in fields(Stack) if f"stack.{field.name}" in loaded.origins]
    rows.append(("stack", stack, _place(loaded, "stack.auto" if config.stack.auto else fields_given[0])))
    if hardware is not None:
        limit = config.launch.gpu_memory
        limited = f", at most {limit / 1e9:.1f} GB of each (launch.gpu_memory)" if limit else ""
        rows.append(("GPUs", hardware.words + limited, said))
    return rows


def _place(loaded: Loaded, path: str) -> str:
    """Where a setting, or the first of a section, was said."""
    places = [
        place for name, place in loaded.origins.items() if name == path or name.startswith((f"{path}.", f"{path}["))
    ]
    return str(places[0]) if places else "default"


def overrides_of(options: Any) -> list[str]:
    """What the planner's own options mean in a run's config."""
    settings: list[tuple[str, Any]] = [
        ("data.context", options.context), ("train.rows", options.rows), ("train.accumulation", options.accumulation),
        ("train.optimizer", options.optimizer),
        ("train.offload_optimizer", {True: "true", False: "false", None: None}[options.offload_optimizer]),
        ("train.deterministic", options.deterministic and "true"), ("model.lora.rank", options.lora or None),
        ("model.lora.targets", options.lora_targets and f"[{options.lora_targets}]"),
        ("model.quantize", options.quantize), ("checkpoint.asynchronous", None if options.asynchronous else "false"),
    ]  # fmt: skip
    given = [f"{path}={value}" for path, value in settings if value]
    return [*options.overrides, *given, *(f"stack.{text}" for _, text in options.stack_words)]
