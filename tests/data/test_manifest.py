"""A packed folder from somebody else: whatever its manifest and its plans say, it is read as it is or refused in a line."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.plan import make_plan, open_plan
from ithaca.data.report import describe, sample, summary
from ithaca.data.source import Source
from ithaca.data.tokenizer import check_tokenizer, load_tokenizer

from .make import chat, pack_ids, words, write_jsonl

NASTY = [
    None, True, -1, 0, 1, 2.5, 1e308, 10**20, -(10**20), 1 << 62, 1 << 63, 10**300, "", "x", "../secret.txt", "/etc/passwd", "a\0b",
    "..", ".", "tokens-00000.bin", "documents.bin", "manifest.json", "<u4", "O", "\ud800", "x" * 5000, [], {}, [[]], [None],
    {"": None}, [-1, 5], [0, 10**9], [5, 0], {"file": "x"},
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Two sources, texts and chats, so that there are masks, and a tokenizer."""
    folder = tmp_path_factory.mktemp("packed")
    write_jsonl(folder / "a.jsonl", [{"text": words(20, seed)} for seed in range(10)] + [{"text": ""}])
    write_jsonl(folder / "b.jsonl", [chat("hello there", words(9, seed)) for seed in range(8)])
    sources = [Source(str(folder / f"{name}.jsonl")) for name in "ab"]
    packed = pack(sources, folder / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert packed.masked and len(packed.manifest["shards"]) == 2
    return folder / "p"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "p"))


def use(folder: Path) -> None:
    """What is done with a packed folder."""
    packed = Packed(folder)
    for look in (describe, summary, lambda packed: sample(packed, None)):
        look(packed)
    for number in range(len(packed.manifest["sources"])):
        make_plan(packed, 32, source=number)
    packed.check_vocabulary(1 << 20)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


def mutated(manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    found = copy.deepcopy(manifest)
    path = rng.choice(list(places(found)))
    parent = found
    for name in path[:-1]:
        parent = parent[name]
    kind = rng.choice(["value", "value", "value", "gone", "other", "twice", "number", "name"])
    if kind == "gone":
        del parent[path[-1]]
    elif kind == "other":
        other: Any = found
        for name in rng.choice(list(places(found))):
            other = other[name]
        parent[path[-1]] = copy.deepcopy(other)
    elif kind == "twice" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))
    elif kind == "number" and isinstance(parent[path[-1]], int):
        parent[path[-1]] += rng.choice([-1, 1, 8, 1 << 32, -(1 << 40)])
    elif kind == "name" and isinstance(parent, dict):
        parent[rng.choice(["", "x", "../x", "a\0", "/x"])] = parent.pop(path[-1])
    else:
        parent[path[-1]] = rng.choice(NASTY)
    return found


def refused(folder: Path) -> bool:
    try:
        use(folder)
    except ValueError as error:
        assert 10 < len(str(error)) < 1000 and "\n" not in str(error), error
        str(error).encode()  # it can be printed
        return True
    return False


def test_mutated_manifests(folder: Path):
    """Hundreds of them, as objects and as bytes; anything but a ValueError fails here with its traceback."""
    rng, path = random.Random(0), folder / "manifest.json"
    text = path.read_text()
    manifest = json.loads(text)
    counts = [0, 0]
    for number in range(700):
        if number % 7:
            path.write_text(json.dumps(mutated(manifest, rng)))
        else:
            raw = bytearray(text.encode())
            at = rng.randrange(len(raw))
            change = rng.choice([b"", b"\xff", b"-", b"9" * 30, b"NaN", b"[" * 200, b"{", b'"', b"\\ud800", b"\0"])
            raw[at : at + rng.choice([0, 1, 1, 50])] = change
            path.write_bytes(raw)
        counts[refused(folder)] += 1
    path.write_text(text)
    use(folder)
    assert sum(counts) == 700 and counts[1] > 400, counts


CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a shard outside": (lambda m: m["shards"][0].update(file="../secret.txt"), "'../secret.txt' leads out of"),
    "a mask outside": (lambda m: m["shards"][1].update(mask="/etc/passwd"), "'/etc/passwd' leads out of"),
    "a file outside": (lambda m: m["files"].update({"a/../../x": m["files"]["documents.bin"]}), "leads out of"),
    "a shard twice": (lambda m: m["shards"].append(m["shards"][0]), "'tokens-00000.bin' is named twice"),
    "one shard as two": (lambda m: m["shards"][1].update(m["shards"][0]), "'tokens-00000.bin' is named twice"),
    "a shard that is the index": (lambda m: m["shards"][0].update(file="documents.bin"), "is named twice"),
    "a billion documents": (lambda m: m.update(documents=10**9), r"should have 8,000,000,008 bytes by its counts"),
    "a number of 20 digits": (lambda m: m.update(tokens=10**20), "'tokens' is not what a packed folder has there"),
    "a negative count": (lambda m: m["shards"][0].update(tokens=-5), "'shards' is not what a packed folder has"),
    "more tokens than bytes": (lambda m: m["shards"][0].update(tokens=10**6), "should have 2,000,000 bytes"),
    "a dtype of objects": (lambda m: m.update(dtype="O"), "are not of type 'O'"),
    "another dtype": (lambda m: m.update(dtype="<u4"), "are not of type '<u4'"),
    "a vocabulary of none": (lambda m: m.update(vocabulary=0), "'vocabulary' is not"),
    "sources that overlap": (lambda m: m["sources"][1].update(range=[0, 8]), "are not those behind the source before"),
    "an unknown reason": (lambda m: m["sources"][0].update(dropped={"odd": 1}), "'sources' is not"),
    "an unknown kind": (lambda m: m["sources"][0].update(kind=["text"]), "'sources' is not"),
    "another checksum": (lambda m: m["files"]["documents.bin"].update(sha256="0" * 64), "checksum of its content"),
    "a stranger": (lambda m: m["files"].update(x=m["files"]["documents.bin"]), "'x' belongs to nothing"),
    "no sums": (lambda m: m["shards"][1].update(sums=None), "has a mask without its sums"),
    "a tokenizer of nothing": (lambda m: m.update(tokenizer={}), "'tokenizer' is not"),
    "true as a number": (lambda m: m.update(largest_token=True), "'largest_token' is not"),
}


@pytest.mark.parametrize("name", CASES)
def test_manifests_that_lie(folder: Path, name: str):
    change, message = CASES[name]
    (folder.parent / "secret.txt").write_text("secret" * 1000)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        Packed(folder)


def test_a_manifest_that_is_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A pipe is not waited for, /dev/zero not read to its end, and a large file not read at all."""
    path = folder / "manifest.json"
    real = path.read_bytes()

    def broken(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Packed(folder)
        path.unlink()

    path.unlink()
    os.mkfifo(path)
    broken("manifest.json is a named pipe, not a file")
    path.symlink_to("/dev/zero")
    broken("leads out of")
    (folder.parent / "outside.json").write_bytes(real)
    path.symlink_to(folder.parent / "outside.json")
    broken("'manifest.json' leads out of")
    path.symlink_to(path)
    broken("'manifest.json' leads out of")
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole
    broken("has more than 268,435,456 bytes")
    path.write_bytes(b"[" * 100_000)
    broken("is nested too deeply to be read")
    path.write_bytes(b'{"format": ' + b"[" * 500 + b"]" * 500 + b"}")
    broken("is nested more than 64 deep")
    path.write_bytes(b'{"version": ' + b"9" * 5000 + b"}")
    broken("cannot be read: Exceeds the limit")
    path.write_bytes(b'{"version": Infinity}')
    broken("Infinity is no number of JSON")


def test_links_out_of_the_folder(folder: Path):
    """A shard that is a link to somebody's file of the same size."""
    shard = folder / "tokens-00000.bin"
    (folder.parent / "secret").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(folder.parent / "secret")
    with pytest.raises(ValueError, match=r"'tokens-00000.bin' leads out of"):
        Packed(folder)


