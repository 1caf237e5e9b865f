"""Rows of parquet files, within limits.

A parquet file of 3 KB can hold gigabytes: compressed pages of one letter, a value that a million rows share, a run of a
billion equal ids. So what its parts will unpack to is read from the footer and the header of the dictionary before any of it is
unpacked; how many rows are unpacked at a time depends on it; and what came out so far is counted. Real text shrinks to a tenth,
seldom to a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..base.versions import require_floors
from .record import Record, first_line
from .source import Piece
from .stamps import Stamp, open_steady

_RATIO = 1000  # times its size that a file may unpack to
_FREE = 256 << 20  # bytes that anything may unpack to; also what is unpacked at a time
_ROWS = 64  # unpacked at a time
_DICTIONARY = 2  # the type of such a page
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}  # of one value, in memory; others: 8


def parquet_columns(piece: Piece) -> list[str]:
    with _opened(piece.path, piece.stamp) as file:
        return file.schema_arrow.names


def group_cuts(path: str, stamp: Stamp, target: int) -> list[int]:
    """Row groups, by size: where parts of a file begin and end."""
    cuts, held = [0], 0
    with _opened(path, stamp) as file:
        about = file.metadata
        for group in range(about.num_row_groups):
            held += about.row_group(group).total_byte_size
            if held >= target or group == about.num_row_groups - 1:
                cuts.append(group + 1)
                held = 0
    return cuts if len(cuts) > 1 else [0, 0]


def read_parquet(piece: Piece, columns: list[str] | None) -> Iterator[Record]:
    with _opened(piece.path, piece.stamp) as file:
        yield from _records(file, piece, columns)


def _records(file: Any, piece: Piece, columns: list[str] | None) -> Iterator[Record]:
    import pyarrow

    names = file.schema_arrow.names
    wanted = names if columns is None else [name for name in columns if name in names]
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    row_size = piece.size // rows
    unpacked = 0
    try:
        for group in groups:
            at_once = _at_once(piece, file.metadata.row_group(group), set(wanted))
            for batch in file.iter_batches(batch_size=at_once, row_groups=[group], columns=wanted):
                unpacked += batch.nbytes
                _check_ratio(piece.path, unpacked, piece.size)
                for values in batch.to_pylist():
                    yield Record(values, lambda row=row: f"{piece.path}, row {row:,}", row_size)
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{piece.path}, after row {row:,}: cannot be read: {first_line(error)}; copy it again"
        ) from None


@contextmanager
def _opened(path: str, stamp: Stamp | None) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"reading {path} needs the package pyarrow; install it: pip install pyarrow") from None
    require_floors("pyarrow")
    with open_steady(path, stamp) as raw:
        try:
            file = pyarrow.parquet.ParquetFile(raw)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} cannot be read as parquet: {first_line(error)}; it may have been cut short: copy it again"
            ) from None
        yield file


def _at_once(piece: Piece, group: Any, wanted: set[str]) -> int:
    """How many rows of a group may be unpacked together. ValueError if it would unpack to more than it can hold."""
    rows = _ROWS
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema.split(".")[0] not in wanted:
            continue
        size = max(column.total_uncompressed_size, column.num_values * _WIDTHS.get(column.physical_type, 8))
        _check_ratio(piece.path, size, column.total_compressed_size)
        # rows may share a value, or the beginning of one; then each of them can be as large as all that is stored
        shared = (
            column.total_uncompressed_size if "DELTA_BYTE_ARRAY" in column.encodings else _dictionary(piece, column)
        )
        rows = min(rows, max(1, _FREE // max(1, shared)))
    return rows


def _dictionary(piece: Piece, column: Any) -> int:
    """Bytes of a column's dictionary, unpacked: from the header of its first page (in Thrift: type, unpacked size, ...), as the
    footer need not say that there is one."""
    starts = [column.data_page_offset, column.dictionary_page_offset if column.has_dictionary_page else None]
    with open_steady(piece.path, piece.stamp) as file:
        file.seek(max(0, min(start for start in starts if start is not None)))
        raw = file.read(32)
    at, numbers = 0, []
    while len(numbers) < 2 and at < len(raw) and raw[at] == 0x15:  # the next field, an integer of 32 bits
        value = shift = 0
        at += 1
        while at < len(raw):
            value |= (raw[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if raw[at - 1] < 0x80:
                break
        numbers.append(value >> 1)
    if len(numbers) < 2:
        return column.total_uncompressed_size  # the worst it could be
    return numbers[1] if numbers[0] == _DICTIONARY else 0


def _check_ratio(path: str, size: int, stored: int) -> None:
    if size > max(_FREE, _RATIO * stored):
        raise ValueError(
            f"{path} unpacks to more than {_RATIO:,} times its size ({stored:,} bytes hold {size:,}); a file like that is made to "
            "fill a memory or a disk. If it is meant, write it as jsonl"
        )
