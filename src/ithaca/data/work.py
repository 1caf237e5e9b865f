"""What a packing worker does: read a part, turn its records into documents, write a shard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import sha256_in
from .arrays import read_arrays
from .manifest import FIRST
from .readers import read_records, read_text
from .record import Record
from .render import Encoders, around, check_characters, columns_of, encode_text, given_tokens, read_unit, render_text
from .shard import ShardWriter
from .source import KINDS, Part, Piece, Source, has_units
from .stamps import Stamp, open_steady
from .tokenizer import TokenizerParts

_BATCH = 1024  # short texts encoded together
_OFTEN = 0.2  # seconds between reports

Report = Callable[[tuple[int, int, int]], None]  # bytes, documents, tokens since the last report


@dataclass(frozen=True)
class Job:
    """What all parts have in common. It travels to every worker once."""

    folder: str
    sources: tuple[Source, ...]
    kinds: tuple[str, ...]
    parts: TokenizerParts | None
    vocabulary: int
    eos: bool
    parse: bool  # special tokens in texts


def start_worker(job: Job) -> Callable[[Any, Report], Any]:
    """A function for tasks: (number, part) writes a shard, (path, stamp) gives the SHA-256 of that file."""
    encoders = None if job.parts is None else Encoders(job.parts, parse=job.parse)

    def handle(task: tuple[int | str, Part | Stamp], report: Report) -> Any:
        what, part = task
        if isinstance(part, Stamp):
            with open_steady(str(what), part) as file:
                return sha256_in(file)
        units = has_units(job.kinds[part.source], job.sources[part.source].use)
        with ShardWriter(Path(job.folder), int(what), job.vocabulary, units=units) as writer:
            worker = _PartWorker(job, part, encoders, writer, report)
            worker.run()
            marked_by = encoders.marked_by(worker.source) if encoders is not None and worker.chats else None
            judged = {"values": worker.values, "equal": worker.equal, "first": worker.first}
            return {**writer.close(), "chats": worker.chats, "marked_by": marked_by, **judged}

    return handle


class _PartWorker:
    def __init__(self, job: Job, part: Part, encoders: Encoders | None, writer: ShardWriter, report: Report):
        self.job, self.part, self.encoders, self.writer, self._report = job, part, encoders, writer, report
        self.source, self.kind = job.sources[part.source], job.kinds[part.source]
        self.chats = 0  # records that a chat template rendered
        self.units = has_units(self.kind, self.source.use)
        self.values: str | None = None  # what rollouts are judged by
        self.equal = 0  # groups of which all completions are judged alike
        self.first: dict[str, list[str]] = {}  # places of the first units that teach nothing, by why
        self._texts: list[tuple[str, Record]] = []
        self._characters = 0
        self._read = self._told_documents = self._told_tokens = 0
        self._when = time.monotonic()

    def run(self) -> None:
        for piece in self.part.pieces:
            if self.part.format == "txt":
                self._text_file(piece)
            elif self.part.format == "tokens":
                self._array_file(piece)
            else:
                names = columns_of(self.kind, KINDS[self.kind], self.source)
                for record in read_records(self.part.format, piece, self.source, names):
                    self._record(record)
                self._flush()
        self._tell(0, now=True)

    def _tell(self, size: int, now: bool = False) -> None:
        self._read += size
        if now or time.monotonic() - self._when > _OFTEN:
            documents, tokens = self.writer.documents, self.writer.tokens
            self._report((self._read, documents - self._told_documents, tokens - self._told_tokens))
            self._read, self._told_documents, self._told_tokens = 0, documents, tokens
            self._when = time.monotonic()

    def _record(self, record: Record) -> None:
        if self.kind == "tokens":
            with self._placing(record):
                ids, seen = given_tokens(record.values, self.source)
                self._finish_tokens(ids, seen)
        elif self.units:
            with self._placing(record):
                self._unit(record)
        else:
            assert self.encoders is not None
            with self._placing(record):
                text, spans, encoder, chat = render_text(record.values, self.kind, self.source, self.encoders)
            self.chats += chat
            if not text.strip():
                self.writer.dropped["empty"] += 1
            elif spans is None and len(text) <= encoder.window:
                self._texts.append((text, record))
                self._characters += len(text)
                if len(self._texts) >= _BATCH or self._characters >= encoder.window:
                    self._flush()
            else:
                self._flush()  # documents keep their order
                with self._placing(record):
                    check_characters(text)
                    for ids, seen in encode_text(text, spans, encoder, self.job.eos, chat=chat):
                        self.writer.add(ids, seen)
                    self.writer.end()
        self._tell(record.size)

    def _unit(self, record: Record) -> None:
        unit = read_unit(record.values, self.kind, self.source, self.encoders, self.job.eos)
        if unit.left_out is not None:
            self.writer.dropped[unit.left_out] += 1
            self._note(unit.left_out, record)
            return
        if self.writer.documents and self.values != unit.what:
            raise ValueError(
                f"there are {unit.what or 'no rewards'}, and {self.values or 'no rewards'} in records before; give the same in all "
                "records"
            )
        self.writer.dropped["unsupervised"] += unit.idle
        self.values = unit.what
        for at, ((ids, seen), shared) in enumerate(zip(unit.parts, unit.shared, strict=True)):
            value = math.nan if unit.values is None else unit.values[at]
            self.writer.part(ids, seen, value, None if unit.logprobs is None else unit.logprobs[at], shared)
        self.writer.end()
        self.chats += unit.chats > 0
        # an advantage says by itself what is learned, a reward only beside others
        idle = 0.0 if unit.what == "advantages" else (unit.values or [math.nan])[0]
        if unit.values is not None and all(value == idle for value in unit.values):
            self.equal += 1
            self._note("equal", record)

    def _note(self, why: str, record: Record) -> None:
        places = self.first.setdefault(why, [])
        if len(places) < FIRST:
            places.append(record.place())

    @contextmanager
    def _placing(self, record: Record) -> Iterator[None]:
        """Say where the record is that something is wrong with."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{record.place()}: {error}") from None

    def _finish_tokens(self, ids: np.ndarray, seen: np.ndarray | None) -> None:
        if len(ids):
            self.writer.add(ids, seen)
            self.writer.end()
        else:
            self.writer.dropped["empty"] += 1

    def _flush(self) -> None:
        """Encode the short texts that have come together: many at a time is faster."""
        if not self._texts:
            return
        assert self.encoders is not None
        before, after = around(self.encoders.parts, self.job.eos)
        try:
            encoded = self.encoders.plain.batch([text for text, _ in self._texts])
        except (UnicodeEncodeError, TypeError):
            for text, record in self._texts:
                with self._placing(record):
                    check_characters(text)
            raise
        for ids, (_, record) in zip(encoded, self._texts, strict=True):
            with self._placing(record):
                self.encoders.plain.check(ids)
            self.writer.add(np.array(before + ids + after, np.int64), None)
            self.writer.end()
        self._texts, self._characters = [], 0

    def _text_file(self, piece: Piece) -> None:
        """A file as one document, never whole in memory."""
        assert self.encoders is not None
        blank = True

        def pieces():
            nonlocal blank
            for text, size in read_text(piece.path, piece.stamp):
                blank = blank and not text.strip()
                self._tell(size)
                yield text

        before, after = around(self.encoders.parts, self.job.eos)
        self.writer.add(np.array(before, np.int64), None)
        try:
            for ids, _ in self.encoders.plain.stream(pieces()):
                self.writer.add(ids, None)
        except ValueError as error:  # what reading finds has the file's name already
            text = str(error)
            raise ValueError(text if text.startswith(piece.path) else f"{piece.path}: {text}") from None
        if blank:
            self.writer.discard("empty")
        else:
            self.writer.add(np.array(after, np.int64), None)
            self.writer.end()

    def _array_file(self, piece: Piece) -> None:
        for pieces, number in read_arrays(piece.path, piece.stamp):
            size = 0
            try:
                for ids in pieces:
                    self.writer.add(ids.astype(np.int64), None)
                    size += len(ids)
            except ValueError as error:
                raise ValueError(f"{piece.path}, document {number:,}: {error}") from None
            if size:
                self.writer.end()
            else:
                self.writer.dropped["empty"] += 1
            self._tell(0)
        self._tell(piece.size)