def rewrite(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    numbers = np.fromfile(folder / name, "<i8")
    change(numbers)
    numbers.tofile(folder / name)


@pytest.mark.parametrize(
    ("at", "value"), [(3, -5), (3, 10**18), (0, 1), (5, 0), (-1, 10**6), (-2, 2**62), (4, -(2**63))]
)
def test_an_index_that_lies(folder: Path, at: int, value: int):
    """Sizes are right, and the numbers are places in files."""
    rewrite(folder, "documents.bin", lambda numbers: numbers.__setitem__(at, value))
    with pytest.raises(ValueError, match=r"documents\.bin and manifest\.json do not agree"):
        Packed(folder)


@pytest.mark.parametrize("value", [-1, 0, 10**9])
def test_counts_that_lie(folder: Path, value: int):
    rewrite(folder, "supervised.bin", lambda numbers: numbers.__setitem__(2, value))
    with pytest.raises(ValueError, match=r"supervised\.bin and documents\.bin do not agree"):
        Packed(folder)


@pytest.mark.parametrize("value", [-(1 << 63), -1000, 10**12])
def test_sums_that_lie(tmp_path: Path, value: int):
    """They are asked where a document with a mask is split."""
    packed = pack_ids(tmp_path / "p", [range(10_000)], [[-100, *range(1, 10_000)]], vocabulary=10_000)
    make_plan(packed, 5000)
    rewrite(tmp_path / "p", "sums-00000.bin", lambda numbers: numbers.__setitem__(1, value))
    with pytest.raises(ValueError, match=r"sums-00000\.bin does not fit its mask"):
        make_plan(Packed(tmp_path / "p"), 5000)


def test_mutated_plans(folder: Path):
    """Plans lie in the folder too. With their checksums, so that what is inside is looked at."""
    packed = Packed(folder)
    open_plan(packed, 32, source=1)
    (plan,) = (folder / "rows").iterdir()
    backup = Path(shutil.copytree(plan, folder.parent / "plan"))
    rng, counts = random.Random(1), [0, 0]
    for number in range(150):
        shutil.rmtree(plan)
        shutil.copytree(backup, plan)
        about = json.loads((plan / "plan.json").read_text())
        if number % 3 == 0:
            about = mutated(about, rng)
        else:
            name = rng.choice(["pieces", "bounds", "supervised"])
            array = np.load(plan / f"{name}.npy")
            if number % 3 == 1:
                array.flat[rng.randrange(array.size)] = rng.choice([-1, 10**6, 1 << 62, -(1 << 63), 10**12])
            else:
                array = rng.choice(
                    [array[:-1], array.astype(float), array.astype("<i4"), array[:0], array.T, array[None]]
                )
            np.save(plan / f"{name}.npy", array)
            about["sha256"][name] = hashlib.sha256((plan / f"{name}.npy").read_bytes()).hexdigest()
        (plan / "plan.json").write_text(json.dumps(about))
        try:
            found = open_plan(packed, 32, source=1)
            assert found.pieces[:, 2].max() <= packed.lengths().max()
            counts[0] += 1
        except ValueError as error:
            assert "is damaged (" in str(error) and "it is made again" in str(error)
            counts[1] += 1
    assert sum(counts) == 150 and counts[1] > 110, counts


def test_a_bit_of_a_plan(folder: Path):
    packed = Packed(folder)
    open_plan(packed, 32, source=0)
    (path,) = (folder / "rows").glob("*/pieces.npy")
    raw = bytearray(path.read_bytes())
    raw[-24] ^= 1  # the last piece, of another document
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"is damaged \(SHA-256 of pieces.npy differs\)"):
        open_plan(packed, 32, source=0)


def test_a_folder_of_before_is_read(folder: Path, tokenizer: Path):
    """Without what was added since: what special tokens are, and why files are left out."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["settings"]["special_tokens"]
    for source in manifest["sources"]:
        del source["left_out"]
        source["ignored"] = ["README"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    packed = Packed(folder)
    check_tokenizer(packed, load_tokenizer(tokenizer))
    text = "\n".join(summary(packed))
    assert "left out: 1 file, of no known format: README" in text and "(special_tokens: parse)" in text
