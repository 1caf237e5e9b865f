"""From a config to a prepared model.

A model comes from a Hugging Face folder: built on the meta device and filled shard by shard, so that no rank holds it whole. With
`random_init` only its config is read, and with a preset name not even a folder is needed. Rotary settings of the run go into
the model's config before it is built, so that an export carries them and inference agrees with training.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.schema import Config, Lora, Model
from ..parallelize import prepare
from ..run import Run
from ..stack import Stack
from .presets import PRESETS

log = logging.getLogger("ithaca")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_config(options: Model, context: int) -> Any:
    """The Hugging Face config of the model, with the run's rotary settings."""
    from transformers import AutoConfig

    preset = is_preset(options)
    if preset:
        settings = dict(PRESETS[options.folder])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        config = AutoConfig.from_pretrained(
            options.folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    if options.rope is not None:
        config.rope_parameters = _with_rope(config.rope_parameters, options)
    longest = getattr(config, "max_position_embeddings", None) or context
    if context > longest:
        if options.rope is None and not (options.random_init or preset):
            raise ValueError(_too_long(context, longest))
        kinds = {each.get("rope_type") for each in _tables(config.rope_parameters)}
        if "dynamic" not in kinds:  # there this number is the length that stretching begins at
            config.max_position_embeddings = context
    config.use_cache = False
    return config


def is_preset(options: Model) -> bool:
    return options.folder in PRESETS and not Path(options.folder).is_dir()


def _tables(parameters: Any) -> list[Any]:
    """Rotary settings; Gemma 3 has one table per kind of layer."""
    parts = [each for each in parameters.values() if isinstance(each, dict)]
    return parts if parts and "rope_type" not in parameters else [parameters]


def _with_rope(parameters: Any, options: Model) -> Any:
    assert options.rope is not None
    if _tables(parameters) == [parameters]:
        return options.rope.over(parameters)
    return {kind: options.rope.over(each) for kind, each in parameters.items()}


def _too_long(context: int, longest: int) -> str:
    factor = -(-context // longest)
    return (
        f"data.context={context:,} is longer than the {longest:,} positions the model was made for; extend it, for example with "
        f"--model.rope.rope_type yarn --model.rope.factor {factor} --model.rope.original_max_position_embeddings {longest}, "
        "or with a larger --model.rope.rope_theta; or lower data.context"
    )


def build_model(options: Model, config: Any, seed: int) -> tuple[nn.Module, Path | None]:
    """The model, and the folder its weights come from (then it is on the meta device)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as words

    words.disable_progress_bar()  # the run has a display of its own
    build = AutoModelForCausalLM.from_config
    torch.manual_seed(seed)  # the same weights on every rank
    if options.random_init or is_preset(options):
        model = build(config, dtype=torch.float32, trust_remote_code=options.trust_remote_code)
        return (with_lora(model, options.lora, seed) if options.lora else model), None
    # a frozen LoRA base stays in the compute dtype; what is trained gets fp32 masters
    dtype = DTYPES[options.dtype] if options.lora else torch.float32
    with torch.device("meta"):
        model = build(config, dtype=dtype, trust_remote_code=options.trust_remote_code)
        model = with_lora(model, options.lora, seed) if options.lora else model
    return model, Path(options.folder)


def with_lora(model: nn.Module, options: Lora, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("model.lora needs the package peft (pip install peft); or drop model.lora") from None
    torch.manual_seed(seed + 1)
    alpha: Any = options.alpha  # PEFT divides it by the rank: any number will do
    adapters = LoraConfig(
        r=options.rank, lora_alpha=alpha, lora_dropout=options.dropout, target_modules=list(options.targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    wrapped: Any = get_peft_model(model, adapters)  # pyright: ignore[reportArgumentType]
    return wrapped


def prepared(config: Config, hf: Any, stack: Stack, device: torch.device) -> Run:
    model, weights = build_model(config.model, hf, config.train.seed)
    dtype = DTYPES[config.model.dtype]
    if not stack.shard_parameters and weights is None:
        model = model.to(dtype)
    return prepare(
        model, stack, device=device, dtype=dtype, weights=weights, scratch=config.stack.scratch,
        offload_parameters=config.train.offload_optimizer, seed=config.train.seed + 1,
    )  # fmt: skip


def automatic_stack(config: Config, hf: Any, world: int, device: torch.device) -> Stack:
    """A stack that works for `stack: auto`: all ranks share the sequence, by heads as far as those go, then by a ring.
    The planner chooses better; this only has to be safe."""
    heads = hf.num_attention_heads
    ulysses = max(n for n in range(1, world + 1) if world % n == 0 and n <= heads)
    ring = world // ulysses
    tokens = config.data.context // world
    short = tokens <= 2**15
    stack = Stack(
        ulysses=ulysses,
        ring=ring,
        heads_per_stage=None if short else max(1, heads // ulysses // 8),
        recompute="keep_attention",
        store="gpu" if tokens <= 2**17 or device.type == "cpu" else "host",
    )
    log.info("stack auto: %s", stack)
    return replace(stack, tile=None) if short and tokens <= 4096 else stack
