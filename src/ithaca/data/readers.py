"""Reading parts: one function per format, each yielding records with their place.

A place is worked out only when something is wrong with a record: counting the lines of a jsonl file up to a byte costs
a second per gigabyte, once, and only then.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..floors import require_floors
from .source import Files, Part, Piece, Source, did_you_mean, offsets_of

_CHUNK = 1 << 18  # bytes of a text, tokens of an array
_LEAST, _MOST = 32 << 20, 1 << 30  # bytes of a part


class Record(NamedTuple):
    values: dict[str, Any]
    place: Callable[[], str]  # file and line, in words
    size: int = 0  # bytes read since the record before, for the progress bar


def split_parts(source: int, files: Files) -> list[Part]:
    """Cut large files, put small ones together. It depends on the files only, so any number of workers writes the same shards."""
    total = sum(path.stat().st_size for path in files.paths)
    target = min(max(total // 256, _LEAST), _MOST)
    pieces: list[Piece] = []
    for path in files.paths:
        size = path.stat().st_size
        cuts = [0, 1]
        if files.format == "jsonl":
            cuts = [*range(0, size, target), size]
        elif files.format == "parquet":
            cuts = _group_cuts(path, target)
        each = max(1, size // (len(cuts) - 1))
        pieces += [Piece(str(path), a, b, each) for a, b in pairwise(cuts)]
    parts, held, size = [], [], 0
    for piece in pieces:
        if held and size + piece.size > target:
            parts.append(Part(source, files.format, tuple(held)))
            held, size = [], 0
        held.append(piece)
        size += piece.size
    return [*parts, Part(source, files.format, tuple(held))]


def read_records(form: str, piece: Piece, source: Source, columns: list[str] | None) -> Iterator[Record]:
    """The records of a piece of jsonl, parquet or datasets. columns: which ones, as the data calls them; None = all."""
    if form == "jsonl":
        return _jsonl(piece)
    if form == "parquet":
        return _parquet(piece, columns)
    assert form == "datasets"
    return _datasets(piece, source, columns)


def first_columns(form: str, piece: Piece, source: Source) -> tuple[list[str], str]:
    """Columns of the first record of a piece, and where it is."""
    if form == "parquet":
        return _parquet_file(piece.path).schema_arrow.names, piece.path
    if form == "datasets":
        return list(open_dataset(source).column_names), source.path
    for record in _jsonl(piece):
        return list(record.values), record.place()
    raise ValueError(f"{piece.path} has no record: every line of it is blank; remove it, or check how it was written")


# jsonl


def _jsonl(piece: Piece) -> Iterator[Record]:
    """Lines that start in the piece's range of bytes."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the line that began before belongs to the piece before
        at = file.tell()
        while at < piece.stop:
            line = file.readline()
            if not line:
                break
            start, at = at, at + len(line)
            body = line.removeprefix(codecs.BOM_UTF8) if start == 0 else line
            if not body.strip():
                continue

            def place(start: int = start) -> str:
                return f"{piece.path}:{_line_number(piece.path, start)}"

            yield Record(_parse(body, piece.path, start, place), place, at - start)


def _parse(line: bytes, path: str, start: int, place: Callable[[], str]) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place()}: not valid UTF-8 at byte {start + error.start:,} of the file (0x{line[error.start]:02x}); save the "
            "file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place()}: not valid JSON at column {error.colno}: {error.msg}; every line must be one object, such as "
            '{"text": "..."}'
        ) from None
    except RecursionError:
        raise ValueError(f"{place()}: the JSON is nested too deeply to be read") from None
    if not isinstance(record, dict):
        raise ValueError(
            f'{place()}: the line is a {type(record).__name__}, not an object; write {{"text": "..."}} on every line'
        )
    return record


def _line_number(path: str, start: int) -> int:
    count = 1
    with open(path, "rb") as file:
        while start > 0 and (block := file.read(min(start, _CHUNK))):
            count += block.count(b"\n")
            start -= len(block)
    return count


# txt


