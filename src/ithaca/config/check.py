"""What cannot work, all of it at once, before any process starts.

`violations` looks at the config alone: types, ranges, and fields that contradict each other, each with its remedy.
`missing` looks at the machine: folders, files and packages that the run names and that are not there.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from glob import glob
from pathlib import Path
from typing import Any

from ..base.hub import PREFIX, local
from ..stack import Stack
from .curriculum import phase_configs
from .option import about, accepts, expectation, kinds, out_of_range
from .schema import DECAY, DECAY_SHAPE, Config, Objective, Rope, Source, Train, in_steps

Problem = tuple[tuple[str, ...], str]  # the paths it is about, the first being where to look; and the words
_LEAST, _MOST = 2.0**-126, float(2**128 - 2**104)  # of float32, without the numbers that lose digits towards 0


def violations(config: Config) -> list[str]:
    """Everything about a config that cannot work, in words."""
    return [text for _, text in problems_of(config)]


def problems_of(config: Config) -> list[Problem]:
    problems = list(_types(config, ""))
    if problems:
        return problems  # comparing wrong types would only add noise
    parts = (_model, rope_problems, _data, _stack, _train, _objective, _phases, _rest)
    return [*_ranges(config, ""), *(problem for part in parts for problem in part(config))]


def missing(config: Config, presets: Collection[str] = ()) -> list[str]:
    """What the run names and the machine does not have. presets: model names that need no folder."""
    problems = []
    model = config.model.path
    if not (model / "config.json").is_file() and config.model.folder not in presets:
        what = "has no config.json" if model.is_dir() else "is not a folder"
        known = f", or one of {', '.join(presets)}" if presets else ""
        problems.append(
            f"model.folder={config.model.folder!r} {what}; name a Hugging Face folder{known}, or a model on the Hub (owner/name)"
        )
    if config.data.tokenizer and not local(config.data.tokenizer).is_dir():
        problems.append(f"data.tokenizer={config.data.tokenizer!r} is not a folder")
    if config.data.packed and not Path(config.data.packed).is_dir():
        problems.append(f"data.packed={config.data.packed!r} is not there yet; make it with: ithaca data pack")
    for path, source in _sources(config):
        if source.path is None or source.format == "datasets" or source.path.startswith(PREFIX):
            continue  # of the Hub: said by whoever fetches it
        if not Path(source.path).exists() and not glob(source.path):
            problems.append(f"{path}.path={source.path!r}: no such file or folder, and no file matches it as a pattern")
    scratch = config.stack.scratch
    if scratch and not Path(scratch).is_dir():
        problems.append(f"stack.scratch={scratch!r} is not a folder; create it on a fast disk")
    log = config.log
    trackers = {"tensorboard": log.tensorboard, "wandb": log.wandb is not None, "mlflow": log.mlflow is not None}
    problems += [
        f"log.{name} needs the package {name}; install it with: pip install {name}, or leave log.{name} out"
        for name, asked in trackers.items()
        if asked and importlib.util.find_spec(name) is None
    ]
    return problems


def _sources(config: Config) -> Iterator[tuple[str, Source]]:
    phases = [(f"phases[{index}]", phase.sources) for index, phase in enumerate(config.phases)]
    for name, sources in (("data", config.data.sources), ("eval", config.eval.sources), *phases):
        for index, source in enumerate(sources):
            yield f"{name}.sources[{index}]", source


def _types(section: Any, prefix: str) -> Iterator[Problem]:
    """Only a config made in Python can be wrong here; `load` has read every value as its type."""
    cls = type(section)
    inherited = {field.name for field in fields(Stack)} if isinstance(section, Stack) else set()
    for field in fields(section):
        path, value, kind = prefix + field.name, getattr(section, field.name), kinds(cls)[field.name]
        if field.name in inherited:
            continue  # Stack checks its own
        if not accepts(kind, value):
            yield (path,), f"{path}={value!r} must be {expectation(kind, about(cls, field))}"
        elif is_dataclass(value):
            yield from _types(value, path + ".")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, item in enumerate(value):
                yield from _types(item, f"{path}[{index}].")


def _ranges(section: Any, prefix: str) -> Iterator[Problem]:
    for field in fields(section):
        path, value, facts = prefix + field.name, getattr(section, field.name), about(type(section), field)
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, float) and not math.isfinite(item) for item in items):
            yield (path,), f"{path}={value} must be finite"
        elif is_dataclass(value):
            yield from _ranges(value, path + ".")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if is_dataclass(item):
                    yield from _ranges(item, f"{path}[{index}].")
                elif facts.get("choices") and item not in facts["choices"]:
                    yield (path,), f"{path}={item!r} must be among {', '.join(facts['choices'])}"
                elif isinstance(item, int | float) and (wrong := out_of_range(facts, item)):
                    yield (path,), f"{path}={item} {wrong}"
        elif facts.get("choices") and value is not None and value not in facts["choices"]:
            yield (path,), f"{path}={value!r} must be one of {', '.join(facts['choices'])}"
        elif isinstance(value, int | float) and (wrong := out_of_range(facts, value)):
            yield (path,), f"{path}={value} {wrong}"


def _beyond_float32(path: str, value: float, default: Any) -> Iterator[Problem]:
    """What the optimizer computes with is float32, in which 1e-46 is 0 and 1e39 is infinite: weights would become NaN, or stay as
    they are, and nobody would know why."""
    if math.isfinite(value) and value != 0 and not _LEAST <= abs(value) <= _MOST:
        what = "0 or nearly 0" if abs(value) < 1 else "infinite"
        yield (
            (path,),
            f"{path}={value} is {what} in float32, which training computes in; give a number between {_LEAST:.1e} and {_MOST:.1e} "
            f"(default: {default})",
        )


def _float32(value: float) -> float:
    """As float32 has it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


