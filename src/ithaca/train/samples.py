"""The data of a run: what is packed before any rank starts, and what each rank then reads.

Sample i of a run is a pure function of the data and its seed (data/order.py), and step n trains on samples n·rows to (n+1)·rows.
So the cursor of a run is its step, and a run that resumes on other ranks goes on with exactly the next sample.

While a step computes, a thread reads the next one: a rank's slice of a row of millions of tokens is megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import faults
from ..batch import Batch
from ..config.schema import Config, Source
from ..data.batch import batch_from_rows
from ..data.folder import Packed
from ..data.needles import Needles
from ..data.pack import pack
from ..data.recall import Recall
from ..data.report import plan_words
from ..data.rows import Stream, open_rows
from ..data.source import sources_of
from ..data.tokenizer import check_tokenizer, load_tokenizer
from ..run import Run
from .build import model_config

SYNTHETIC = {"recall": Recall, "needles": Needles}


def packed_folder(config: Config) -> Path:
    return Path(config.data.packed) if config.data.packed else Path(config.run.folder) / "data"


def _from_files(sources: tuple[Source, ...]) -> list[Source]:
    return [source for source in sources if source.synthetic is None]


def pack_sources(config: Config, say: Callable[[str], None]) -> None:
    """Before any rank starts: tokenise what is not packed yet, and plan its rows. Says what became of the documents."""
    files, folder = _from_files(config.data.sources), packed_folder(config)
    if files:
        folder.parent.mkdir(parents=True, exist_ok=True)
        pack(sources_of(files), folder, eos=config.data.eos, say=say, **encoding(config))
    found = _open(config)
    tokenizer = config.data.tokenizer or config.model.folder
    if (Path(tokenizer) / "tokenizer.json").is_file():
        check_tokenizer(found[0].packed, load_tokenizer(tokenizer), tokenizer)
    for rows in found:
        say("\n".join(plan_words(rows.name, config.data.context, rows.plan.counts, config.data.long_documents)))


def encoding(config: Config) -> dict[str, Any]:
    """What `pack` is told of tokens: the tokenizer, or, where the model comes without one, the size of its vocabulary, with which
    data that is tokenised already can be packed."""
    tokenizer = config.data.tokenizer or config.model.folder
    if config.data.tokenizer is None and not list(Path(tokenizer).glob("tokenizer*")):
        return {"vocabulary": model_config(config.model, config.data.context).vocab_size}
    return {"tokenizer": tokenizer}


def _open(config: Config) -> list:
    data = config.data
    packed = Packed(packed_folder(config))
    return open_rows(packed, data.context, long_documents=data.long_documents, seed=data.seed)


def open_stream(config: Config, vocabulary: int) -> Stream:
    """All rows of a run, mixed by weight."""
    data = config.data
    sources, weights = [], []
    files = _from_files(data.sources)
    if files or data.packed:
        rows = _open(config)
        rows[0].packed.check_vocabulary(vocabulary)
        sources += rows
        # a packed folder that is given without its sources has nothing to weigh them by
        weights += [source.weight for source in files] if len(files) == len(rows) else [1.0] * len(rows)
    for source in data.sources:
        if source.synthetic is not None:
            sources.append(SYNTHETIC[source.synthetic](data.context, vocabulary, seed=data.seed))
            weights.append(source.weight)
    return Stream(sources, weights, seed=data.seed)


class Loader:
    """Batches of steps, one step ahead."""

    def __init__(self, stream: Stream, run: Run, rows: int, accumulation: int) -> None:
        self.stream, self.run, self.rows, self.accumulation = stream, run, rows, accumulation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ithaca-data")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def samples(self, step: int) -> range:
        """What the step after `step` finished ones trains on."""
        return range(step * self.rows, (step + 1) * self.rows)

    def batches(self, step: int, last: bool = False) -> list[Batch]:
        """The micro-batches of a step. Unless it is the last, the next one is read meanwhile."""
        if self._next is not None and self._next[0] == step:
            found = self._next[1].result()
        else:
            found = self._read(step)
        self._next = None if last else (step + 1, self._thread.submit(self._read, step + 1))
        return found

    def _read(self, step: int) -> list[Batch]:
        faults.reach("data", step + 1)
        samples = self.samples(step)
        each = self.rows // self.accumulation
        vocabulary = self.run.decoder.config.vocab_size
        return [
            batch_from_rows(self.stream, samples[at : at + each], self.run.mesh, self.run.stack, vocabulary)
            for at in range(0, self.rows, each)
        ]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
