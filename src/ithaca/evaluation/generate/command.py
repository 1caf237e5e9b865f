"""`ithaca ask`, as every rank executes it."""

from __future__ import annotations

import time

import torch.distributed as dist

from ...base.hub import local
from ...config import Config, load
from ...data.samples import trained_template
from ...data.templates import template_text
from ...data.tokenizer import load_tokenizer
from ...engine.build import device_of, model_config
from ..opening import Opened, load_model
from .greedy import generate
from .prompt import prompt_ids, stops


def require_tokenizer(config: Config) -> None:
    if not any(local(config.tokenizer).glob("tokenizer*")):
        raise ValueError(
            f"asking takes a tokenizer, and {config.tokenizer} has none; name a folder that has one with --data.tokenizer FOLDER"
        )


def ask(opened: Opened, question: str, text: str | None, most: int) -> int:
    """-> exit code"""
    config = opened.config
    tokenizer = load_tokenizer(config.tokenizer)
    tokenizer.chat_template = _template(opened) or tokenizer.chat_template
    prompt = prompt_ids(tokenizer, question, text, parse=config.data.special_tokens == "parse")
    hf = model_config(config.model, config.data.context)
    reach = getattr(hf, "max_position_embeddings", None)
    if reach is not None and len(prompt) + most > reach:
        raise ValueError(
            f"the prompt has {len(prompt):,} tokens, and with {most} new ones that is more than the {reach:,} positions this model "
            "was made for; ask about a shorter text, or extend the model (ithaca docs extension)"
        )
    run, _ = load_model(opened, hf, device_of(config), length=len(prompt) + most)
    begin = time.perf_counter()
    answer = generate(
        run, prompt, most=most, stop=stops(tokenizer, getattr(run.decoder.model, "generation_config", None))
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(tokenizer.decode(answer, skip_special_tokens=True).strip())
        plain = "; plain text: there is no chat template" if tokenizer.chat_template is None else ""
        print(f"({len(prompt):,} tokens read, {len(answer)} written, {time.perf_counter() - begin:.1f} s{plain})")
    return 0


def _template(opened: Opened) -> str | None:
    """What was asked for, or else what the run was trained with."""
    asked = opened.config.data.chat_template
    if opened.run is not None:
        trained = load(opened.run / "config.yaml").config
        if asked == trained.data.chat_template:
            return trained_template(trained, opened.run)
    return None if asked is None else template_text(asked)
