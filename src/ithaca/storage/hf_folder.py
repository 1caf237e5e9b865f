"""A model as a Hugging Face folder, written one parameter at a time and renamed when complete."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.files import sync
from ..base.hub import GENERATION, TOKENIZER, Name, find_name
from ..engine.mesh import Mesh
from .adapters import adapter_state, exported_parameters
from .files import CheckpointError
from .ranks import on_all_ranks, on_rank0
from .safetensors_shards import Entry, Shards

log = logging.getLogger("ithaca")

TEMPLATE = "chat_template.jinja"  # where it is there, what tokenizer_config.json says of templates does not count

Fetch = Callable[[str, torch.dtype], Tensor]
"""A whole parameter by its name in the run, in a dtype. On rank 0 on the host; on the others the result is not looked at."""


@dataclass(frozen=True)
class Outgoing:
    """What to write. `model` gives names and shapes only: it may be sharded or on the meta device."""

    model: nn.Module
    config: Any
    generation: Any
    trained: Sequence[str]  # names of what a LoRA run trains
    adapters: bool  # write a PEFT folder of those, not a model
    dtype: torch.dtype
    max_shard_bytes: float
    tokenizer_folder: Path | None
    chat_template: str | None = None  # instead of the tokenizer's


def write_folder(outgoing: Outgoing, folder: Path, fetch: Fetch, mesh: Mesh) -> Path:
    """Collective: every rank fetches, rank 0 writes. -> folder"""
    hidden = Path(on_rank0(mesh.world, lambda: str(_start(folder))))
    writes = mesh.world.rank == 0
    write = _write_adapters if outgoing.adapters else _write_model
    try:
        with ExitStack() as opened:
            on_all_ranks(mesh.world, lambda: write(outgoing, hidden, fetch, writes, opened))
        on_rank0(mesh.world, lambda: _finish(outgoing, hidden, folder))
    except BaseException:  # a signal too: nothing half written stays behind
        if writes:
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    return folder


def _start(folder: Path) -> Path:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already, and nothing in it was changed; choose a new folder")
    hidden = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    hidden.mkdir(parents=True)
    return hidden


def _write_model(outgoing: Outgoing, hidden: Path, fetch: Fetch, writes: bool, opened: ExitStack) -> None:
    """Gathering goes on after rank 0 failed to write: the others are in it."""
    exported = exported_parameters(outgoing.model)
    problem: Exception | None = None
    shards, plain = None, None
    if writes:
        plain = empty_model(outgoing.config)
        entries = [
            Entry(name, tuple(tensor.shape), parameter.dtype or outgoing.dtype)
            for parameter in exported
            for name, tensor in _published(plain, parameter.name, torch.empty(parameter.shape, device="meta")).items()
        ]
        shards = Shards(hidden, "model", entries, int(outgoing.max_shard_bytes))
        opened.callback(shards.leave)
    for parameter in exported:
        dtype = torch.float32 if parameter.join else parameter.dtype or outgoing.dtype
        parts = [fetch(name, dtype) for name in parameter.parts]
        if shards is None or plain is None or problem is not None:
            continue
        try:
            whole = parameter.join(*parts).to(outgoing.dtype) if parameter.join else parts[0]
            for name, tensor in _published(plain, parameter.name, whole).items():
                shards.add(name, tensor)
        except Exception as error:
            problem = error
    if problem is not None:
        raise problem
    if shards is not None:
        shards.close()
        _write_config(outgoing, hidden)


def _write_adapters(outgoing: Outgoing, hidden: Path, fetch: Fetch, writes: bool, opened: ExitStack) -> None:
    tensors = {name: fetch(name, outgoing.dtype) for name in outgoing.trained}
    if not writes:
        return
    state, config = adapter_state(outgoing.model, tensors)
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(state.items())]
    shards = Shards(hidden, "adapter_model", entries, sum(entry.bytes for entry in entries) + 1)
    opened.callback(shards.leave)
    for entry in entries:
        shards.add(entry.name, state[entry.name])
    shards.close()
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.base_model_name_or_path = (
        config.base_model_name_or_path or getattr(outgoing.config, "_name_or_path", "") or None
    )
    if (base := find_name(config.base_model_name_or_path or "")) is not None and base.is_pinned:
        config.base_model_name_or_path, config.revision = base.repo, base.revision
    config.save_pretrained(str(hidden))


def _published(plain: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter under the names transformers publishes it by, for example one matrix per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(plain, {name: tensor})  # pyright: ignore[reportArgumentType]


def empty_model(config: Any) -> nn.Module:
    """The model of a config, without numbers."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # transformers writes the dtype into it
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _write_config(outgoing: Outgoing, hidden: Path) -> None:
    config = copy.deepcopy(outgoing.config)
    config.dtype = str(outgoing.dtype).removeprefix("torch.")
    config.architectures = [type(empty_model(config)).__name__]
    if getattr(config, "use_cache", None) is False:
        config.use_cache = True  # off for training; whoever generates wants it
    config.save_pretrained(str(hidden))


def _finish(outgoing: Outgoing, hidden: Path, folder: Path) -> None:
    for name in (*TOKENIZER, GENERATION):
        source = None if outgoing.tokenizer_folder is None else outgoing.tokenizer_folder / name
        if source is not None and source.is_file() and not (outgoing.adapters and name == GENERATION):
            shutil.copyfile(source, hidden / name)
    if outgoing.chat_template is not None and outgoing.tokenizer_folder is not None:
        (hidden / TEMPLATE).write_text(outgoing.chat_template, encoding="utf-8")
    if outgoing.generation is not None and not outgoing.adapters and not (hidden / GENERATION).exists():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outgoing.generation.save_pretrained(str(hidden))
        except ValueError as error:  # transformers refuses to write settings that contradict each other
            log.warning("%s was not written: %s", GENERATION, error)
    if (base := find_name(getattr(outgoing.config, "_name_or_path", ""))) is not None and base.is_pinned:
        (hidden / "README.md").write_text(_card(base, outgoing.adapters), encoding="utf-8")
    for path in (*hidden.iterdir(), hidden):
        sync(path)
    os.rename(hidden, folder)  # over an empty folder, if there is one
    sync(folder.parent)


def _card(base: Name, adapters: bool) -> str:
    """What the Hub and people read: which model this was made of, to the commit."""
    what, relation, library = (
        ("A LoRA adapter of", "adapter", "peft") if adapters else ("Trained from", "finetune", "transformers")
    )
    return (
        f"---\nbase_model: {base.repo}\nbase_model_relation: {relation}\nlibrary_name: {library}\ntags: [ithaca]\n---\n\n"
        f"{what} [{base.repo}](https://huggingface.co/{base.repo}) at commit `{base.revision}`, with ithaca.\n"
    )
