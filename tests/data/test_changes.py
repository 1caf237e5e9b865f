"""A source that changes while it is packed is an error, however it changes and whoever reads it; nothing is kept of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.data import pack as packing
from ithaca.data import readers
from ithaca.data.source import Source

from .make import write_jsonl

Change = Callable[[Path], None]


def records(count: int, value: int = 1) -> list[dict[str, Any]]:
    return [{"input_ids": [value] * 50} for _ in range(count)]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        write_jsonl(folder / f"{name}.jsonl", records(40))
    return folder


def pack(tmp_path: Path, path: Path, workers: int = 1, **more: Any) -> Any:
    return packing.pack([Source(str(path))], tmp_path / "out", vocabulary=100, workers=workers, quiet=True, **more)


def append(folder: Path) -> None:
    with open(folder / "b.jsonl", "a") as file:
        file.write('{"input_ids": [2, 2, 2]}\n')


def rewrite(folder: Path) -> None:
    """The same size, and the time set back."""
    before = (folder / "b.jsonl").stat()
    write_jsonl(folder / "b.jsonl", records(40, value=2))
    os.utime(folder / "b.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(folder: Path) -> None:
    """Another file of the same size and time."""
    before = (folder / "b.jsonl").stat()
    write_jsonl(folder / "new", records(40, value=2))
    os.utime(folder / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(folder / "new", folder / "b.jsonl")


def remove(folder: Path) -> None:
    (folder / "b.jsonl").unlink()


def add(folder: Path) -> None:
    write_jsonl(folder / "c.jsonl", records(3))


def cut(folder: Path) -> None:
    os.truncate(folder / "b.jsonl", 60)


def pipe(folder: Path) -> None:
    """Which a reader would wait for."""
    remove(folder)
    os.mkfifo(folder / "b.jsonl")


CHANGES: dict[Change, str] = {
    append: r"b.jsonl changed while it was packed: it had [\d,]+ bytes, now [\d,]+",
    rewrite: "b.jsonl changed while it was packed: it was written to",
    replace: "b.jsonl changed while it was packed: another file is in its place",
    remove: "b.jsonl changed while it was packed: it is gone",
    add: "c.jsonl changed while it was packed: it is new",
    cut: r"b.jsonl changed while it was packed: it had [\d,]+ bytes, now 60",
    pipe: "b.jsonl (changed while it was packed: it is gone|is a named pipe)",
}


def meanwhile(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Around the work of the packing processes, which itself stays what it is."""
    real = packing.run_tasks

    def around(*arguments: Any) -> list[Any]:
        before()
        try:
            return real(*arguments)
        finally:
            after()

    monkeypatch.setattr(packing, "run_tasks", around)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before it is read", "after it is read"])
def test_changes(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, change: Change, when: str):
    def nothing() -> None: ...

    def now() -> None:
        change(sources)

    meanwhile(monkeypatch, *((now, nothing) if when.startswith("before") else (nothing, now)))
    with pytest.raises(ValueError, match=CHANGES[change]):
        pack(tmp_path, sources)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]  # nothing is kept, so nothing can be taken for packed


def test_a_link_that_leads_elsewhere_while_it_is_read(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    """Before and after it leads to the same file: only whoever opens it can know."""
    write_jsonl(tmp_path / "other", records(40, value=2))
    link, target = sources / "b.jsonl", tmp_path / "target"
    link.rename(target)

    def lead(to: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(to)

    lead(target)
    meanwhile(monkeypatch, lambda: lead(tmp_path / "other"), lambda: lead(target))
    with pytest.raises(ValueError, match=r"b\.jsonl changed while it was packed: another file is in its place"):
        pack(tmp_path, sources)


def test_a_change_while_several_processes_pack(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    """At the first sign of life of a worker."""
    monkeypatch.setattr(readers, "_LEAST", 2000)
    real, done = packing.run_tasks, []

    def watched(start: Any, job: Any, tasks: Any, workers: int, on_report: Any) -> list[Any]:
        def report(value: Any) -> None:
            if not done:
                done.append(append(sources))
            on_report(value)

        return real(start, job, tasks, workers, report)

    monkeypatch.setattr(packing, "run_tasks", watched)
    with pytest.raises(ValueError, match=CHANGES[append]):
        pack(tmp_path, sources, workers=2)
    assert done and not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert pack(tmp_path, sources).manifest["documents"] == 81  # packed again, it is all there


def test_half_a_line_of_a_file_that_is_being_written(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    """The cause is named, not what it leads to."""

    def half() -> None:
        with open(sources / "a.jsonl", "r+") as file:
            file.truncate(100)
            file.seek(0, os.SEEK_END)
            file.write('{"input_ids": [')

    meanwhile(monkeypatch, half, lambda: None)
    with pytest.raises(ValueError, match=r"a.jsonl changed while it was packed"):
        pack(tmp_path, sources)


def test_offsets_beside_an_array_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(20))
    change: dict[str, Callable[[], None]] = {
        "appear": lambda: np.save(tmp_path / "a.offsets.npy", np.array([0, 5, 20])),
        "change": lambda: np.save(tmp_path / "a.offsets.npy", np.array([0, 6, 20])),
        "go": (tmp_path / "a.offsets.npy").unlink,
    }
    for each in change.values():
        with monkeypatch.context() as patch:
            meanwhile(patch, lambda: None, each)
            with pytest.raises(ValueError, match=r"a.offsets.npy changed while it was packed"):
                pack(tmp_path, path)


def test_a_saved_dataset_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its fingerprint is written beside it, and does not change with the data."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 20}).save_to_disk(str(folder))
    (arrow,) = folder.glob("*.arrow")
    raw = arrow.read_bytes()

    def change() -> None:
        arrow.write_bytes(raw)

    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: None, change)
        with pytest.raises(ValueError, match=r"\.arrow changed while it was packed: it was written to"):
            pack(tmp_path, folder)
    pack(tmp_path, folder)
    said: list[str] = []
    pack(tmp_path, folder, say=said.append)
    assert "nothing to do" in said[0]
    at = raw.rindex(b"\x03")
    arrow.write_bytes(raw[:at] + b"\x04" + raw[at + 1 :])
    with pytest.raises(ValueError, match=r"\.arrow has changed \(SHA-256 differs\)"):
        pack(tmp_path, folder)
