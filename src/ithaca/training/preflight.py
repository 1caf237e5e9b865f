"""Everything that a run would refuse and that files and settings can tell, before any worker starts.

`ithaca train --check` shows what is found here, and `ithaca train` asks here before it starts, so that the two cannot differ. It is
what a run does, in the same order and with the same functions, without numbers: the model is built on the meta device, weights are
compared by their headers, data that is packed is opened, the newest checkpoint is compared with the config. All problems are found
at once. What only workers can know is left to them: GPUs, their memory, other hosts.

Data that is not packed yet is packed on trial where it is small: into a folder that is gone afterwards, by the code that packs it.
Of more than that the first records are tried, and the verdict says that the rest has to pack too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
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
from ..data.inputs import Input, understand, with_template
from ..data.look import try_first
from ..data.pack import _vocabulary as check_vocabulary
from ..data.rows import Stream
from ..data.samples import check_kinds, encoding, named_as_settings, open_stream, pack_sources, packed_folder
from ..data.source import sources_of
from ..data.tokenizer import load_tokenizer, tokenizer_parts
from ..engine.attention.choice import Kernels, Need
from ..engine.attention.head_schedule import head_schedule
from ..engine.build import DTYPES, build_model, is_preset, model_config, simple_stack
from ..engine.criterion import check_criterion
from ..engine.model.adapter import Decoder
from ..engine.model.nf4 import CANNOT_PACK, packing_violations
from ..engine.model.presets import PRESETS
from ..engine.model.weights import Folder
from ..engine.model.weights import _check as check_names
from ..engine.optimizer import build_optimizer
from ..engine.own import OwnDecoder
from ..engine.parallelize import read_decoder
from ..engine.proof import require_proof
from ..evaluation.held_out import held_out_config, open_held_out, open_language
from ..evaluation.suite import make_suite
from ..observe.text import describe_stack
from ..planner.text import describe
from ..stack import Stack, require
from ..storage.files import CheckpointError, changed, published, read_state, run_of, touched, unusable
from ..storage.loading import candidates
from ..storage.place import place_of
from .automatic import automatic_stack, has_arithmetic, planned
from .best import Best
from .criterion import check_units
from .launch.decision import plan_workers
from .length import with_steps
from .resume import check_same

Say = Callable[[str], None]

SMALL = 4e6  # bytes of sources that are packed on trial: seconds


@dataclass
class Preflight:
    """What was found. done: steps of the newest checkpoint; None: there is none."""

    steps: int  # of the run; 0: it has epochs, and they cannot be counted yet
    problems: list[Failed] = field(default_factory=list)
    done: int | None = None
    early: Best | None = None  # evaluations have ended the run before its last step
    unpacked: bool = False  # data is still to be packed
    untried: bool = False  # and nobody has tried all of it

    @property
    def finished(self) -> bool:
        return self.done is not None and (self.early is not None or (0 < self.steps <= self.done))

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


def check_run(
    config: Config,
    text: str,
    *,
    allow_change: bool = False,
    keep: bool = True,
    trial: bool = False,
    say: Say = lambda line: None,
) -> Preflight:
    """text: the config as it will be written down. Nothing is made but notes about data that was checked (samples.py), and
    these only with keep. trial: try to pack what is not packed; without, whoever calls packs it next. say: what data there is."""
    preflight, folder = Preflight(config.train.steps), RunFolder(config.run.folder)
    with preflight.noting(CONFIG):
        folder.check()
    gaps = missing(config, PRESETS)
    preflight.problems += [Failed(CONFIG, gap) for gap in gaps]
    parts = phase_configs(config)
    contents: dict[str, Any] = {}
    need = 0
    with ExitStack() as trials:  # folders of data that was packed on trial
        read = _Reading(preflight, keep, say, trials if trial else None)
        for number, part in enumerate(parts, 1):
            about = f"phase {number}: " if len(parts) > 1 else ""
            with preflight.noting(CONFIG, about):
                if not any(gap.startswith("model.folder") for gap in gaps):
                    hf = model_config(part.model, part.data.context)
                    need = max(need, _model(part, hf, heard=trial and number == 1))
                    if not gaps:
                        stream = _data(read, part, hf.vocab_size, about)
                        if stream is not None:
                            contents.update(stream.contents)
                            preflight.steps = preflight.steps or with_steps(part, stream).train.steps
                            if part.objective.kind != "sft":
                                check_units(part, stream, hf.vocab_size, part.train.steps or preflight.steps)
                        _evaluation(read, part, hf.vocab_size, about)
    with preflight.noting(CHECKPOINT):
        _checkpoint(preflight, config, folder, text, contents, allow_change)
    with preflight.noting(CHECKPOINT):
        _room(folder, need)
    return preflight


@contextmanager
def _heard(heard: bool) -> Iterator[None]:
    """Whether what is logged is shown."""
    log = logging.getLogger("ithaca")
    before = log.level
    log.setLevel(before if heard else logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _model(config: Config, hf: Any, heard: bool) -> int:
    """Build it without numbers, and compare it with its files, its stack and its optimizer. -> bytes of a checkpoint, at least
    heard: show what building it logs, which a run says again."""
    options, stack = config.model, config.stack.chosen
    with torch.device("meta"), _heard(heard):
        model, _ = build_model(options, hf, config.train.seed)
    decoder = read_decoder(model, stack or Stack())
    check_criterion(config.objective.kind, decoder)
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
    if options.quantize is not None:
        shards = (config.launch.cpu or 1) // stack.replicate if stack is not None and stack.shard_parameters else 1
        require(packing_violations([layer.module for layer in decoder.layers], shards), CANNOT_PACK)
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


@dataclass(frozen=True)
class _Reading:
    """How the data of a run is looked at."""

    preflight: Preflight
    keep: bool
    say: Say
    trials: ExitStack | None  # None: nothing is packed on trial


def _data(read: _Reading, config: Config, vocabulary: int, about: str) -> Stream | None:
    """-> the data, if it could be opened"""
    preflight, keep, say = read.preflight, read.keep, read.say
    with preflight.noting(DATA, about):
        folder = packed_folder(config)
        if not config.data.is_packed:
            stream = open_stream(config, vocabulary)
            say(f"{stream.name}: rows of {stream.context:,} tokens, made to order")
            return stream
        if folder.is_dir() and any(folder.iterdir()):
            pack_sources(config, say, keep=keep)  # compares what is there with what is asked for
            return open_stream(config, vocabulary, keep=keep)
        preflight.unpacked = True
        files = sources_of([source for source in config.data.sources if source.synthetic is None])
        asked = encoding(config)
        named = asked.get("tokenizer")
        loaded = None if named is None else load_tokenizer(named)
        parts = None if loaded is None else tokenizer_parts(loaded)
        with named_as_settings():
            inputs = [
                with_template(understand(number, source), config.data.chat_template, loaded)
                for number, source in enumerate(files)
            ]
            check_vocabulary(inputs, parts, asked.get("vocabulary"), config.data.eos)
        check_kinds(config, [(entry.source.path, entry.kind, entry.source.use, "?") for entry in inputs])
        for entry in inputs:
            count = len(entry.files.paths)
            say(
                f"{entry.source.path}: {count:,} file{'s' if count != 1 else ''}, {format_bytes(_size(entry))}, {entry.kind} "
                f"({entry.format})"
            )
        if read.trials is not None and sum(map(_size, inputs)) <= SMALL:
            say(f"  not packed yet; tried now, packed into {folder} by the run")
            return _tried(config, vocabulary, folder, read.trials, say)
        preflight.untried = True
        say(f"  not packed yet: documents, tokens and rows are counted when it is, into {folder}")
        if read.trials is not None:
            more = {"eos": config.data.eos, "parse": config.data.special_tokens == "parse"}
            with named_as_settings():
                for entry in inputs:
                    try_first(entry, parts, **more)
    return None


def _size(entry: Input) -> int:
    return sum(stamp.bytes for stamp in entry.files.stamps.values())


def _tried(config: Config, vocabulary: int, folder: Path, trials: ExitStack, say: Say) -> Stream:
    """The data as the run will pack it, in a folder that stands for the one that the run will make."""
    trial = str(Path(trials.enter_context(TemporaryDirectory(prefix="ithaca-"))) / "data")
    config = replace(config, data=replace(config.data, packed=trial))

    def named(text: object) -> str:
        return str(text).replace(trial, str(folder))

    try:
        pack_sources(config, lambda line: say(named(line)), keep=False, workers=1)
        return open_stream(config, vocabulary, keep=False)
    except ValueError as error:
        raise ValueError(named(error)) from None


def _evaluation(read: _Reading, config: Config, vocabulary: int, about: str) -> None:
    if config.eval.every is None:
        return
    held_out = held_out_config(config)
    if held_out is not None:
        _data(replace(read, say=lambda line: read.say(f"held out: {line}")), held_out, vocabulary, about)
    elif config.data.holds_out and packed_folder(config).is_dir():
        with read.preflight.noting(DATA, about):
            open_held_out(config, vocabulary, keep=read.keep)
    with read.preflight.noting(CONFIG, about):
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
        best = Best.of(config)
        if best is not None:
            best = best.resumed(state["extra"].get("best"))
            preflight.early = best if best.enough(config.eval) else None


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


def plans(config: Config, preflight: Preflight) -> Iterator[str]:
    """What memory and time each phase takes here, line by line. Failed where `stack: auto` finds nothing that fits."""
    for part in phase_configs(config):
        hf, launch = model_config(part.model, part.data.context), part.launch
        part = replace(part, train=replace(part.train, steps=preflight.steps))
        if launch.cpu is not None:
            stack = part.stack.chosen or simple_stack(part.data.context, hf, launch.cpu)
            yield f"on the CPU there is no plan; stack: {describe_stack(stack)}"
        elif torch.cuda.device_count() == 0:
            yield (
                "torch sees no GPU here, so there is no plan of this machine; one of another: ithaca plan "
                f"{part.model.folder} --gpus 8xH100-80GB --context {part.data.context}"
            )
        elif not has_arithmetic(hf):
            yield f"{hf.model_type} runs by its own code, which the planner does not count: there is no plan"
        else:
            world, device, stack = plan_workers(part).workers * launch.nodes, torch.device("cuda", 0), part.stack.chosen
            found = (
                automatic_stack(part, hf, world, device)[1]
                if stack is None
                else planned(part, hf, world, device, stack)
            )
            assert found is not None
            yield from describe(found)


def verdict(preflight: Preflight, config: Config) -> str:
    """Of a run without problems, in one line."""
    where, epochs = config.run.folder, config.train.epochs
    if preflight.finished:
        return finished(preflight, config)
    steps = f"{preflight.steps:,}" if preflight.steps else "as many as its epochs take"
    steps += f" ({epochs:g} epochs)" if epochs is not None and preflight.steps else ""
    begin = (
        f"step {preflight.done + 1} of {steps}, from step-{preflight.done}" if preflight.done else f"step 1 of {steps}"
    )
    first = "packs its data, then " if preflight.unpacked else ""
    packs = ", if the data packs" if preflight.untried else ""
    return f"this run can start{packs}: it {first}trains {begin}, in {where}"


def finished(preflight: Preflight, config: Config) -> str:
    where, early = config.run.folder, preflight.early
    if early is not None:
        done = (
            f"ended after step {preflight.done:,}, for {early.since} evaluations were not better than {early.words()}"
        )
        remedy = "raise or drop eval.stop_after to go on"
    else:
        name = "steps" if config.train.epochs is None else "epochs"
        done = f"has step {preflight.done:,} of train.{name}={getattr(config.train, name):,}"
        remedy = f"raise train.{name} to go on"
    return f"this run is finished: {where} {done}; {remedy}, or write the model with: ithaca export {where} OUT"
