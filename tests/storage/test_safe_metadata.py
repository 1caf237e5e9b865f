"""A checkpoint is data: what someone writes into its one pickle is never carried out."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ithaca.storage import files
from ithaca.storage.checkpoint import CheckpointError, load, save
from ithaca.storage.digest import digests
from ithaca.storage.export import export_checkpoint
from ithaca.storage.safe_metadata import read_metadata

from .runs import started, train


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Import:
    def __reduce__(self) -> Any:
        return __import__, ("antigravity",)


class TorchLoad:
    def __reduce__(self) -> Any:
        return torch.load, ("/dev/null",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run, optimizer = started(stack=dict(shard_parameters=False))
    train(run, optimizer, range(1))
    return save(tmp_path / "checkpoints", run, optimizer, {}, step=1).wait()


def forge(path: Path, content: Any) -> None:
    """Replace the records, and the manifest with them, as an attacker would."""
    (path / ".metadata").write_bytes(pickle.dumps(content))
    manifest = json.loads((path / "manifest.json").read_text())
    (digest,) = digests({"": path / ".metadata"}).values()
    manifest["files"][".metadata"] = {"size": (path / ".metadata").stat().st_size, "sha256": digest}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert files.changed(path, list(files.listed(path))) == [], "its bytes are what the manifest says"


def records(path: Path) -> Metadata:
    return read_metadata(path, files.listed(path))


def test_what_is_saved_is_tensors_only(checkpoint: Path):
    metadata = records(checkpoint)
    assert metadata.state_dict_metadata and not any(
        isinstance(entry, BytesStorageMetadata) for entry in metadata.state_dict_metadata.values()
    )
    assert any(key.endswith(".step") for key in metadata.state_dict_metadata)
    assert {path.name for path in checkpoint.iterdir()} == {".metadata", "__0_0.distcp", "manifest.json", "state.json"}
    assert str(checkpoint.parent).encode() not in (checkpoint / ".metadata").read_bytes(), "no paths of this machine"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["optimizer"]["groups"][0]["options"]["betas"] == [0.9, 0.999]


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_a_command_in_the_records_is_not_run(checkpoint: Path, tmp_path: Path, where: str):
    marker = tmp_path / "marker"
    payload: Any = Payload(marker)
    if where == "inside":
        good = records(checkpoint)
        good.planner_data = {"harmless": payload}
        payload = good
    forge(checkpoint, payload)
    run, optimizer = started(stack=dict(shard_parameters=False))
    name = "posix.system" if os.name == "posix" else "nt.system"
    with pytest.raises(CheckpointError, match=rf"refusing to load .*\.metadata: it asks for {name}, .* could run code"):
        load(checkpoint, run, optimizer)
    with pytest.raises(CheckpointError, match=name):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not marker.exists() and not (tmp_path / "out").exists()
    with open(checkpoint / ".metadata", "rb") as file:
        pickle.load(file)
    assert marker.exists(), "the payload works, so it was the reader that stopped it"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Import(), "builtins.__import__"),
        (TorchLoad(), "torch.serialization.load"),
        ({"a": 1}, "it holds a dict"),
    ],
)
def test_other_things_are_refused_too(checkpoint: Path, content: Any, words: str):
    forge(checkpoint, content)
    with pytest.raises(CheckpointError, match=words):
        records(checkpoint)


def test_names_that_reach_into_objects_are_refused(checkpoint: Path):
    """The pickle opcode for a name takes dots: torch, then Size.__class__..."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.")
    with pytest.raises(CheckpointError, match=r"torch\.Size\.__class__"):
        records(checkpoint)
    (checkpoint / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        records(checkpoint)


def test_entries_that_torch_would_unpickle_are_refused(checkpoint: Path):
    good = records(checkpoint)
    good.state_dict_metadata["model.secret"] = BytesStorageMetadata()
    forge(checkpoint, good)
    with pytest.raises(
        CheckpointError, match=r"model\.secret is not a tensor, and torch would unpickle it without limits"
    ):
        records(checkpoint)


def test_records_point_to_files_of_the_checkpoint(checkpoint: Path):
    good = records(checkpoint)
    next(iter(good.storage_data.values())).relative_path = "../../../etc/passwd"
    forge(checkpoint, good)
    with pytest.raises(CheckpointError, match=r"it points to '\.\./\.\./\.\./etc/passwd'"):
        records(checkpoint)
