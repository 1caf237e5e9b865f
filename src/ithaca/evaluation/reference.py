"""Scores of a reference: log-probabilities that a model gave every answer of a packed folder, on disk.

    reference.json    whose they are, of which data, size and SHA-256 of the files
    sums.bin          float64, parts: of each answer the sum over its tokens; NaN = not scored
    tokens.bin        float32, tokens: of each token, 0 where it is not supervised

dpo compares with the sums, policy with the tokens. A run that compares with its own start scores what it will see before the first
step, with the weights it was started from, and keeps the folder: a resume reads the same numbers, and one that goes further scores
the rest first. `ithaca score` writes the same folder with any model of the same vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.fields import COUNT, NUMBER, OBJECT, TEXT, wrong
from ..base.files import inside, read_json, sha256_of
from ..data.batch import Scores as Reading
from ..data.batch import batch_of_units
from ..data.folder import Packed
from ..data.publish import publish
from ..data.rows import Rows, Stream, open_rows
from ..data.samples import shares_prefixes
from ..engine.batch import Batch, Units
from ..engine.build import device_of, model_config
from ..engine.criterion import units_of
from ..engine.ranks import on_rank0
from ..engine.run import Run
from ..storage.state import at_rest
from .opening import Opened, load_model

FORMAT, VERSION = "ithaca reference", 1
_SUM, _TOKEN = np.dtype("<f8"), np.dtype("<f4")
_FIELDS = {
    "content": TEXT, "model": TEXT, "vocabulary": COUNT, "temperature": NUMBER, "parts": COUNT, "tokens": COUNT,
    "files": OBJECT,
}  # fmt: skip


class Scores:
    """A folder of scores, open for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            about = read_json(inside(folder, "reference.json"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} holds no scores of a reference ({error}); `ithaca score` makes such a folder"
            ) from None
        if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise ValueError(
                f"{folder / 'reference.json'} is not of {FORMAT!r}, version {VERSION}; score the data again"
            )
        if problem := wrong(about, _FIELDS):
            raise ValueError(f"{folder / 'reference.json'}: {problem}; score the data again")
        sizes = {"sums.bin": about["parts"] * _SUM.itemsize, "tokens.bin": about["tokens"] * _TOKEN.itemsize}
        for name, size in sizes.items():
            path = inside(folder, name)
            if not path.is_file() or path.stat().st_size != size or sha256_of(path) != about["files"].get(name):
                raise ValueError(
                    f"{path} is missing or has changed since it was written; copy it again or score the data again"
                )
        self.about: dict[str, Any] = about
        self._sums = np.fromfile(folder / "sums.bin", _SUM)

    def check(self, packed: Packed, vocabulary: int, temperature: float) -> None:
        """ValueError unless these are scores of this data, by a model of this vocabulary."""
        about = self.about
        if about["vocabulary"] != vocabulary:
            raise ValueError(
                f"the reference {self.folder} was scored by {about['model']}, whose vocabulary has {about['vocabulary']:,} tokens, "
                f"and this model's has {vocabulary:,}: they do not speak of the same tokens. Score with a model of this vocabulary"
            )
        if about["content"] != packed.identity or about["parts"] != packed.manifest["parts"]:
            raise ValueError(
                f"the reference {self.folder} is of other data than {packed.folder}; score this data: ithaca score"
            )
        if about["temperature"] != temperature:
            raise ValueError(
                f"the reference {self.folder} was scored at temperature {about['temperature']:g}, and this run has "
                f"{temperature:g}; score it again with --temperature {temperature:g}"
            )

    def unscored(self, stream: Stream, rows: Iterable[int]) -> list[int]:
        """Of these samples, those with an answer that has no score."""
        return [row for row in rows if np.isnan(self._sums[stream.units(row).parts]).any()]

    def sums(self, run: Run, batch: Batch) -> Tensor:
        """Of the documents of units, float64."""
        return torch.from_numpy(self._sums[units_of(batch).parts.numpy()]).to(run.mesh.device)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Of a range of the packed folder's tokens."""
        return np.fromfile(self.folder / "tokens.bin", _TOKEN, stop - start, offset=start * _TOKEN.itemsize)


def tokens_of_batch(run: Run, batch: Batch) -> Tensor:
    """Scores that were read with the batch."""
    assert batch.reference is not None, "this batch was read without the scores of its reference"
    return batch.reference


def packed_of(stream: Stream) -> Packed:
    """The folder that all rows of units of a run are from."""
    source = stream.sources[0]
    assert isinstance(source, Rows)
    return source.packed


def samples_of(stream: Stream, count: int) -> list[int]:
    """The first `count` samples without those whose row was there before."""
    first: dict[tuple[int, int], int] = {}
    rows = len(stream)
    for sample in range(count):
        first.setdefault(stream.order.row(sample), sample)
        if len(first) == rows:
            break
    return list(first.values())