def _model(config: Config) -> Iterator[Problem]:
    model, lora = config.model, config.model.lora
    if not model.folder:
        yield ("model.folder",), "model.folder is empty; name a Hugging Face folder or a preset"
    if lora is not None:
        if model.random_init:
            yield (
                ("model.lora", "model.random_init"),
                "model.lora trains adapters of a frozen base, and model.random_init makes that base noise; drop one of them",
            )
        yield from _beyond_float32("model.lora.alpha", lora.alpha, type(lora).alpha)
        if lora.dropout != 0:
            yield (
                ("model.lora.dropout",),
                f"model.lora.dropout={lora.dropout} must be 0: results would be random, so nothing could be verified",
            )
        if not lora.targets:
            yield (
                ("model.lora.targets",),
                "model.lora.targets is empty, so nothing would be trained; name a linear layer",
            )

    if model.quantize is not None:
        yield from _quantize(config)


def _quantize(config: Config) -> Iterator[Problem]:
    quantize = config.model.quantize
    if config.model.lora is None:
        yield (
            ("model.quantize", "model.lora"),
            f"model.quantize={quantize} is for a frozen base, and without model.lora all weights are trained; give both",
        )
    if config.train.offload_optimizer:
        yield (
            ("model.quantize", "train.offload_optimizer"),
            f"train.offload_optimizer keeps weights in host memory, which model.quantize={quantize} spares; drop one of them",
        )


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    own = config.phases and all(phase.sources or phase.packed for phase in config.phases)
    if data.packed is None and not data.sources and not own:
        yield (
            ("data.packed", "data.sources"),
            "there is nothing to train on: give data.sources (files, or synthetic: recall), or data.packed (a folder made "
            "by 'ithaca data pack')",
        )
    for path, source in _sources(config):
        if (source.path is None) == (source.synthetic is None):
            both = "both path and synthetic" if source.path else "neither path nor synthetic"
            yield (f"{path}.path", f"{path}.synthetic"), f"{path} has {both}; give one of them"
        if source.chat and source.kind not in (None, "chat"):
            yield (
                (f"{path}.kind", f"{path}.chat"),
                f"{path} has both chat: true and kind: {source.kind}; give one of them",
            )
        yield from _share(f"{path}.validation", source.validation)
        if source.validation and source.synthetic is not None:
            yield (
                (f"{path}.validation",),
                f"{path}.validation={source.validation}: a synthetic source has no documents to hold out; name it in eval.sources",
            )
        if source.validation and path.startswith("eval."):
            yield (
                (f"{path}.validation",),
                f"{path}.validation={source.validation}: nothing of an evaluation is trained on; leave it out, or give it in "
                "data.sources",
            )
    yield from _share("data.validation", data.validation)
    if data.validation and not any(part.data.is_packed for part in phase_configs(config)):
        yield (
            ("data.validation",),
            f"data.validation={data.validation}: synthetic sources have no documents to hold out; name one in eval.sources",
        )


