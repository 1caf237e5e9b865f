"""Reading parts: one function per format, each yielding records with their place.

A place is worked out only when something is wrong with a record: counting the lines of a jsonl file up to a byte costs
a second per gigabyte, once, and only then.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..base.versions import require_floors
from .find import OTHER_SPLIT, Files, LeftOut
from .parquet import group_cuts, parquet_columns, read_parquet
from .record import Record, first_line
from .source import Part, Piece, Source, did_you_mean
from .stamps import Stamp, open_steady, stamp

_CHUNK = 1 << 18  # bytes of a text
_LEAST, _MOST = 32 << 20, 1 << 30  # bytes of a part
_LINE = 1 << 30  # bytes of the longest line
_WHOLE = 2 << 30  # bytes of the largest array of JSON
_ABOUT = ("dataset_dict.json", "dataset_info.json", "state.json")  # beside the splits of a saved dataset


def split_parts(source: int, files: Files) -> list[Part]:
    """Cut large files, put small ones together. It depends on the files only, so any number of workers writes the same shards."""
    total = sum(files.stamps[path].bytes for path in files.paths)
    target = min(max(total // 256, _LEAST), _MOST)
    pieces: list[Piece] = []
    for path in files.paths:
        stamp = files.stamps[path]
        cuts = [0, 1]
        if files.format == "jsonl":
            cuts = [*range(0, stamp.bytes, target), stamp.bytes]
        elif files.format == "parquet":
            cuts = group_cuts(str(path), stamp, target)
        piece_size = max(1, stamp.bytes // (len(cuts) - 1))
        pieces += [Piece(str(path), a, b, piece_size, stamp) for a, b in pairwise(cuts)]
    parts, held, size = [], [], 0
    for piece in pieces:
        if held and size + piece.size > target:
            parts.append(Part(source, files.format, tuple(held)))
            held, size = [], 0
        held.append(piece)
        size += piece.size
    return [*parts, Part(source, files.format, tuple(held))]


def read_records(form: str, piece: Piece, source: Source, columns: list[str] | None) -> Iterator[Record]:
    """The records of a piece of jsonl, json, parquet or datasets. columns: which ones, as the data calls them; None = all."""
    if form == "jsonl":
        return _jsonl(piece)
    if form == "json":
        return _json(piece)
    if form == "parquet":
        return read_parquet(piece, columns)
    assert form == "datasets"
    return _datasets(piece, source, columns)


def first_columns(form: str, piece: Piece, source: Source) -> tuple[list[str], str]:
    """Columns of the first record of a piece, and where it is."""
    if form == "parquet":
        return parquet_columns(piece), piece.path
    if form == "datasets":
        return list(open_dataset(source).column_names), source.path
    for record in _jsonl(piece) if form == "jsonl" else _json(piece):
        return list(record.values), record.place()
    why = "every line of it is blank" if form == "jsonl" else "its array is empty"
    raise ValueError(f"{piece.path} has no record: {why}; remove it, or check how it was written")


# jsonl


def _jsonl(piece: Piece) -> Iterator[Record]:
    """Lines that start in the piece's range of bytes."""
    with open_steady(piece.path, piece.stamp) as file:
        if piece.start:
            file.seek(piece.start - 1)
            while (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass  # the line that began before belongs to the piece before
        at = file.tell()
        while at < piece.stop:
            line = file.readline(_LINE)
            if not line:
                break
            start, at = at, at + len(line)
            if len(line) == _LINE:
                raise ValueError(
                    f"{piece.path}: the line that begins at byte {start:,} has {_LINE:,} bytes or more; a text as long as that "
                    "belongs into a .txt file, which is read in pieces"
                )
            body = line.removeprefix(codecs.BOM_UTF8) if start == 0 else line
            if not body.strip():
                continue

            def place(start: int = start) -> str:
                return f"{piece.path}:{_line_number(piece, start)}"

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


# json


def _json(piece: Piece) -> Iterator[Record]:
    """The objects of an array, which is read whole."""
    if piece.stamp is not None and piece.stamp.bytes > _WHOLE:
        raise ValueError(
            f"{piece.path} is {piece.stamp.bytes:,} bytes of JSON that would be read whole (limit {_WHOLE:,}); make it one object "
            "a line: jq -c '.[]' FILE.json > FILE.jsonl"
        )
    with open_steady(piece.path, piece.stamp) as file:
        body = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        records = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{piece.path}: not valid UTF-8 at byte {error.start:,}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        lines = "; it has more behind its first value: if that is one object a line, give format: jsonl"
        raise ValueError(
            f"{piece.path}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}"
            f"{lines if error.msg == 'Extra data' else ''}"
        ) from None
    except RecursionError:
        raise ValueError(f"{piece.path}: the JSON is nested too deeply to be read") from None
    if not isinstance(records, list):
        raise ValueError(
            f"{piece.path} is JSON of a {type(records).__name__}, not an array of records: write [{{...}}, {{...}}], or one object "
            "a line into a .jsonl file"
        )
    for number, record in enumerate(records, 1):
        place = partial("{}, record {:,}".format, piece.path, number)
        if not isinstance(record, dict):
            raise ValueError(f"{place()} is a {type(record).__name__}, not an object")
        yield Record(record, place, len(body) // len(records))


def _line_number(piece: Piece, start: int) -> int:
    count = 1
    with open_steady(piece.path, piece.stamp) as file:
        while start > 0 and (block := file.read(min(start, _CHUNK))):
            count += block.count(b"\n")
            start -= len(block)
    return count


# txt


def read_text(path: str, stamp: Stamp | None = None) -> Iterator[tuple[str, int]]:
    """A file of text in pieces, each with the bytes it took."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    with open_steady(path, stamp) as file:
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


# Hugging Face datasets


def open_dataset(source: Source) -> Any:
    """A saved folder, or with format datasets one by its id (owner/name, hf:owner/name@revision), which may be downloaded."""
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
            dataset = datasets.load_from_disk(str(Path(name).expanduser()))
        else:
            repo, _, revision = name.partition("@")
            dataset = datasets.load_dataset(repo, revision=revision or None)
    except Exception as error:  # whatever its many parts raise
        raise ValueError(f"the dataset {source.path} cannot be opened: {first_line(error)}") from None
    if isinstance(dataset, dict):
        splits = list(map(str, dataset))
        split = source.split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
        if split not in splits:
            asked = "" if split is None else f" no {split!r}{did_you_mean(split, splits)};"
            raise ValueError(
                f"the dataset {source.path} has{asked} the splits {', '.join(splits)}; choose one with split"
            )
        dataset = dataset[split]
    return dataset


def dataset_parts(number: int, source: Source) -> tuple[list[Part], str, Files]:
    """Parts of a dataset, its fingerprint, and its files."""
    dataset = open_dataset(source)
    size = int(dataset.data.nbytes)
    count = max(1, min(-(-size // _LEAST), 256, len(dataset)))
    cuts = [len(dataset) * i // count for i in range(count + 1)]
    pieces = [Piece(source.path, a, b, size // count) for a, b in pairwise(cuts)]
    parts = [Part(number, "datasets", (piece,)) for piece in pieces]
    return parts, str(dataset._fingerprint), dataset_files(source, dataset)


def dataset_files(source: Source, dataset: Any = None) -> Files:
    """The files a dataset is read from, and what else lies in a saved folder: its other splits, and what is none of it."""
    dataset = open_dataset(source) if dataset is None else dataset
    read = [Path(entry["filename"]).resolve() for entry in dataset.cache_files]
    folder = Path(source.path).expanduser()
    left_out: LeftOut = {}
    if not source.path.startswith("hf:") and folder.is_dir():
        inside = sorted(Path(where).resolve() / name for where, _, names in os.walk(folder) for name in names)
        about = {path.parent / name for path in read for name in ("state.json", "dataset_info.json")}
        read += [path for path in inside if path in about and path not in read]
        others = [path for path in inside if path not in set(read) and path.name not in _ABOUT]
        if others:
            left_out[OTHER_SPLIT] = [os.path.relpath(path, folder.resolve()) for path in others]
    read = sorted(set(read))
    return Files("datasets", tuple(read), {path: stamp(path) for path in read}, left_out)


def _datasets(piece: Piece, source: Source, columns: list[str] | None) -> Iterator[Record]:
    dataset = open_dataset(source)
    if columns is not None:
        dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
    row_size = piece.size // max(1, piece.stop - piece.start)
    for row in range(piece.start, piece.stop, 64):
        block = dataset[row : min(row + 64, piece.stop)]
        for at in range(len(next(iter(block.values())))):
            values = {name: column[at] for name, column in block.items()}
            yield Record(values, lambda row=row + at: f"{source.path}, row {row:,}", row_size)
