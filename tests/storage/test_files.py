"""Checkpoint folders: published whole, found when complete, skipped when damaged, pruned without losing the way back."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ithaca.storage import check, files
from ithaca.storage.digest import BLOCK, digests
from ithaca.storage.files import CheckpointError, NotWritten
from ithaca.storage.keep import prune, remove_unfinished
from ithaca.storage.publish import probe, publish, start, write_json

STATE = {  # what else a state.json has
    "seed": 0,
    "extra": {},
    "model": {"class": "", "name_or_path": "", "config": {}, "generation_config": None, "adapters": {}, "base": {}},
    "optimizer": None,
    "world": {"size": 1, "stack": {}},
    "rng": [{"torch": "AAAA", "python": [3, "AAAA", None], "numpy": ["MT19937", "AAAA", 0, 0, 0.0]}],
}


def make(folder: Path, step: int, content: bytes = b"numbers") -> Path:
    """A published checkpoint of two small files."""
    draft = start(folder, step, 10)
    shard = draft.hidden / "shard"
    shard.write_bytes(content)
    about = {"format": files.FORMAT, "run": draft.run, "save": draft.save, "step": step, **STATE}
    entries = {"state.json": write_json(draft.hidden / "state.json", about)}
    (digest,) = digests({"shard": shard}).values()
    entries["shard"] = {"size": len(content), "sha256": digest, "modified": shard.stat().st_mtime_ns}
    return publish(draft, entries)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_checkpoint_is_complete_and_named(tmp_path: Path):
    path = make(tmp_path / "new/folder", 40)
    assert names(path.parent) == ["LATEST", "RUN", "step-40"] and (path.parent / "LATEST").read_text() == "step-40\n"
    assert names(path) == ["manifest.json", "shard", "state.json"]
    assert check.verify(path) == [] and files.latest(path.parent) == path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 40 and manifest["files"]["shard"]["size"] == 7
    assert manifest["run"] == (path.parent / "RUN").read_text().strip() and len(manifest["save"]) == 8


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "shard").unlink(), "shard is missing"),
        (lambda path: (path / "shard").write_bytes(b"num"), "shard has 3 bytes, the manifest says 7"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json does not exist"),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "has format None, this ithaca reads 2"),
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
    (text,) = check.verify(bad)
    assert re.search(words, text)


def test_bytes_that_changed_are_found_by_reading_them(tmp_path: Path):
    path = make(tmp_path, 10)
    assert files.touched(path) == []
    (path / "shard").write_bytes(b"numbbrs")
    assert files.damage(path) == [] and files.latest(tmp_path) == path and files.touched(path) == ["shard"]
    assert check.verify(path) == ["shard has changed since it was saved (SHA-256 differs)"]
    (path / "more").touch()
    assert check.verify(path)[1:] == ["more is not in the manifest"]


def test_a_manifest_cannot_point_elsewhere(tmp_path: Path):
    path = make(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"size": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "has a bad entry: '../../secret'" in check.verify(path)[0]


def test_a_kill_at_any_moment_leaves_the_older_ones(tmp_path: Path):
    """The states between the steps of publishing."""
    old = make(tmp_path, 10)
    hidden = start(tmp_path, 20, 10).hidden
    (hidden / "shard").write_bytes(b"half")
    assert files.latest(tmp_path) == old  # killed while writing
    write_json(hidden / "manifest.json", {"format": 2, "step": 20, "files": {}})
    assert files.latest(tmp_path) == old  # killed before the rename
    new = make(tmp_path, 30)
    (tmp_path / "LATEST").write_text("step-10\n")
    assert files.latest(tmp_path) == new  # killed between the rename and LATEST
    (tmp_path / ".LATEST.bbbb").write_text("step-3")
    gone = remove_unfinished(tmp_path)
    assert gone == [hidden] and names(tmp_path) == ["LATEST", "RUN", "step-10", "step-30"]


def test_a_published_checkpoint_is_never_overwritten_but_a_damaged_one_is_replaced(tmp_path: Path):
    path = make(tmp_path, 10)
    with pytest.raises(
        CheckpointError, match="step-10 exists already, and a published checkpoint is never overwritten"
    ):
        make(tmp_path, 10)
    assert names(tmp_path) == ["LATEST", "RUN", "step-10"]
    (path / "shard").unlink()
    assert make(tmp_path, 10, b"again") == path and check.verify(path) == []
    assert names(tmp_path) == ["LATEST", "RUN", "step-10"]


def test_files_that_do_not_belong_stop_the_publishing(tmp_path: Path):
    draft = start(tmp_path, 10, 10)
    (draft.hidden / "stranger").touch()
    with pytest.raises(CheckpointError, match="stranger"):
        publish(draft, {})
    assert files.latest(tmp_path) is None


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path):
    with pytest.raises(NotWritten, match=r"not enough disk .* needs 1000000.0 TB, .* are free; free some space"):
        start(tmp_path, 10, 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(NotWritten, match="cannot take a checkpoint"):
        start(tmp_path / "file", 10, 1)
    assert names(tmp_path) == ["file"]


def test_keeping_counts_complete_ones_only(tmp_path: Path):
    for step in range(10, 70, 10):
        make(tmp_path, step)
    (tmp_path / "step-60/shard").unlink()
    (tmp_path / "step-cheap").mkdir()
    gone = prune(tmp_path, keep_last=2, keep_every=20)
    assert [path.name for path in gone] == ["step-30", "step-10"]
    assert names(tmp_path) == ["LATEST", "RUN", "step-20", "step-40", "step-50", "step-60", "step-cheap"]
    assert prune(tmp_path, keep_last=1) == [tmp_path / "step-40", tmp_path / "step-20"]
    with pytest.raises(ValueError, match="keep at least 1"):
        prune(tmp_path, keep_last=0)


def test_nothing_there_is_no_checkpoint(tmp_path: Path):
    assert files.latest(tmp_path) is None and files.latest(tmp_path / "nowhere") is None
    assert remove_unfinished(tmp_path / "nowhere") == []


def test_a_newest_one_that_was_changed_does_not_push_good_ones_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Same size, other bytes. It is read because its time says that somebody was there."""
    for step in (10, 20, 30):
        make(tmp_path, step)
    (tmp_path / "step-30/shard").write_bytes(b"NUMBERS")
    with caplog.at_level(logging.WARNING, "ithaca"):
        assert prune(tmp_path, keep_last=1) == [tmp_path / "step-10"]
    assert "step-30 is damaged and does not count as one to keep: shard has changed" in caplog.text
    assert names(tmp_path) == ["LATEST", "RUN", "step-20", "step-30"]
    os.utime(tmp_path / "step-20/shard")  # touched, but the same bytes
    assert prune(tmp_path, keep_last=1) == []