def _share(path: str, value: int | float | None) -> Iterator[Problem]:
    if isinstance(value, float) and value >= 1:
        yield (
            (path,),
            f"{path}={value} must be a number of documents without a point, such as 100, or a share below 1, such as 0.01",
        )


def _stack(config: Config) -> Iterator[Problem]:
    names = {field.name for field in fields(Stack)}
    if config.stack.auto:
        given = [name for name in names if getattr(config.stack, name) != getattr(Stack(), name)]
        for name in sorted(given):
            yield (f"stack.{name}",), f"stack.{name} cannot be given with auto: true; drop one of them"
    for text in config.stack.violations(config.launch.world):
        name = text.partition("=")[0]
        path = f"stack.{name}" if name in names else "stack"
        yield (path,), f"{path}: {text}" if path == "stack" else f"stack.{text}"


def _train(config: Config) -> Iterator[Problem]:
    train, chosen, world = config.train, config.stack.chosen, config.launch.world
    yield from _length(config)
    if train.accumulation >= 1 and train.rows % train.accumulation:
        yield (
            ("train.accumulation", "train.rows"),
            f"train.accumulation={train.accumulation} does not divide train.rows={train.rows}; every micro-batch must have "
            "the same number of rows",
        )
    elif chosen is not None and not chosen.violations(world) and world and train.accumulation >= 1:
        groups = world // chosen.context_ranks
        if train.rows // train.accumulation % groups:
            yield (
                ("train.rows", "train.accumulation", "stack", "launch"),
                f"{world} processes with ulysses × ring = {chosen.context_ranks} make {groups} data-parallel groups, over "
                f"which the {train.rows // train.accumulation} rows of a micro-batch cannot be split; make train.rows / "
                f"train.accumulation a multiple of {groups}, or raise stack.ulysses or stack.ring",
            )
    if isinstance(train.warmup, float) and not 0 <= train.warmup < 1:
        yield (
            ("train.warmup",),
            f"train.warmup={train.warmup} is neither a number of steps (10) nor a share of them (0.05)",
        )
    elif train.warmup >= train.steps >= 1:
        yield (
            ("train.warmup", "train.steps"),
            f"train.warmup={train.warmup} must be less than train.steps={train.steps}, or the run ends before lr is reached",
        )
    else:
        yield from _decay(train)
    if train.optimizer == "muon":
        yield from _muon(config)
    if train.optimizer == "adamw8bit" and train.offload_optimizer:
        yield (
            ("train.optimizer", "train.offload_optimizer"),
            "train.optimizer=adamw8bit makes states small on the GPU, and train.offload_optimizer takes them off it; drop one (on "
            "the host AdamW has its states in fp32, which take none of the GPU)",
        )
    if train.min_lr > train.lr:
        yield ("train.min_lr", "train.lr"), f"train.min_lr={train.min_lr} is above train.lr={train.lr}; lower it"
    for name in ("lr", "min_lr", "weight_decay", "eps", "clip", "z_loss", "label_smoothing"):
        value = getattr(train, name)
        if value is not None:
            yield from _beyond_float32(f"train.{name}", value, getattr(type(train), name))
    if all(map(math.isfinite, train.betas)) and not all(0 <= beta < 1 for beta in map(_float32, train.betas)):
        yield (
            ("train.betas",),
            f"train.betas={list(train.betas)} must both be at least 0 and below 1, in float32 too (at most 0.9999999)",
        )


