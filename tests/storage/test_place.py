"""Where checkpoints lie is a choice: a second kind of place, with neither folders nor renames, under everything that uses one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import pytest
import torch

from ithaca.cli.main import main
from ithaca.evaluation.opening import find_model
from ithaca.storage import check, files, place
from ithaca.storage.checkpoint import CheckpointError, load, ready, save
from ithaca.storage.files import Gone
from ithaca.storage.keep import prune, remove_unfinished, unfinished
from ithaca.storage.place import LocalPlace, Place, Stored, place_of
from ithaca.storage.publish import probe, start, write_json

from .runs import started, train, weights
from .test_run_faults import run as run_to

ALONE = dict(shard_parameters=False)


class Bucket:
    """Objects by key, put whole, as object stores have them: no folders, no renames, no second write.

    A folder is a bucket's if it holds a file BUCKET, which says where the objects are. A draft is a prefix of keys. Publishing it
    puts one small object, the checkpoint's name, which says which prefix has its files; removing begins with that object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = Path((folder / "BUCKET").read_text())

    @classmethod
    def takes(cls, folder: Path) -> bool:
        return (folder / "BUCKET").is_file()

    def _object(self, key: str) -> Path:
        return self.objects / quote(key, safe="")

    def _put(self, key: str, data: bytes) -> int:
        self._object(key).write_bytes(data)
        return self._object(key).stat().st_mtime_ns

    def _keys(self, prefix: str = "") -> list[str]:
        return [key for key in (unquote(item.name) for item in self.objects.iterdir()) if key.startswith(prefix)]

    def _prefix(self, name: str) -> str:
        return self._object(name).read_text() if name.startswith("step-") else f"{name}/"

    def _key(self, file: Path) -> str:
        name, *inner = file.relative_to(self.folder).parts
        return self._prefix(name) + inner[0] if inner else name

    def has(self, path: Path) -> bool:
        return path == self.folder or self._object(path.name).exists()

    def entries(self) -> list[Path]:
        return [path for key in self._keys() if place.is_address(path := self.folder / key)]

    def files(self, path: Path) -> dict[str, Stored]:
        prefix = self._prefix(path.name)
        about = {key.removeprefix(prefix): self._object(key).stat() for key in self._keys(prefix)}
        return {name: Stored(status.st_size, status.st_mtime_ns) for name, status in about.items()}

    def open(self, file: Path) -> BinaryIO:
        return self._object(self._key(file)).open("rb")

    def room(self) -> int:
        return 1 << 62

    def begin(self, draft: Path) -> None:
        self._put(draft.name, b"")

    def create(self, file: Path) -> Upload:
        return Upload(self, self._key(file))

    def write_line(self, file: Path, text: str) -> None:
        self._put(file.name, text.encode())

    def publish(self, draft: Path, target: Path) -> None:
        old = self._prefix(target.name) if self.has(target) else None
        self._put(target.name, f"{draft.name}/".encode())
        self._object(draft.name).unlink()
        self._drop(old)

    def remove(self, path: Path) -> None:
        prefix = self._prefix(path.name)
        self._object(path.name).unlink()
        self._drop(prefix)

    def _drop(self, prefix: str | None) -> None:
        for key in self._keys(prefix) if prefix else ():
            self._object(key).unlink()

    def sweep(self) -> None: ...


class Upload:
    """In parts, which may come in any order."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.bucket, self.key = bucket, key
        self.parts: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def write(self, block: memoryview, number: int) -> None:
        with self.lock:
            self.parts[number] = bytes(block)

    def finish(self) -> int:
        return self.bucket._put(self.key, b"".join(self.parts[number] for number in sorted(self.parts)))

    def close(self) -> None: ...


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder whose checkpoints go into a bucket, and nowhere else."""
    objects, checkpoints = tmp_path / "objects", tmp_path / "run/checkpoints"
    objects.mkdir()
    checkpoints.mkdir(parents=True)
    (checkpoints / "BUCKET").write_text(str(objects))
    monkeypatch.setattr(place, "PLACES", [Bucket, LocalPlace])
    yield tmp_path / "run"
    assert [path.name for path in checkpoints.iterdir()] == ["BUCKET"], "what was meant for the bucket is on disk"


