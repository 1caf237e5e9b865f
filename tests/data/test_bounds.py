"""What a received file holds is limited before it is believed: parquet and .npy files that say more than they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.data import parquet as reading
from ithaca.data import readers
from ithaca.data.arrays import read_arrays
from ithaca.data.pack import pack
from ithaca.data.source import Piece, Source

arrow = pytest.importorskip("pyarrow")
tables = pytest.importorskip("pyarrow.parquet")
MB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of real files would take seconds to reach."""
    monkeypatch.setattr(reading, "_FREE", 16 * MB)


def written(path: Path, table: Any, **more: Any) -> Path:
    tables.write_table(table, path, compression="zstd", write_statistics=False, store_schema=False, **more)
    return path


def read(path: Path, most: int = 1 << 40) -> int:
    """Characters, or numbers, that come out."""
    piece = Piece(str(path), 0, tables.ParquetFile(path).num_row_groups, path.stat().st_size)
    size = 0
    for record in reading.read_parquet(piece, None):
        size += sum(map(len, record.values.values()))
        assert size <= most, "more came out than the limit allows"
    return size


def test_compressed_pages(tmp_path: Path):
    """One letter, twenty million times."""
    path = written(tmp_path / "a.parquet", arrow.table({"text": ["a" * (20 * MB)]}), use_dictionary=False)
    assert path.stat().st_size < MB / 64
    with pytest.raises(ValueError, match=r"a\.parquet unpacks to more than 1,000 times its size .* write it as jsonl"):
        read(path, most=0)


def test_a_value_that_all_rows_share(tmp_path: Path):
    """In a dictionary it is stored once: 32 KB for a thousand rows, 32 MB in all, in a file of one."""
    table = arrow.table({"text": arrow.array(["a" * (MB // 32)] * 1000).dictionary_encode()})
    path = written(tmp_path / "a.parquet", table, use_dictionary=True)
    assert path.stat().st_size < MB / 64
    with pytest.raises(ValueError, match="unpacks to more than 1,000 times its size"):
        read(path, most=18 * MB)


def test_rows_at_once_follow_from_the_dictionary(tmp_path: Path):
    """Eight values of half a megabyte each are shared: not 64 rows may be unpacked at a time."""
    table = arrow.table({"text": arrow.array([letter * (MB // 2) for letter in "abcdefgh"]).dictionary_encode()})
    path = written(tmp_path / "a.parquet", table, use_dictionary=True, dictionary_pagesize_limit=100 * MB)
    file = tables.ParquetFile(path)
    piece = Piece(str(path), 0, 1, path.stat().st_size)
    assert reading._dictionary(piece, file.metadata.row_group(0).column(0)) == 8 * (MB // 2 + 4)
    assert reading._at_once(piece, file.metadata.row_group(0), {"text"}) == 3
    plain = written(tmp_path / "b.parquet", arrow.table({"text": ["one", "two"] * 50}), use_dictionary=True)
    few = Piece(str(plain), 0, 1, plain.stat().st_size)
    assert reading._at_once(few, tables.ParquetFile(plain).metadata.row_group(0), {"text"}) == 64


def test_runs_of_one_id(tmp_path: Path):
    """Three million times token 7, as a run."""
    offsets = arrow.array([0, 3_000_000], arrow.int32())
    ids = arrow.ListArray.from_arrays(offsets, arrow.array(np.full(3_000_000, 7, np.int64)))
    path = written(tmp_path / "a.parquet", arrow.table({"input_ids": ids}), use_dictionary=True)
    assert path.stat().st_size < MB / 64
    with pytest.raises(ValueError, match="unpacks to more than 1,000 times its size"):
        read(path, most=0)


def test_columns_that_are_not_asked_for_do_not_count(tmp_path: Path):
    table = arrow.table({"text": ["hello"], "image": ["a" * (20 * MB)]})
    path = written(tmp_path / "a.parquet", table, use_dictionary=False)
    piece = Piece(str(path), 0, 1, path.stat().st_size)
    assert [record.values for record in reading.read_parquet(piece, ["text"])] == [{"text": "hello"}]


def test_real_text_has_room(tmp_path: Path):
    """Compressed ten times and more, in several groups."""
    texts = [f"line {number}: the same words again and again. " * 50 for number in range(2000)]
    path = written(tmp_path / "a.parquet", arrow.table({"text": texts}), row_group_size=300)
    assert sum(map(len, texts)) > 10 * path.stat().st_size and read(path) == sum(map(len, texts))


def header(shape: str, descr: str = "<i8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "shape", ["(1000000000000,)", "(10**3,)", "(-5,)", "(99999999999999999999,)", "(1000000000000, 0)", "(3, -1)"]
)
def test_arrays_that_say_more_than_they_have(tmp_path: Path, shape: str):
    (tmp_path / "a.npy").write_bytes(header(shape) + bytes(80))
    with pytest.raises(
        ValueError, match=r"a\.npy (has 80 bytes of numbers, its header says|cannot be read|is int64 of shape)"
    ):
        list(read_arrays(str(tmp_path / "a.npy")))


def test_arrays_of_all_orders_and_types(tmp_path: Path):
    rows = np.arange(12).reshape(3, 4)
    for array in (rows, np.asfortranarray(rows), rows.astype(">i4"), rows.astype("<u2"), rows.T.copy().T):
        np.save(tmp_path / "a.npy", array)
        found = [np.concatenate(list(pieces)).tolist() for pieces, _ in read_arrays(str(tmp_path / "a.npy"))]
        assert found == rows.tolist()


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [' + "1, " * 1000)
    with pytest.raises(ValueError, match=r"the line that begins at byte 22 has 1,000 bytes or more; .* \.txt file"):
        pack([Source(str(tmp_path / "a.jsonl"))], tmp_path / "p", vocabulary=9, workers=1, quiet=True)
