"""Every file under a source is packed, or named with the reason why not: by whoever packs, inspects or trains."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.find import BESIDE, EMPTY, FOLDER, HIDDEN, LINKED, OTHER, OTHER_SPLIT, UNKNOWN, find_files
from ithaca.data.pack import pack
from ithaca.data.samples import pack_sources
from ithaca.data.source import Source

from .make import write_jsonl


@pytest.fixture
def messy(tmp_path: Path) -> Iterator[Path]:
    """A folder with one of everything."""
    folder = tmp_path / "in"
    for name in ("part", "_tmp", ".git/objects"):
        (folder / name).mkdir(parents=True)
    for name in ("a.txt", "b.md", "part/c.rst", "part/d.TEXT", "e.markdown"):
        (folder / name).write_text(f"this is {name}")
    for name in (".hidden.txt", "_SUCCESS", "_notes.md", "_tmp/half.txt", ".git/objects/1f", "part/.x.txt"):
        (folder / name).write_text("not this")
    for name in ("README", "table.csv", "more.jsonl.gz"):
        (folder / name).write_text("nor this")
    (folder / "part/empty.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/f.txt").write_text("outside")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "part/circle").symlink_to(folder)
    (folder / "g.txt").symlink_to(tmp_path / "elsewhere/f.txt")  # a link to a file is a file
    (folder / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket.txt"))  # a whole path may be too long for a socket
        yield folder


LEFT_OUT = {
    HIDDEN: [".hidden.txt", "_SUCCESS", "_notes.md", "_tmp/half.txt", ".git/objects/1f", "part/.x.txt"],
    UNKNOWN: ["README", "more.jsonl.gz", "table.csv"],
    EMPTY: ["part/empty.txt"],
    LINKED: ["linked/", "part/circle/"],
    "a link that leads nowhere": ["broken.txt"],
    "a named pipe": ["pipe.txt"],
    "a device": ["zero.txt"],
    "a socket": ["socket.txt"],
}


def test_a_folder(messy: Path):
    found = find_files(Source(str(messy)))
    assert [str(path.relative_to(messy)) for path in found.paths] == [
        "a.txt", "b.md", "e.markdown", "g.txt", "part/c.rst", "part/d.TEXT",
    ]  # fmt: skip
    assert found.left_out == {reason: sorted(names) for reason, names in LEFT_OUT.items()}
    inside = {os.path.join(where, name) for where, _, names in os.walk(messy) for name in names}
    links = LEFT_OUT[LINKED]
    assert len(inside) + len(links) == len(found.paths) + sum(map(len, found.left_out.values()))  # nothing is missing


def test_who_packs_and_who_looks_is_told(
    messy: Path, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
):
    command = [
        "data",
        "pack",
        str(messy),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(tmp_path / "p"),
        "--workers",
        "1",
    ]
    lines = [
        "    left out: 6 files, the name begins with . or _: ",
        "    left out: 3 files, of no known format: README, more.jsonl.gz, table.csv",
        "    left out: 1 file, a named pipe: pipe.txt",
    ]
    for words in (command, command, ["data", "inspect", str(tmp_path / "p"), "--samples", "0"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(line in out for line in lines) and "since then" not in out, out
    assert main([*command, "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert source["left_out"].keys() == LEFT_OUT.keys() and source["documents"] == 6
    (messy / "late.csv").write_text("x")
    assert main(command) == 0
    assert f"{messy}: since then also left out: 1 file, of no known format: late.csv" in capsys.readouterr().out


def test_who_trains_is_told_before_the_first_step(tmp_path: Path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", [{"input_ids": list(range(1, 60))}, {"input_ids": []}] * 4)
    write_jsonl(tmp_path / "in/_b.jsonl", [{"input_ids": [1, 2, 3]}])
    (tmp_path / "in/c.unknown").write_text("x")
    given = [f"data.sources=[{tmp_path / 'in'}]", "data.context=64", f"run.folder={tmp_path / 'run'}", "train.steps=1"]
    config = load(None, given, "tiny_cpu").config
    for _ in range(2):  # packed, and found packed
        said: list[str] = []
        pack_sources(config, said.append)
        text = "\n".join(said)
        assert "left out: 1 file, the name begins with . or _: _b.jsonl" in text
        assert "left out: 1 file, of no known format: c.unknown" in text and "documents left out: 4 empty" in text
        assert text.index("c.unknown") < text.index("rows of 64 tokens")


def test_text_beside_records_is_about_them(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "README.md").write_text("about it")
    found = find_files(Source(str(tmp_path)))
    assert found.format == "jsonl" and found.left_out == {BESIDE: ["README.md"]}
    found = find_files(Source(str(tmp_path / "*")))
    assert found.format == "jsonl" and found.left_out == {BESIDE: ["README.md"]}
    found = find_files(Source(str(tmp_path), format="txt"))
    assert [path.name for path in found.paths] == ["README.md"] and found.left_out == {OTHER: ["a.jsonl"]}
    assert find_files(Source(str(tmp_path / "README.md"))).format == "txt"


def test_a_pattern(messy: Path):
    found = find_files(Source(str(messy / "*.txt")))
    assert [path.name for path in found.paths] == ["a.txt", "g.txt"]
    expected = {name: LEFT_OUT[name] for name in ("a link that leads nowhere", "a named pipe", "a device", "a socket")}
    hidden = {HIDDEN: [".hidden.txt"]} if sys.version_info >= (3, 11) else {}
    assert found.left_out == {**expected, **hidden}
    found = find_files(Source(str(messy / "part/*.[rT]*")))
    assert [path.name for path in found.paths] == ["c.rst", "d.TEXT"]
    (messy / "part/again").symlink_to(messy)  # a second circle: two to the power of forty ways through both
    found = find_files(Source(str(messy / "**/*.txt")))
    assert [str(path.relative_to(messy)) for path in found.paths] == ["_tmp/half.txt", "a.txt", "g.txt"]
    assert found.left_out == {
        **expected,
        EMPTY: ["part/empty.txt"],
        HIDDEN: [".hidden.txt", "part/.x.txt"],
        LINKED: ["linked/", "part/again/", "part/circle/"],
    }
    with pytest.raises(ValueError, match=rf"no file matches .*; left out: 1 file, {FOLDER}: part/"):
        find_files(Source(str(messy / "p[a]*t")))


@pytest.mark.parametrize(("name", "words"), [("pipe.txt", "a named pipe"), ("zero.txt", "a device")])
def test_what_is_no_file_is_not_opened(messy: Path, tmp_path: Path, name: str, words: str):
    with pytest.raises(ValueError, match=f"{name} is {words}, not a file; write what comes out of it to a file first"):
        pack([Source(str(messy / name))], tmp_path / "p", vocabulary=9, workers=1, quiet=True)


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:  # these tests may run as root, for whom nothing is closed
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"closed cannot be read \(Permission denied\)"):
        find_files(Source(str(tmp_path)))


def test_names_that_cannot_be_printed(tmp_path: Path, tokenizer: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("hello there")
    (tmp_path / "in/b\x1b[2Jc.csv").write_text("x")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/d\xff.csv")).write_text("x")
    packed = pack([Source(str(tmp_path / "in"))], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert packed.manifest["sources"][0]["left_out"] == {UNKNOWN: ["b\\x1b[2Jc.csv", "d\\xff.csv"]}
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/e\xff.txt")).write_text("x")
    with pytest.raises(ValueError, match=r"the name of e\\xff\.txt is not UTF-8; rename the file"):
        find_files(Source(str(tmp_path / "in")))


def test_what_is_cut_short_is_not_called_empty(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "b.parquet").touch()
    with pytest.raises(ValueError, match=r"b\.parquet is empty \(0 bytes\); remove it, or check"):
        find_files(Source(str(tmp_path)))


def test_other_splits_of_a_dataset_are_named(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved/notes.txt").write_text("x")
    packed = pack([Source(str(tmp_path / "saved"))], tmp_path / "p", vocabulary=9, workers=1, quiet=True)
    ((reason, names),) = packed.manifest["sources"][0]["left_out"].items()
    assert reason == OTHER_SPLIT
    assert "notes.txt" in names and any(name.startswith("test/") for name in names) and len(names) == 2
