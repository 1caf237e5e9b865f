"""The data of a run: what is packed before any rank starts, and what each rank then reads.

Sample i of a run is a pure function of the data and its seed (data/order.py), and step n trains on samples n·rows to (n+1)·rows.
So the cursor of a run is its step, and a run that resumes on other ranks goes on with exactly the next sample.

While a step computes, a thread reads the next one: a rank's slice of a row of millions of tokens is megabytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import faults
from ..base.files import read_json, write_atomically
from ..base.hub import local
from ..base.run_folder import RunFolder
from ..config.curriculum import phase_configs
from ..config.schema import Config, Source
from ..engine.batch import Batch
from ..engine.build import model_config
from ..engine.run import Run
from ..engine.trees import no_trees
from .batch import Scores, batch_from_rows, batch_of_units
from .folder import Packed
from .needles import Needles
from .pack import pack
from .recall import Recall
from .report import plan_words, summary
from .rows import Rows, Stream, open_rows
from .source import has_units, sources_of
from .templates import template_text
from .tokenizer import check_tokenizer, load_tokenizer

SYNTHETIC = {"recall": Recall, "needles": Needles}
_OFTEN = 10.0  # seconds between lines about reading


def packed_folder(config: Config) -> Path:
    return Path(config.data.packed) if config.data.packed else Path(config.run.folder) / "data"


def _from_files(sources: tuple[Source, ...]) -> list[Source]:
    return [source for source in sources if source.synthetic is None]


def pack_sources(config: Config, say: Callable[[str], None], *, keep: bool = True, workers: int | None = None) -> None:
    """Before any rank starts: tokenise what is not packed yet, and plan its rows. Says what became of files and documents.

    keep: remember which files were right, and their rows; without, and with data that is packed, nothing is written. workers:
    processes, None = one a core, with their progress shown."""
    files, folder, data = _from_files(config.data.sources), packed_folder(config), config.data
    if files:
        folder.parent.mkdir(parents=True, exist_ok=True)
        more: dict[str, Any] = {"eos": data.eos, "special_tokens": data.special_tokens, **encoding(config)}
        more |= {"chat_template": data.chat_template, "workers": workers, "quiet": workers is not None, "say": say}
        with named_as_settings():
            packed = pack(sources_of(files), folder, **more)
    else:
        packed = Packed(folder)
    check_kinds(
        config, [(about["name"], about["kind"], about["use"], about["values"]) for about in packed.manifest["sources"]]
    )
    say("\n".join(summary(packed)))
    check_files(packed, RunFolder(config.run.folder).checked, say, keep=keep)
    if (local(config.tokenizer) / "tokenizer.json").is_file():
        check_tokenizer(packed, load_tokenizer(config.tokenizer), config.tokenizer)
    if (kept := why_apart(config, packed)) is not None:
        say(f"what answers or branches begin with alike is computed for each of them: {kept}")
    for held_out in (False, *([True] if data.holds_out and config.eval.every is not None else [])):
        for rows in _rows(config, packed, keep, held_out):
            name = f"{rows.name}, held out" if held_out else rows.name
            say("\n".join(plan_words(name, data.context, rows.plan.counts, data.long_documents)))


def shares_prefixes(config: Config, packed: Packed) -> bool:
    """Whether parts of units share what they begin with."""
    return config.data.share_prefixes != "off" and why_apart(config, packed) is None


def why_apart(config: Config, packed: Packed) -> str | None:
    """Why units that could share what they begin with do not; None where they do, where there are none, or where nobody asks."""
    if config.data.share_prefixes == "off" or not packed.has_units():
        return None
    if not packed.knows_shared:
        return f"{packed.folder} was packed before this was written down; pack the data again"
    return no_trees(model_config(config.model, config.data.context))


_LEARNS = {"sft": "texts, chats, completions and trees", "dpo": "preferences", "policy": "rollouts and judged trees"}
_OBJECTIVES = {"preference": "dpo", "rollout": "policy", "judged tree": "policy"}  # of units; of all else sft
_REMEDY = {
    "dpo": "learn from both answers with objective: dpo, or from the chosen ones with use: chosen",
    "policy": "learn from them with objective: policy",
    "sft": "name other data, or leave objective out",
}


def check_kinds(config: Config, found: Iterable[tuple[str, str, str | None, str | None]]) -> None:
    """ValueError where the objective cannot learn from a source. found: of each source its name, kind and use, and what its parts
    are judged by; "?" = not known yet."""
    for name, kind, use, values in found:
        what = "judged tree" if kind == "tree" and values is not None else kind
        learns = _OBJECTIVES.get(what, "sft") if has_units(kind, use) else "sft"
        if config.objective.kind == learns or (kind == "tree" and values == "?" and config.objective.kind == "sft"):
            continue
        said = f"{what}s" if has_units(kind, use) else f"single documents ({kind})"
        raise ValueError(
            f"source {name} holds {said}, and objective.kind={config.objective.kind} learns from "
            f"{_LEARNS[config.objective.kind]}; {_REMEDY[learns]}"
        )


# What packing calls its options, and what a run does.
_SETTINGS = {
    "--chat-template": "--data.chat_template",
    "pass --no-eos to go without": "give --data.eos false to go without",
    "Choose another folder, or pass --force to replace this one": "Choose another data.packed, or remove this one",
}


@contextmanager
def named_as_settings() -> Iterator[None]:
    """What packing finds wrong, with the options of `ithaca data pack` called as the settings of a run."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for option, setting in _SETTINGS.items():
            text = text.replace(option, setting)
        raise ValueError(text) from error