def damage(folder: Path, step: int, name: str) -> None:
    bucket = Bucket(folder)
    shard = bucket._object(bucket._key(folder / f"step-{step}" / name))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def saved(folder: Path, *steps: int) -> tuple[Any, Any]:
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    for step in steps:
        train(run, optimizer, range(step - 1, step))
        save(folder, run, optimizer, {"cursor": step}, step=step, asynchronous=step % 2 == 0).wait()
    return run, optimizer


def test_the_form_of_a_folder_chooses(run_folder: Path, tmp_path: Path):
    kinds: list[Place] = [
        place_of(run_folder / "checkpoints"),
        place_of(run_folder / "checkpoints/step-1"),
        place_of(tmp_path),
    ]
    assert [type(kind) for kind in kinds] == [Bucket, Bucket, LocalPlace]
    assert kinds[1].folder == run_folder / "checkpoints"


def test_save_list_load_verify_prune(run_folder: Path):
    folder = run_folder / "checkpoints"
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    ready(folder, run)
    run, optimizer = saved(folder, 1, 2, 3)
    assert [path.name for path in files.published(folder)] == ["step-3", "step-2", "step-1"] and unfinished(
        folder
    ) == []
    assert files.latest(folder) == files.named_latest(folder) == folder / "step-3"
    assert all(check.verify(path) == [] for path in files.published(folder)), "every byte and every number"
    with pytest.raises(CheckpointError, match="step-3 exists already"):
        save(folder, run, optimizer, {}, step=3)

    other, states = started(stack=ALONE, num_hidden_layers=1, seed=5)
    assert load(folder, other, states) == {"step": 3, "cursor": 3}
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(other).items())

    damage(folder, 3, "__0_0.distcp")
    assert load(folder, other, states)["step"] == 2, "the newest good one"
    assert check.verify(folder / "step-3") == ["__0_0.distcp has changed since it was saved (SHA-256 differs)"]
    assert prune(folder, keep_last=1) == [folder / "step-1"], "one that is damaged does not count"
    assert not [key for key in Bucket(folder)._keys() if "step-1." in key]
    with pytest.raises(Gone, match="is not there, or not any more"):
        load(folder / "step-1", other)
    save(folder, run, optimizer, {}, step=3)
    assert check.verify(folder / "step-3") == [], "replaced"


def test_an_interrupted_save_is_no_checkpoint_and_goes(run_folder: Path):
    folder = run_folder / "checkpoints"
    saved(folder, 1)
    probe(folder)
    draft = start(folder, 2, 10)
    write_json(draft.hidden / "state.json", {})
    assert files.latest(folder) == folder / "step-1" and unfinished(folder) == [draft.hidden]
    assert remove_unfinished(folder) == [draft.hidden] and unfinished(folder) == []
    assert not [key for key in Bucket(folder)._keys() if key.startswith(draft.hidden.name)]


def test_commands_know_no_difference(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder / "checkpoints"
    saved(folder, 1, 2)
    assert main(["ckpt", "ls", str(run_folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["state"], row["latest"], row["files"]) for row in rows] == [
        (2, "as written", True, 4), (1, "as written", False, 4)
    ]  # fmt: skip
    assert main(["ckpt", "verify", str(folder / "step-1")]) == 0 and "step-1: ok" in capsys.readouterr().out
    assert main(["export", str(run_folder), str(tmp_path / "out")]) == 0 and (tmp_path / "out/config.json").is_file()
    damage(folder, 2, "state.json")
    assert main(["ckpt", "verify", str(run_folder)]) == 4 and "1 of 2 damaged" in capsys.readouterr().out


def test_a_run_saves_there_and_goes_on_from_there(run_folder: Path):
    assert run_to(run_folder, 4, "checkpoint.keep_last=1") == 0
    assert run_to(run_folder, 6, "checkpoint.keep_last=1") == 0
    assert "step-4" in (run_folder / "logs/rank-0.log").read_text()
    assert [path.name for path in files.published(run_folder / "checkpoints")] == ["step-6"]
    assert find_model(run_folder).step == 6
