"""The file that hashes what is written into it: the same bytes and digest on any file system, errors as they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ithaca.storage import digest, place, stream
from ithaca.storage.place import DirectFile
from ithaca.storage.stream import BlockStream

BLOCK = 1 << 14
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK, 25 * BLOCK + 13]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (digest, place, stream):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without direct writes that says so at once."""
    original = os.open

    def opened(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *more)

    monkeypatch.setattr(os, "open", opened)


def refuse_at_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says so when it is too late."""
    import fcntl

    original = os.pwrite

    def put(file: int, data: Any, place: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(file, data, place)

    monkeypatch.setattr(os, "pwrite", put)


def write_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes less than it was given, down to odd rests."""
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: original(file, data[:5000], place))


@pytest.mark.parametrize("way", [None, refuse_at_open, refuse_at_write, write_little])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any, size: int):
    data = os.urandom(size)
    if way is not None:
        way(monkeypatch)
    problems: list[Exception] = []
    file = BlockStream(DirectFile(tmp_path / "file"), problems.append)
    at, step = 0, 1
    while at < size:  # pieces of all sizes, some larger than a block
        assert file.write(memoryview(data)[at : at + step]) == len(data[at : at + step])
        at, step = at + step, step * 3 % 50_021
    assert file.write(b"") == 0 and file.tell() == size
    file.close()
    path = tmp_path / "file"
    assert path.read_bytes() == data and problems == []
    assert digest.digests({"": path}) == {"": file.sha256} and path.stat().st_mtime_ns == file.modified


def test_an_error_of_a_writing_thread_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    problems: list[Exception] = []
    file = BlockStream(DirectFile(tmp_path / "file"), problems.append)
    with pytest.raises(OSError, match="No space left"):
        file.write(bytes(20 * BLOCK))  # more than there are buffers: it comes out while writing
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert problems and all(isinstance(each, OSError) for each in problems)