def test_checkpoints_of_two_runs_and_parts_of_two_checkpoints_do_not_mix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    mine, theirs = make(tmp_path / "mine", 10), make(tmp_path / "theirs", 20)
    guest = Path(shutil.copytree(theirs, tmp_path / "mine/step-20"))
    with caplog.at_level(logging.WARNING, "ithaca"):
        assert files.latest(tmp_path / "mine") == mine
    assert "it is of run" in caplog.text and check.verify(guest) == []
    assert prune(tmp_path / "mine", keep_last=1) == []
    alone = tmp_path / "alone"
    shutil.copytree(theirs, alone / "step-20")
    assert files.latest(alone) == alone / "step-20"  # a folder of its own: whoever put it there wants it
    shutil.copy(make(tmp_path / "mine", 30) / "state.json", mine / "state.json")  # and the manifest is made to fit
    about = json.loads((mine / "manifest.json").read_text())
    (digest,) = digests({"": mine / "state.json"}).values()
    about["files"]["state.json"] = {"size": (mine / "state.json").stat().st_size, "sha256": digest}
    (mine / "manifest.json").write_text(json.dumps(about))
    (text,) = check.verify(mine)
    assert "is made of parts of two checkpoints: state.json says save" in text


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path):
    probe(tmp_path / "new")
    assert names(tmp_path / "new") == []
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file/x", "Not a directory"), (Path("/proc/self/x"), "No such file or directory")):
        with pytest.raises(
            CheckpointError, match=f"checkpoints cannot be written to {place} .{why}.; nothing was trained"
        ):
            probe(place)


def test_a_digest_can_be_checked_with_common_tools(tmp_path: Path):
    """The command in digest.py; and a file of one block has the digest that sha256sum prints."""
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(os.urandom(BLOCK) * 2 + b"end")
    small.write_bytes(b"x")
    (tmp_path / "empty").touch()
    seen: list[int] = []
    found = digests({name: tmp_path / name for name in ("large", "small", "empty", "lost")}, seen.append)
    blocks = f"split -b 16M --filter='openssl dgst -sha256 -binary' {large} | sha256sum"
    printed = subprocess.run(["sh", "-c", blocks], capture_output=True, text=True, check=True).stdout
    assert found["large"] == printed.split()[0] and sum(seen) == 2 * BLOCK + 4
    assert found["small"] == hashlib.sha256(b"x").hexdigest() and found["empty"] == hashlib.sha256(b"").hexdigest()
    assert isinstance(found["lost"], FileNotFoundError)