_OF = {
    "dpo": ("beta", "label_smoothing", "by_length"),
    "policy": ("clip_low", "clip_high", "kl", "unbiased_kl", "normalise", "longest", "temperature"),
}
_LOSSES = {"dpo": ("sigmoid", "robust", "hinge", "ipo"), "policy": ("grpo", "bnpo", "dr_grpo", "dapo")}


def _objective(config: Config) -> Iterator[Problem]:
    asked, kind, plain = config.objective, config.objective.kind, Objective()
    for other, names in _OF.items():
        for name in names if other != kind else ():
            if getattr(asked, name) != getattr(plain, name):
                yield (
                    (f"objective.{name}", "objective.kind"),
                    f"objective.{name}={getattr(asked, name)} is for objective.kind={other}, and this run has {kind}; drop it",
                )
    if asked.loss is not None and asked.loss not in _LOSSES.get(kind, ()):
        known = f"it has {', '.join(_LOSSES[kind])}" if kind in _LOSSES else "sft has one loss; drop it"
        yield (
            ("objective.loss", "objective.kind"),
            f"objective.loss={asked.loss} is no loss of objective.kind={kind}: {known}",
        )
    if asked.label_smoothing and asked.loss in ("hinge", "ipo"):
        yield (
            ("objective.label_smoothing", "objective.loss"),
            f"objective.label_smoothing={asked.label_smoothing} has no meaning for {asked.loss}; use sigmoid or robust, or drop it",
        )
    if asked.loss == "dr_grpo" and asked.longest is None:
        yield (
            ("objective.longest", "objective.loss"),
            "objective.loss=dr_grpo divides by objective.longest, which is missing: the most tokens that a completion may have",
        )
    for name in ("beta", "label_smoothing", "clip_low", "clip_high", "kl", "temperature"):
        yield from _beyond_float32(f"objective.{name}", getattr(asked, name), getattr(plain, name))
    if asked.reference is not None and asked.reference_of(config.model.lora is not None) is None:
        why = "objective.kl is 0" if kind == "policy" else f"objective.kind={kind} compares with nothing"
        yield ("objective.reference",), f"objective.reference={asked.reference} would not be used: {why}; drop it"
    if asked.reference == "adapters" and config.model.lora is None:
        yield (
            ("objective.reference", "model.lora"),
            "objective.reference=adapters is the model without its adapters, and model.lora is not given; use start, or give it",
        )
    if kind == "sft":
        return
    for name in ("label_smoothing", "z_loss"):
        if getattr(config.train, name):
            yield (
                (f"train.{name}", "objective.kind"),
                f"train.{name}={getattr(config.train, name)} is a term of cross-entropy, and objective.kind={kind} has none; "
                + ("use objective.label_smoothing" if (name, kind) == ("label_smoothing", "dpo") else "drop it"),
            )
    for path, source in _sources(config):
        if source.synthetic is not None:
            yield (
                (f"{path}.synthetic", "objective.kind"),
                f"{path}: synthetic rows are texts, and objective.kind={kind} learns from "
                + ("preferences" if kind == "dpo" else "rollouts") + "; name files of those",
            )  # fmt: skip


