"""Training compares the checksums of packed data before its first step, and not again until a file is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ithaca.base.run_folder import RunFolder
from ithaca.config import load
from ithaca.config.schema import Config
from ithaca.data import folder as packed_folder
from ithaca.data.folder import Packed
from ithaca.data.samples import check_files, pack_sources

from .make import pack_random


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run on a folder that somebody else packed."""
    pack_random(tmp_path / "p", 20, 50, masked=True, vocabulary=100)
    given = [f"data.packed={tmp_path / 'p'}", "data.sources=[]", "data.context=64", "train.steps=1"]
    return load(None, [*given, f"run.folder={tmp_path / 'run'}"], "tiny_cpu").config


def start(config: Config) -> list[str]:
    said: list[str] = []
    pack_sources(config, said.append)
    return said


def flip(path: Path) -> None:
    """One bit, and the times of before."""
    before, raw = path.stat(), bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_bit_is_found_at_the_first_start(config: Config, tmp_path: Path):
    flip(tmp_path / "p/tokens-00000.bin")
    Packed(tmp_path / "p")  # sizes are right
    with pytest.raises(ValueError, match=r"tokens-00000\.bin has changed since it was written \(SHA-256 differs\)"):
        start(config)


def test_a_start_reads_once_and_a_resume_only_what_was_touched(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    real = packed_folder.sha256_of

    def watched(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(packed_folder, "sha256_of", watched)
    start(config)
    assert sorted(read) == sorted(Packed(tmp_path / "p").manifest["files"])
    read.clear()
    start(config)
    assert read == []
    os.utime(tmp_path / "p/mask-00000.bin")
    start(config)
    assert read == ["mask-00000.bin"]
    flip(tmp_path / "p/documents.bin")  # size and time as they were
    with pytest.raises(ValueError, match=r"documents\.bin"):
        start(config)


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', "{", "[" * 10_000])
def test_a_memory_that_is_damaged_is_none(config: Config, tmp_path: Path, text: str):
    start(config)
    path = RunFolder(config.run.folder).checked
    assert list(json.loads(path.read_text())) == [str((tmp_path / "p").resolve())]
    path.write_text(text)
    start(config)
    assert str((tmp_path / "p").resolve()) in json.loads(path.read_text())


def test_what_was_just_written_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed = pack_random(tmp_path / "p", 20, 50, masked=False)

    def never(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(packed_folder, "sha256_of", never)
    check_files(packed, tmp_path / "checked.json", lambda line: None)
    check_files(Packed(tmp_path / "p"), tmp_path / "checked.json", lambda line: None)


def test_reading_for_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ithaca.data import samples

    monkeypatch.setattr(samples, "_OFTEN", -1.0)
    pack_random(tmp_path / "p", 20, 50, masked=False)
    said: list[str] = []
    check_files(Packed(tmp_path / "p"), tmp_path / "checked.json", said.append)
    assert said[-1].startswith(f"checking {tmp_path / 'p'}: ") and said[-1].endswith(" GB") and len(said) == 3
