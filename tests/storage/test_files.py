"""Checkpoint folders: published whole, found when complete, skipped when damaged, pruned without losing the way back."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from ithaca.storage import files
from ithaca.storage.files import CheckpointError


def make(folder: Path, step: int, content: bytes = b"numbers") -> Path:
    """A published checkpoint of two small files."""
    hidden = files.start(folder, step, "aaaa", 10)
    (hidden / "shard").write_bytes(content)
    entries = {"shard": {"size": len(content), "sha256": files.sha256_of(hidden / "shard")}}
    entries["state.json"] = files.write_json(hidden / "state.json", {"format": 1, "step": step})
    return files.publish(hidden, step, "aaaa", entries)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_checkpoint_is_complete_and_named(tmp_path: Path):
    path = make(tmp_path / "new/folder", 40)
    assert names(path.parent) == ["LATEST", "step-40"] and (path.parent / "LATEST").read_text() == "step-40\n"
    assert names(path) == ["manifest.json", "shard", "state.json"]
    assert files.verify(path) == [] and files.latest(path.parent) == path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 40 and manifest["run"] == "aaaa" and manifest["files"]["shard"]["size"] == 7


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "shard").unlink(), "shard is missing"),
        (lambda path: (path / "shard").write_bytes(b"num"), "shard has 3 bytes, the manifest says 7"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json does not exist"),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "has format None, this ithaca reads 1"),
        (
            lambda path: shutil.copy(path.parent / "step-10/manifest.json", path / "manifest.json"),
            r"does not belong to this folder \(step 10\)",
        ),
    ],
    ids=["lost", "cut off", "no manifest", "half a manifest", "another file", "of another step"],
)
def test_a_damaged_one_is_skipped_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, words: str):
    good, bad = make(tmp_path, 10), make(tmp_path, 20, b"NUMBERS")
    damage(bad)
    with caplog.at_level(logging.WARNING, "ithaca"):
        assert files.latest(tmp_path) == good
    assert any(str(bad) in record.getMessage() for record in caplog.records)
    (text,) = files.verify(bad)
    assert re.search(words, text)


def test_bytes_that_changed_are_found_by_reading_them(tmp_path: Path):
    path = make(tmp_path, 10)
    (path / "shard").write_bytes(b"numbbrs")
    assert files.damage(path) == [] and files.latest(tmp_path) == path
    assert files.verify(path) == ["shard has changed since it was saved (SHA-256 differs)"]
    (path / "more").touch()
    assert files.verify(path)[1:] == ["more is not in the manifest"]


def test_a_manifest_cannot_point_elsewhere(tmp_path: Path):
    path = make(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"size": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "has a bad entry: '../../secret'" in files.verify(path)[0]


def test_a_kill_at_any_moment_leaves_the_older_ones(tmp_path: Path):
    """The states between the steps of publishing."""
    old = make(tmp_path, 10)
    hidden = files.start(tmp_path, 20, "bbbb", 10)
    (hidden / "shard").write_bytes(b"half")
    assert files.latest(tmp_path) == old  # killed while writing
    files.write_json(hidden / "manifest.json", {"format": 1, "step": 20, "files": {}})
    assert files.latest(tmp_path) == old  # killed before the rename
    new = make(tmp_path, 30)
    (tmp_path / "LATEST").write_text("step-10\n")
    assert files.latest(tmp_path) == new  # killed between the rename and LATEST
    (tmp_path / ".LATEST.bbbb").write_text("step-3")
    gone = files.remove_unfinished(tmp_path)
    assert gone == [hidden] and names(tmp_path) == ["LATEST", "step-10", "step-30"]


def test_a_published_checkpoint_is_never_overwritten_but_a_damaged_one_is_replaced(tmp_path: Path):
    path = make(tmp_path, 10)
    with pytest.raises(
        CheckpointError, match="step-10 exists already, and a published checkpoint is never overwritten"
    ):
        make(tmp_path, 10)
    assert names(tmp_path) == ["LATEST", "step-10"]
    (path / "shard").unlink()
    assert make(tmp_path, 10, b"again") == path and files.verify(path) == []
    assert names(tmp_path) == ["LATEST", "step-10"]


def test_files_that_do_not_belong_stop_the_publishing(tmp_path: Path):
    hidden = files.start(tmp_path, 10, "aaaa", 10)
    (hidden / "stranger").touch()
    with pytest.raises(CheckpointError, match="stranger"):
        files.publish(hidden, 10, "aaaa", {})
    assert files.latest(tmp_path) is None


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"not enough disk .* needs 1000000000.0 GB, .* GB are free; free some space"
    ):
        files.start(tmp_path, 10, "aaaa", 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot take a checkpoint"):
        files.start(tmp_path / "file", 10, "aaaa", 1)
    assert names(tmp_path) == ["file"]


def test_keeping_counts_complete_ones_only(tmp_path: Path):
    for step in range(10, 70, 10):
        make(tmp_path, step)
    (tmp_path / "step-60/shard").unlink()
    (tmp_path / "step-cheap").mkdir()
    gone = files.prune(tmp_path, keep_last=2, keep_every=20)
    assert [path.name for path in gone] == ["step-30", "step-10"]
    assert names(tmp_path) == ["LATEST", "step-20", "step-40", "step-50", "step-60", "step-cheap"]
    assert files.prune(tmp_path, keep_last=1) == [tmp_path / "step-40", tmp_path / "step-20"]
    with pytest.raises(ValueError, match="keep at least 1"):
        files.prune(tmp_path, keep_last=0)


def test_nothing_there_is_no_checkpoint(tmp_path: Path):
    assert files.latest(tmp_path) is None and files.latest(tmp_path / "nowhere") is None
    assert files.remove_unfinished(tmp_path / "nowhere") == []