def read_text(path: str) -> Iterator[tuple[str, int]]:
    """A file of text in pieces, each with the bytes it took."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(_CHUNK)
            held = len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: not valid UTF-8 at byte {at - held + error.start:,} (0x{error.object[error.start]:02x}); save "
                    "the file as UTF-8"
                ) from None
            yield (text.removeprefix("\ufeff") if at == 0 else text), len(block)
            if not block:
                return
            at += len(block)


# parquet


def _parquet_file(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"reading {path} needs the package pyarrow; install it: pip install pyarrow") from None
    require_floors("pyarrow")
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as parquet: {_first_line(error)}; it may have been cut short: copy it again"
        ) from None


def _group_cuts(path: Path, target: int) -> list[int]:
    about = _parquet_file(str(path)).metadata
    cuts, held = [0], 0
    for group in range(about.num_row_groups):
        held += about.row_group(group).total_byte_size
        if held >= target or group == about.num_row_groups - 1:
            cuts.append(group + 1)
            held = 0
    return cuts if len(cuts) > 1 else [0, 0]


def _parquet(piece: Piece, columns: list[str] | None) -> Iterator[Record]:
    import pyarrow

    file = _parquet_file(piece.path)
    names = file.schema_arrow.names
    wanted = names if columns is None else [name for name in columns if name in names]
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    each = piece.size // rows
    try:
        for batch in file.iter_batches(batch_size=64, row_groups=groups, columns=wanted):
            for values in batch.to_pylist():
                yield Record(values, lambda row=row: f"{piece.path}, row {row:,}", each)
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{piece.path}, after row {row:,}: cannot be read: {_first_line(error)}; copy it again"
        ) from None


# Hugging Face datasets


def open_dataset(source: Source) -> Any:
    """A saved folder, or a dataset by its id (hf:owner/name), which may be downloaded."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"reading {source.path} needs the package datasets; install it: pip install datasets"
        ) from None
    require_floors("datasets", "pyarrow")
    name = source.path.removeprefix("hf:")
    try:
        if Path(name).expanduser().is_dir() and not source.path.startswith("hf:"):
            found = datasets.load_from_disk(str(Path(name).expanduser()))
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # whatever its many parts raise
        raise ValueError(f"the dataset {source.path} cannot be opened: {_first_line(error)}") from None
    if isinstance(found, dict):
        splits = [str(name) for name in found]
        split = source.split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
        if split not in splits:
            asked = "" if split is None else f" no {split!r}{did_you_mean(split, splits)};"
            raise ValueError(
                f"the dataset {source.path} has{asked} the splits {', '.join(splits)}; choose one with split"
            )
        found = found[split]
    return found


def dataset_parts(number: int, source: Source) -> tuple[list[Part], str]:
    """Parts of a dataset, and its fingerprint."""
    found = open_dataset(source)
    size = int(found.data.nbytes)
    count = max(1, min(-(-size // _LEAST), 256, len(found)))
    cuts = [len(found) * i // count for i in range(count + 1)]
    pieces = [Piece(source.path, a, b, size // count) for a, b in pairwise(cuts)]
    parts = [Part(number, "datasets", (piece,)) for piece in pieces]
    return parts, str(found._fingerprint)


def _datasets(piece: Piece, source: Source, columns: list[str] | None) -> Iterator[Record]:
    found = open_dataset(source)
    if columns is not None:
        found = found.select_columns([name for name in columns if name in found.column_names])
    each = piece.size // max(1, piece.stop - piece.start)
    for row in range(piece.start, piece.stop, 64):
        block = found[row : min(row + 64, piece.stop)]
        for at in range(len(next(iter(block.values())))):
            values = {name: column[at] for name, column in block.items()}
            yield Record(values, lambda row=row + at: f"{source.path}, row {row:,}", each)


# npy


def read_arrays(path: str) -> Iterator[tuple[Iterator[np.ndarray], int]]:
    """Documents of a .npy file: each its ids in pieces, and its number."""
    tokens = _load_array(path)
    if tokens.ndim == 2:
        bounds = np.arange(tokens.shape[0] + 1) * tokens.shape[1]
        tokens = tokens.reshape(-1)
    else:
        beside = str(offsets_of(Path(path)))
        bounds = _load_array(beside) if os.path.exists(beside) else np.array([0, len(tokens)])
        steps = np.diff(bounds.astype(np.int64))
        if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(tokens) or (steps < 0).any():
            raise ValueError(
                f"{beside} must rise from 0 to the {len(tokens):,} tokens of {path}, one number per document and one more; it has "
                f"{len(bounds):,} numbers{f' from {int(bounds[0]):,} to {int(bounds[-1]):,}' if bounds.size else ''}"
            )
    for number in range(len(bounds) - 1):
        start, stop = int(bounds[number]), int(bounds[number + 1])
        yield (np.asarray(tokens[a : min(a + _CHUNK, stop)]) for a in range(start, stop, _CHUNK)), number


def _load_array(path: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        cause = "it holds Python objects" if "bjects" in str(error) else _first_line(error)
        raise ValueError(f"{path} cannot be read: {cause}; save an array of whole numbers with numpy.save") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        about = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise ValueError(f"{path} is {about}; token ids are whole numbers in one or two dimensions")
    return array


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