def trained_template(config: Config, run: Path) -> str | None:
    """The chat template that the chats of a run were rendered with, as text. None: the tokenizer's own, or several.

    run: its folder, wherever it is now. ValueError if its data is gone, and the file of the template too."""
    found: set[str | None] = set()
    for part in phase_configs(replace(config, run=replace(config.run, folder=str(run)))):
        try:
            sources = Packed(packed_folder(part)).manifest["sources"]
            found |= {source["chat_template"] for source in sources if source["chats"]}
        except (ValueError, OSError):
            asked = {source.chat_template or part.data.chat_template for source in _from_files(part.data.sources)}
            found |= {None if name is None else template_text(name) for name in asked}
    return found.pop() if len(found) == 1 else None


def check_files(packed: Packed, remembered: Path, say: Callable[[str], None], *, keep: bool = True) -> None:
    """Compare the SHA-256 of all packed files with the manifest, once: with keep, what was right is noted with size and time."""
    key, known = str(packed.folder.resolve()), {}
    with suppress(OSError, ValueError):
        known = read_json(remembered)
    known = known if isinstance(known, dict) else {}
    seen = known.get(key)
    total = sum(about["bytes"] for about in packed.manifest["files"].values())
    done, last_report = 0, time.monotonic()

    def progress(size: int) -> None:
        nonlocal done, last_report
        done += size
        if time.monotonic() - last_report > _OFTEN:
            last_report = time.monotonic()
            say(f"checking {packed.folder}: {done / 1e9:,.1f} of {total / 1e9:,.1f} GB")

    now = packed.verify(seen if isinstance(seen, dict) else None, progress)
    if keep and now != seen:
        with suppress(OSError):  # then they are read again next time
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(remembered, json.dumps({**known, key: now}, indent=1) + "\n")


def encoding(config: Config) -> dict[str, Any]:
    """What `pack` is told of tokens: the tokenizer, or, where the model comes without one, the size of its vocabulary, with which
    data that is tokenised already can be packed."""
    if config.data.tokenizer is None and not list(config.model.path.glob("tokenizer*")):
        return {"vocabulary": model_config(config.model, config.data.context).vocab_size}
    return {"tokenizer": config.tokenizer}


def _rows(config: Config, packed: Packed, keep: bool, held_out: bool = False) -> list[Rows]:
    data = config.data
    shares = shares_of(config, packed)
    return open_rows(
        packed,
        data.context,
        long_documents=data.long_documents,
        seed=data.seed,
        validation=shares if any(shares) else None,
        held_out=held_out,
        share=shares_prefixes(config, packed),
        keep=keep,
    )


def shares_of(config: Config, packed: Packed) -> list[int | float]:
    """What is held out of each source of a packed folder."""
    return [config.data.held_out(source) for source in _named(config, packed)]


def _named(config: Config, packed: Packed) -> list[Source] | list[None]:
    """The source that each one of a packed folder was made from; of a folder that is given without its sources nothing is known."""
    files, count = _from_files(config.data.sources), len(packed.manifest["sources"])
    return files if len(files) == count else [None] * count


def open_stream(config: Config, vocabulary: int, *, held_out: bool = False, keep: bool = True) -> Stream:
    """All rows of a run, mixed by weight. held_out: those of documents that validation holds out, in an order of their own.
    keep: remember which rows there are (plan.py)."""
    data = config.data
    sources, weights = [], []
    if _from_files(data.sources) or data.packed:
        packed = Packed(packed_folder(config))
        packed.check_vocabulary(vocabulary)
        sources += _rows(config, packed, keep, held_out)
        named = [entry for entry in _named(config, packed) if data.held_out(entry) or not held_out]
        weights += [1.0 if entry is None else entry.weight for entry in named]
    for source in data.sources if not held_out else ():
        if source.synthetic is not None:
            sources.append(SYNTHETIC[source.synthetic](data.context, vocabulary, seed=data.seed))
            weights.append(source.weight)
    return Stream(sources, weights, seed=data.seed + held_out)


class Loader:
    """Batches of steps, one step ahead. units: with what objectives ask of them; reference: and these scores of their tokens."""

    def __init__(
        self,
        stream: Stream,
        run: Run,
        rows: int,
        accumulation: int,
        *,
        units: bool = False,
        reference: Scores | None = None,
    ) -> None:
        self.stream, self.run, self.rows, self.accumulation = stream, run, rows, accumulation
        self.units, self.reference = units, reference
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ithaca-data")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def samples(self, step: int) -> range:
        """What the step after `step` finished ones trains on."""
        return range(step * self.rows, (step + 1) * self.rows)

    def batches(self, step: int, last: bool = False) -> list[Batch]:
        """The micro-batches of a step. Unless it is the last, the next one is read meanwhile."""
        if self._next is not None and self._next[0] == step:
            batches = self._next[1].result()
        else:
            batches = self._read(step)
        self._next = None if last else (step + 1, self._thread.submit(self._read, step + 1))
        return batches

    def _read(self, step: int) -> list[Batch]:
        faults.reach("data", step + 1)
        samples = self.samples(step)
        batch_size = self.rows // self.accumulation
        vocabulary = self.run.decoder.config.vocab_size
        parts = [samples[at : at + batch_size] for at in range(0, self.rows, batch_size)]
        mesh, stack = self.run.mesh, self.run.stack
        if self.units:
            return [batch_of_units(self.stream, part, mesh, stack, vocabulary, self.reference) for part in parts]
        return [batch_from_rows(self.stream, part, mesh, stack, vocabulary) for part in parts]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
