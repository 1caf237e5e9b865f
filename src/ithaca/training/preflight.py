"""Everything that a run would refuse and that files and settings can tell, before any worker starts.

`ithaca train --check` shows what is found here, and `ithaca train` asks here before it starts, so that the two cannot differ. It is
what a run does, in the same order and with the same functions, without numbers: the model is built on the meta device, weights are
compared by their headers, data that is packed is opened, the newest checkpoint is compared with the config. All problems are found
at once. What only workers can know is left to them: GPUs, their memory, other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from ..base.exits import CHECKPOINT, CONFIG, DATA, Failed
from ..base.redact import redacted
from ..base.run_folder import RunFolder
from ..base.units import format_bytes
from ..config import missing
from ..config.curriculum import phase_configs
from ..config.schema import Config
from ..data.inputs import understand
from ..data.pack import _vocabulary as check_vocabulary
from ..data.samples import encoding, open_stream, pack_sources, packed_folder
from ..data.source import sources_of
from ..data.tokenizer import load_tokenizer, tokenizer_parts
from ..engine.attention.choice import Kernels, Need
from ..engine.attention.head_schedule import head_schedule
from ..engine.build import DTYPES, build_model, is_preset, model_config, simple_stack
from ..engine.model.adapter import Decoder
from ..engine.model.presets import PRESETS
from ..engine.model.weights import Folder
from ..engine.model.weights import _check as check_names
from ..engine.optimizer import build_optimizer
from ..engine.own import OwnDecoder
from ..engine.parallelize import read_decoder
from ..engine.proof import require_proof
from ..evaluation.held_out import held_out_config, open_language
from ..evaluation.suite import make_suite
from ..stack import Stack, require
from ..storage.files import CheckpointError, changed, published, read_state, run_of, touched, unusable
from ..storage.loading import candidates
from ..storage.place import place_of
from .resume import check_same


@dataclass
class Preflight:
    """What was found. done: steps of the newest checkpoint; None: there is none."""

    problems: list[Failed] = field(default_factory=list)
    done: int | None = None
    unpacked: bool = False  # data is still to be packed

    @contextmanager
    def noting(self, code: int, about: str = "") -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, Failed) as error:
            text = about + str(error)
            if text not in map(str, self.problems):  # phases may share one
                self.problems.append(Failed(getattr(error, "exit_code", code), text))

    def require(self) -> None:
        """Failed, with the exit code of the first problem, if there are any."""
        if self.problems:
            texts = [str(problem).replace("\n", "\n    ") for problem in self.problems]
            count = "1 problem" if len(texts) == 1 else f"{len(texts)} problems"
            lines = "".join(f"\n  - {text}" for text in texts)
            raise Failed(self.problems[0].exit_code, f"this run cannot start: {count}{lines}")


def check_run(config: Config, text: str, *, allow_change: bool = False) -> Preflight:
    """text: the config as it will be written down. Nothing is made but notes about data that was checked (samples.py)."""
    preflight, folder = Preflight(), RunFolder(config.run.folder)
    with preflight.noting(CONFIG):
        folder.check()
    gaps = missing(config, PRESETS)
    preflight.problems += [Failed(CONFIG, gap) for gap in gaps]
    parts = phase_configs(config)
    contents: dict[str, Any] = {}
    need = 0
    for number, part in enumerate(parts, 1):
        about = f"phase {number}: " if len(parts) > 1 else ""
        with preflight.noting(CONFIG, about):
            if not any(gap.startswith("model.folder") for gap in gaps):
                hf = model_config(part.model, part.data.context)
                need = max(need, _model(part, hf))
                if not gaps:
                    contents.update(_data(preflight, part, hf.vocab_size, about))
                    _evaluation(preflight, part, hf.vocab_size, about)
    with preflight.noting(CHECKPOINT):
        _checkpoint(preflight, config, folder, text, contents, allow_change)
    with preflight.noting(CHECKPOINT):
        _room(folder, need)
    return preflight


def _model(config: Config, hf: Any) -> int:
    """Build it without numbers, and compare it with its files, its stack and its optimizer. -> bytes of a checkpoint, at least"""
    options, stack = config.model, config.stack.chosen
    with torch.device("meta"):
        model, _ = build_model(options, hf, config.train.seed)
    decoder = read_decoder(model, stack or Stack())
    if isinstance(decoder, OwnDecoder):
        require_proof(decoder)
    if not (options.random_init or is_preset(options)):
        folder = options.path
        try:
            check_names(decoder.model, Folder(folder), folder)
        except SafetensorError as error:
            raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    if stack is None and config.launch.cpu is not None:
        stack = simple_stack(config.data.context, hf, config.launch.cpu)
    if stack is not None:
        _stack(config, stack, decoder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    build_optimizer(model, config.train)
    return sum(parameter.numel() for parameter in trained) * 4


def _stack(config: Config, stack: Any, decoder: Decoder | OwnDecoder) -> None:
    require(stack.layer_violations(len(decoder.layers)), "this stack does not suit the model")
    if isinstance(decoder, OwnDecoder):
        return  # how many heads its layers have is seen when they attend
    first = decoder.layers[0].projector
    head_schedule(first.heads, first.kv_heads, stack.ulysses, stack.heads_per_stage)
    if config.launch.cpu is not None:  # which kernels a GPU can take is for it to say
        kernels = Kernels(stack.attention)
        for layer in decoder.layers:
            need = Need(
                torch.device("cpu"), DTYPES[config.model.dtype], layer.projector.head_dim, layer.window is not None
            )
            kernels.resolve(need)


def _data(preflight: Preflight, config: Config, vocabulary: int, about: str) -> Mapping[str, Any]:
    """-> what the data is, of what is packed"""
    with preflight.noting(DATA, about):
        folder = packed_folder(config)
        if not config.data.is_packed:
            open_stream(config, vocabulary)
        elif folder.is_dir() and any(folder.iterdir()):
            pack_sources(config, lambda line: None)  # compares what is there with what is asked for
            return open_stream(config, vocabulary).contents
        else:
            preflight.unpacked = True
            files = sources_of([source for source in config.data.sources if source.synthetic is None])
            inputs, asked = [understand(number, source) for number, source in enumerate(files)], encoding(config)
            named = asked.get("tokenizer")
            parts = None if named is None else tokenizer_parts(load_tokenizer(named), None)
            check_vocabulary(inputs, parts, asked.get("vocabulary"), config.data.eos)
    return {}


def _evaluation(preflight: Preflight, config: Config, vocabulary: int, about: str) -> None:
    if config.eval.every is None:
        return
    held_out = held_out_config(config)
    if held_out is not None:
        _data(preflight, held_out, vocabulary, about)
    with preflight.noting(CONFIG, about):
        make_suite(config, open_language(config, vocabulary), None, 1)


def _checkpoint(
    preflight: Preflight, config: Config, folder: RunFolder, text: str, contents: Mapping[str, Any], allow_change: bool
) -> None:
    every, run = published(folder.checkpoints), run_of(folder.checkpoints)
    path = next((checkpoint for checkpoint in every if not unusable(checkpoint, run)), None)
    if path is None:
        if every:
            candidates(folder.checkpoints)  # says that none is good
        return
    state = read_state(path)
    check_same(state, config, redacted(text), contents=contents, allow_change=allow_change)
    if not changed(path, touched(path)):  # else the run may go on from an older one
        preflight.done = state["step"]


def _room(folder: RunFolder, need: int) -> None:
    """For the weights of one checkpoint; a save counts the rest."""
    try:
        free = place_of(folder.checkpoints).room()
    except PermissionError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {error.filename}; nothing was trained: choose another run.folder, or change its "
            "permissions"
        ) from None
    if free < need:
        raise CheckpointError(
            f"{folder.checkpoints} has {format_bytes(free)} free, and the weights alone of a checkpoint take {format_bytes(need)}; "
            "make room, or choose another run.folder"
        )


def verdict(preflight: Preflight, config: Config) -> str:
    """Of a run without problems, in one line."""
    steps, where = config.train.steps, config.run.folder
    if preflight.done is not None and preflight.done >= steps:
        return finished(preflight.done, config)
    begin = (
        f"step {preflight.done + 1} of {steps:,}, from step-{preflight.done}"
        if preflight.done
        else f"step 1 of {steps:,}"
    )
    first = "packs its data, then " if preflight.unpacked else ""
    return f"this run can start: it {first}trains {begin}, in {where}"


def finished(step: int, config: Config) -> str:
    return (
        f"this run is finished: {config.run.folder} has step {step:,} of train.steps={config.train.steps:,}; raise train.steps to "
        f"go on, or write the model with: ithaca export {config.run.folder} OUT"
    )
