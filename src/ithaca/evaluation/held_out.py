"""What an evaluation reads: held-out text, packed like training data, and the language of its questions.

Held-out rows have the context of the run and an order of their own (the seed of the data, plus one); the same rows are read every
time. They come from `eval.sources`, packed into `eval.packed` or, without one, beside the results; where there are none, from
what `data.validation` holds out of the training data, which is packed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..base.exits import DATA, Failed
from ..base.hub import local
from ..base.run_folder import RunFolder
from ..config.schema import Config
from ..data.folder import Packed
from ..data.rows import Stream
from ..data.samples import check_files, open_stream, pack_sources, packed_folder
from ..data.tokenizer import load_tokenizer
from ..engine.build import model_config
from .languages import Ids, Language, Pairs, Words
from .suite import Suite, make_suite


def held_out_config(config: Config) -> Config | None:
    """The config with data of the evaluation in place of training data; None where it has none of its own."""
    evaluate = config.eval
    if not evaluate.sources and evaluate.packed is None:
        return None
    packed = evaluate.packed
    if packed is None and any(source.synthetic is None for source in evaluate.sources):
        packed = str(RunFolder(config.run.folder).evaluations / "data")
    data = replace(config.data, sources=evaluate.sources, packed=packed, seed=config.data.seed + 1, validation=None)
    return replace(config, data=data)


def pack_held_out(config: Config, say: Callable[[str], None]) -> None:
    """Before any rank starts: tokenise held-out files that are not packed yet. What validation holds out lies with the rest."""
    held_out = held_out_config(config)
    if held_out is not None and held_out.data.is_packed:
        pack_sources(held_out, say)
    elif held_out is None and config.data.holds_out:
        folder = packed_folder(config)
        if not folder.is_dir():
            raise ValueError(
                f"{folder}, the data of the run, of which a part is held out for validation, is not there; bring it back, or name "
                "other data to measure with --file"
            )
        check_files(Packed(folder), RunFolder(config.run.folder).checked, say)


def open_held_out(config: Config, vocabulary: int, *, keep: bool = True) -> Stream | None:
    held_out = held_out_config(config)
    if held_out is None:
        return open_stream(config, vocabulary, held_out=True, keep=keep) if config.data.holds_out else None
    return open_stream(held_out, vocabulary, keep=keep)


def has_tokenizer(config: Config) -> bool:
    return any(local(config.tokenizer).glob("tokenizer*"))


def open_language(config: Config, vocabulary: int) -> Language | None:
    """What questions are asked in; None where none are asked."""
    if not config.eval.tasks:
        return None
    name = config.eval.language
    if name == "auto":
        synthetic = any(source.synthetic for source in config.data.sources)
        name = "words" if has_tokenizer(config) else "pairs" if synthetic else "ids"
    if name == "pairs":
        return Pairs(vocabulary)
    if name == "ids":
        return Ids(vocabulary, config.eval.seed)
    if not has_tokenizer(config):
        raise ValueError(
            f"eval.language=words needs a tokenizer, and {config.tokenizer} has none; name a folder that has one "
            "with --data.tokenizer, or ask in token ids with --eval.language ids"
        )
    return Words(load_tokenizer(config.tokenizer))


def open_suite(config: Config, hf: Any, groups: int) -> Suite:
    """Everything the config asks for. Held-out data must be packed by now."""
    try:
        held_out = open_held_out(config, hf.vocab_size)
    except ValueError as error:
        raise Failed(DATA, str(error)) from error
    return make_suite(config, open_language(config, hf.vocab_size), held_out, groups)


def check_evaluation(config: Config, say: Callable[[str], None]) -> None:
    """Before any rank starts: pack what is held out, and make every text once, so that one that cannot be made is found now."""
    try:
        pack_held_out(config, say)
    except (ValueError, OSError) as error:
        raise Failed(DATA, str(error)) from error
    open_suite(config, model_config(config.model, config.data.context), 1)
