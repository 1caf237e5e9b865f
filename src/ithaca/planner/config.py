"""Configs on both sides of a plan: what a run's asks of it, the run that a plan is for, and the Hugging Face config that a dry run
builds a model from."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..base.hub import folder
from ..base.units import format_tokens
from ..config.dump import as_yaml
from ..config.schema import Config, Train
from ..engine.model.config import read_config
from ..engine.model.presets import PRESETS, preset_config
from ..stack import Stack
from .plan import Plan

STEPS = 1000  # of a run that nobody has said the length of
_SAID = ("ulysses", "recompute", "store", "tile")  # fields of the stack that a reader looks for, be they the default


def requested(config: Config) -> dict[str, Any]:
    """The arguments of `plan` that a run's config has, beside model, GPUs and stack. Every setting that changes memory or time is
    here, or in those; a test walks the schema."""
    train, lora, checkpoint = config.train, config.model.lora, config.checkpoint
    adapters = {} if lora is None else {"lora": lora.rank, "lora_targets": lora.targets}
    return {
        "context": config.data.context,
        "rows": train.rows,
        "accumulation": train.accumulation,
        "optimizer": train.optimizer,
        "quantize": config.model.quantize,
        "offload_optimizer": train.offload_optimizer,
        "deterministic": train.deterministic,
        "objective": config.objective.kind,
        "reference": config.objective.reference_of(lora is not None) == "adapters",
        "trees": config.objective.kind != "sft" and config.data.share_prefixes != "off",
        # the last one is waited for
        "asynchronous": checkpoint.asynchronous and checkpoint.every is not None and checkpoint.every < train.steps,
        **adapters,
    }


def hf_config(what: str) -> Any:
    if what in PRESETS:
        return preset_config(what)
    path = folder(what)
    return read_config(path if path.is_dir() else path.parent)


def run_yaml(plan: Plan, model: str, *, kernel: str | None = None, steps: int | None = None) -> str:
    """The run that a plan is for, to give to `ithaca train`: `requested` of it is what was planned. model, kernel: as they were
    asked for."""
    job, hardware, pretrained = plan.job, plan.hardware, plan.model.pretrained
    stack = plan.stack if kernel is None else replace(plan.stack, attention=kernel)
    weights = "  # a preset has sizes and no weights: put the folder or the Hub name here" if model in PRESETS else ""
    lines = ["model:", f"  folder: {as_yaml(model)}{weights}"]
    if plan.too_long and pretrained:
        factor = float(-(-plan.context // pretrained))
        lines += [
            "  rope:  # a starting point for a context that the model was not made for",
            *("    rope_type: yarn", f"    factor: {as_yaml(factor)}"),
            f"    original_max_position_embeddings: {pretrained}",
        ]
    if job.lora:
        lines += ["  lora:", f"    rank: {job.lora}", f"    targets: {as_yaml(tuple(job.targets))}"]
    if job.quantize:
        lines += [f"  quantize: {job.quantize}"]
    lines += ["data:", f"  context: {format_tokens(plan.context)}", "  sources: [data/*.jsonl]  # yours"]
    plain = Stack()
    said = [
        field.name
        for field in fields(Stack)
        if field.name in _SAID or getattr(stack, field.name) != getattr(plain, field.name)
    ]
    lines += ["stack:", *(f"  {name}: {as_yaml(stack.words(name))}" for name in said)]
    lines += ["train:", f"  steps: {steps or STEPS}{'' if steps else '  # yours'}", f"  rows: {job.rows}"]
    given = {"accumulation": job.accumulation, "optimizer": job.optimizer, "offload_optimizer": job.offload or None}
    given["deterministic"] = bool(job.processors)
    usual = {field.name: field.default for field in fields(Train)}
    lines += [f"  {name}: {as_yaml(value)}" for name, value in given.items() if value != usual[name]]
    if not job.asynchronous:
        lines += ["checkpoint:", "  asynchronous: false"]
    lines += ["launch:", f"  workers: {hardware.ranks_per_node}"]
    if hardware.nodes > 1:
        lines += [f"  nodes: {hardware.nodes}"]
    return "\n".join(lines) + "\n"