def score(
    run: Run, folder: Path, stream: Stream, samples: Sequence[int], *, model: str, temperature: float, tokens: int,
    before: Callable[[str], None] = lambda words: None,
) -> None:  # fmt: skip
    """Score samples of a stream, and write what comes of it beside what the folder had. Collective.

    tokens: of one data-parallel group in one forward, at most (a single row always is one). before: called before each forward."""
    packed, vocabulary = packed_of(stream), run.decoder.config.vocab_size
    parts, size = packed.manifest["parts"], packed.manifest["tokens"]

    first = run.mesh.world.rank == 0

    def forwards() -> Iterator[tuple[Batch, list[int], np.ndarray, np.ndarray]]:
        for batch, rows in batches_of(run, stream, samples, tokens):
            before(f"scoring the reference, {len(samples):,} rows")
            yield batch, rows, *_forward(run, batch, temperature)

    def fill(into: Path) -> None:
        sums = _begun(folder, into, parts, size)
        with open(into / "tokens.bin", "r+b") as file:

            def write(at: int, values: np.ndarray) -> None:
                file.seek(at * _TOKEN.itemsize)
                file.write(values.astype(_TOKEN).tobytes())

            for batch, rows, found, every in forwards():
                if not np.isfinite(found).all():
                    raise ValueError(
                        f"the reference gives an answer of rows {rows} a log-probability that is not finite"
                    )
                sums[units_of(batch).parts.numpy()] = found
                for row, values in zip(rows, every, strict=False):
                    stream.put(row, values, write)
        sums.tofile(into / "sums.bin")
        about = {
            "format": FORMAT, "version": VERSION, "content": packed.identity, "model": model, "vocabulary": vocabulary,
            "temperature": temperature, "parts": parts, "tokens": size,
            "files": {name: sha256_of(into / name) for name in ("sums.bin", "tokens.bin")},
        }  # fmt: skip
        (into / "reference.json").write_text(json.dumps(about, indent=1) + "\n")

    on_rank0(run.mesh.world, lambda: _check_place(folder))  # a rank that fails alone leaves the others waiting
    try:
        if first:
            publish(folder, fill, replace=True)
        else:
            for _ in forwards():
                pass
    finally:
        at_rest(run)
    on_rank0(run.mesh.world, lambda: None)  # the folder is there before anybody reads it


def _check_place(folder: Path) -> None:
    near = next(path for path in folder.absolute().parents if path.exists())
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be made in {near}; choose a folder you can write to")


def _begun(folder: Path, into: Path, parts: int, size: int) -> np.ndarray:
    """tokens.bin and the sums, with what was scored before."""
    if (folder / "reference.json").is_file():
        Scores(folder)  # is what it says it is
        shutil.copyfile(folder / "tokens.bin", into / "tokens.bin")
        return np.fromfile(folder / "sums.bin", _SUM)
    with open(into / "tokens.bin", "wb") as file:
        file.truncate(size * _TOKEN.itemsize)
    return np.full(parts, np.nan, _SUM)


def batches_of(
    run: Run, stream: Stream, samples: Sequence[int], tokens: int, reference: Reading | None = None
) -> Iterator[tuple[Batch, list[int]]]:
    """Batches and their samples, as many at a time as fit. Where they cannot be split over the groups the last sample comes again,
    and its copies count as no unit."""
    groups, vocabulary = run.mesh.data.size, run.decoder.config.vocab_size
    together = groups * max(1, min(tokens // stream.context, -(-len(samples) // groups)))
    for start in range(0, len(samples), together):
        rows = [samples[min(start + place, len(samples) - 1)] for place in range(together)]
        batch = batch_of_units(stream, rows, run.mesh, run.stack, vocabulary, reference)
        rows = rows[: len(samples) - start]
        units, real = units_of(batch), sum(len(stream.units(row).parts) for row in rows)
        batch.units = Units(*(getattr(units, each.name)[:real] for each in fields(Units)))
        yield batch, rows


@torch.no_grad()
def _forward(run: Run, batch: Batch, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the documents of units, and log-probabilities of the labels of all rows, [rows, length]; on every rank."""
    logprobs = run.logprobs(batch, temperature=temperature)
    assert isinstance(logprobs, Tensor)
    sums = run.by_document(batch, logprobs)[units_of(batch).documents.to(run.mesh.device)]
    return sums.cpu().numpy(), run.by_token(batch, logprobs.float()).cpu().numpy()


# -- `ithaca score`, as every rank executes it --------------------------------------------------------------------------


def score_alone(opened: Opened, packed: Packed, out: Path, temperature: float) -> int:
    """-> exit code"""
    config = opened.config
    hf = model_config(config.model, config.data.context)
    packed.check_vocabulary(hf.vocab_size)
    run, opened = load_model(opened, hf, device_of(config))
    name = str(opened.checkpoint or config.model.folder)
    answers = left_out = 0
    for rows in open_rows(packed, config.data.context, share=shares_prefixes(config, packed), keep=False):
        if packed.has_answers(rows.source):
            stream, counts = Stream([rows]), rows.plan.counts
            more: dict[str, Any] = dict(model=name, temperature=temperature, tokens=config.data.context)
            score(run, out, stream, range(len(rows)), **more)
            answers, left_out = (
                answers + counts.documents - counts.dropped_documents,
                left_out + counts.dropped_documents,
            )
    if run.mesh.world.rank == 0:
        longer = f"; {left_out:,} are longer than {config.data.context:,} tokens and left out" if left_out else ""
        print(f"wrote {out}: {answers:,} pairs or groups, scored by {name}{longer}")
    return 0