def _length(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.epochs is None:
        if train.steps == 0:
            yield (
                ("train.steps",),
                "train.steps is missing or 0: optimizer steps of the whole run, at least 1; or give train.epochs",
            )
        return
    if train.steps > 0:
        yield (
            ("train.epochs", "train.steps"),
            f"train.steps={train.steps} and train.epochs={train.epochs:g} are both given; drop one of them",
        )
    if config.phases:
        yield ("train.epochs", "phases"), "train.epochs cannot be given with phases, which have steps of their own"
    endless = [source.synthetic for source in config.data.sources if source.synthetic]
    if endless:
        yield (
            ("train.epochs", "data.sources"),
            f"train.epochs needs data that has an end, and synthetic: {endless[0]} has none; give train.steps",
        )


def _decay(train: Train) -> Iterator[Problem]:
    if train.schedule != "wsd":
        for name, default in (("decay", DECAY), ("decay_shape", DECAY_SHAPE)):
            if getattr(train, name) != default:
                yield (
                    (f"train.{name}", "train.schedule"),
                    f"train.{name}={getattr(train, name)} is for train.schedule=wsd, and this run has {train.schedule}; drop it",
                )
        return
    if isinstance(train.decay, float) and not 0 <= train.decay < 1:
        yield ("train.decay",), f"train.decay={train.decay} is neither a number of steps (10) nor a share of them (0.1)"
        return
    total = train.steps if train.schedule_steps is None else train.schedule_steps
    if total and in_steps(train.warmup, total) + in_steps(train.decay, total) > total:
        yield (
            ("train.decay", "train.warmup"),
            f"train.warmup={train.warmup} and train.decay={train.decay} are more than the {total:,} steps they are of; lower one",
        )


def _muon(config: Config) -> Iterator[Problem]:
    """What Muon has no rule for here (docs/decisions/0036-muon.md)."""
    if config.model.lora is not None:
        yield (
            ("train.optimizer", "model.lora"),
            "train.optimizer=muon orthogonalises updates of whole matrices, and an adapter's are two factors of one; use adamw",
        )
    if config.train.offload_optimizer:
        yield (
            ("train.optimizer", "train.offload_optimizer"),
            "train.optimizer=muon gathers whole matrices on the GPU, and train.offload_optimizer keeps them on the host; drop one",
        )


def _phases(config: Config) -> Iterator[Problem]:
    if not config.phases:
        return
    longest, steps = max(phase.context for phase in config.phases), sum(phase.steps for phase in config.phases)
    if config.data.context != longest:
        yield (
            ("data.context", "phases"),
            f"data.context={config.data.context} is not the longest context of phases, {longest}; leave it out",
        )
    if config.train.steps != steps:
        yield (
            ("train.steps", "phases"),
            f"train.steps={config.train.steps}, but phases have {steps} in all; leave it out",
        )
    for index, phase in enumerate(config.phases):
        for text in [] if phase.stack is None else phase.stack.violations(config.launch.world):
            yield (f"phases[{index}].stack", "phases"), f"phases[{index}].stack: {text}"


def _rest(config: Config) -> Iterator[Problem]:
    every, keep = config.checkpoint.every, config.checkpoint.keep_every
    if keep is not None and (every is None or (every >= 1 and keep % every)):
        remedy = "give checkpoint.every too" if every is None else f"make it a multiple of checkpoint.every={every}"
        yield (
            ("checkpoint.keep_every", "checkpoint.every"),
            f"checkpoint.keep_every={keep} meets no checkpoint; {remedy}",
        )
    evaluate = config.eval
    own = evaluate.sources or evaluate.packed or evaluate.tasks
    if evaluate.every is not None and not own and not all(part.data.holds_out for part in phase_configs(config)):
        yield (
            ("eval.every",),
            f"eval.every={evaluate.every} has no data; give eval.sources or eval.packed, hold out some of the data with "
            "data.validation, or ask questions with eval.tasks",
        )
    yield from _best(config)
    if len(set(evaluate.lengths)) < len(evaluate.lengths) or list(evaluate.lengths) != sorted(evaluate.lengths):
        yield ("eval.lengths",), f"eval.lengths={list(evaluate.lengths)} must be ascending, each length once"
    if config.launch.cpu is not None and config.launch.workers is not None:
        yield (
            ("launch.cpu", "launch.workers"),
            "launch.cpu and launch.workers are both given; cpu is for runs without GPUs",
        )
    if config.launch.share_gpu and config.launch.workers is None:
        yield (
            ("launch.share_gpu", "launch.workers"),
            "launch.share_gpu needs launch.workers, how many ranks share the GPUs"
            + ("; on the CPU there is nothing to share" if config.launch.cpu is not None else ""),
        )
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        yield ("run.name",), f"run.name={name!r} must be a plain name without '/'; the place goes into run.folder"
    if not config.run.folder:
        yield ("run.folder",), "run.folder is empty; name a folder for the results"


def _best(config: Config) -> Iterator[Problem]:
    """Evaluations that are compared with one another."""
    evaluate = config.eval
    asked = [name for name in ("stop_after", "keep_best") if getattr(evaluate, name)]
    for name in asked:
        if evaluate.every is None:
            yield (
                (f"eval.{name}", "eval.every"),
                f"eval.{name} compares evaluations, and there are none; give eval.every",
            )
        elif config.phases:
            yield (
                (f"eval.{name}", "phases"),
                f"eval.{name} compares evaluations of one context, and phases have several; leave it out",
            )
    metric = evaluate.metric
    if metric is None:
        return
    if metric == "held_out":
        there = bool(evaluate.sources) or evaluate.packed is not None or config.data.holds_out
        remedy = "give eval.sources, eval.packed or data.validation"
    else:
        task = "needle" if metric == "needle_longest" else metric
        there, remedy = task in evaluate.tasks, f"add {task} to eval.tasks"
    if not there:
        yield ("eval.metric",), f"eval.metric={metric} is not measured; {remedy}, or choose another metric"


NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}


# -- rotary settings against the lengths they are for ------------------------------------------------------------------


def rope_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of model.rope at the longest context it is used for, and of each phase that has settings of its own."""
    plain = [phase.context for phase in config.phases if phase.rope is None] if config.phases else [config.data.context]
    if config.model.rope is not None:
        yield from _of("model.rope", config.model.rope, max(plain, default=config.data.context))
    for index, phase in enumerate(config.phases):
        if phase.rope is not None:
            yield from _of(f"phases[{index}].rope", phase.rope, phase.context)


def _of(path: str, rope: Rope, context: int) -> Iterator[tuple[tuple[str, ...], str]]:
    kind, factor, trained = rope.rope_type, rope.factor, rope.original_max_position_embeddings
    lacks = [name for name in NEEDS.get(kind or "", ()) if getattr(rope, name) is None]
    if lacks:
        names = " and ".join(f"{path}.{name}" for name in lacks)
        yield (f"{path}.rope_type",), f"{path}.rope_type={kind} also needs {names}"
    if factor is not None and 0 < factor < 1:  # at or below 0: the range of the field says so
        yield (
            (f"{path}.factor",),
            f"{path}.factor={factor} would squeeze positions instead of stretching them; use 1 or more",
        )
    elif (
        kind in ("yarn", "longrope")
        and factor is not None
        and factor > 0
        and trained is not None
        and context > factor * trained
    ):
        yield (
            (f"{path}.factor", f"{path}.original_max_position_embeddings"),
            f"{path}: {kind} with factor {factor:g} stretches {trained:,} positions to {round(factor * trained):,}, but "
            f"the context is {context:,}; use factor "
            f"{math.ceil(context / trained)}, or a context of at most {round(factor * trained):,}",
        )
    for low, high, words in (("beta_slow", "beta_fast", "yarn"), ("low_freq_factor", "high_freq_factor", "llama3")):
        small, large = getattr(rope, low), getattr(rope, high)
        if small is not None and large is not None and small >= large:
            yield (f"{path}.{low}", f"{path}.{high}"), f"{path}: {words} needs {low}={small:g} below {high}={large:g}"
