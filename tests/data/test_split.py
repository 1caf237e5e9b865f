"""Validation: disjoint from training, told by what documents say, and measured while training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.config import load
from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.plan import make_plan, open_plan
from ithaca.data.rows import open_rows
from ithaca.data.source import Source
from ithaca.data.split import Split

from .make import pack_ids, words, write_jsonl
from .test_cli_data import run
from .test_pack import documents

RNG = np.random.default_rng(0)
IDS = [RNG.integers(0, 1000, RNG.integers(5, 60)).tolist() for _ in range(400)]


def sides(packed: Packed, validation: int | float, seed: int = 0) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """What is trained on and what is held out, by the rows of both."""
    every = documents(packed)
    found = []
    for held_out in (False, True):
        (rows,) = open_rows(packed, 64, seed=seed, validation=[validation], held_out=held_out)
        numbers = {document for row in range(len(rows)) for document, _, _ in rows.segments(row)}
        found.append({tuple(every[number]) for number in numbers})
        assert rows.plan.counts.documents == len(numbers)
    return found[0], found[1]


def test_sides(tmp_path: Path):
    packed = pack_ids(tmp_path / "a", IDS)
    trained, held_out = sides(packed, 0.1)
    assert not trained & held_out and trained | held_out == set(map(tuple, IDS)) and 20 < len(held_out) < 60
    assert sides(packed, 0.1) == (trained, held_out)  # from the kept plans
    assert sides(packed, 0.1, seed=1)[1] != held_out
    assert sides(packed, 0.2)[1] > held_out  # a larger share holds the smaller one
    assert len(sides(packed, 25)[1]) == 25
    # others come, and the order changes: every document stays on its side; copies of one are on its side too
    more = [RNG.integers(0, 1000, 30).tolist() for _ in range(100)]
    grown = pack_ids(tmp_path / "b", [*more, *reversed(IDS), *IDS[:50]])
    trained_then, held_out_then = sides(grown, 0.1)
    assert held_out_then & set(map(tuple, IDS)) == held_out and not trained_then & held_out_then
    assert len(sides(grown, 25)[1] & sides(packed, 25)[1]) > 10


def test_masked_documents_and_several_sources(tmp_path: Path):
    """Pieces of split documents know their supervised tokens, and only sources that hold something out are measured."""
    labels = [[-100 if at % 3 else token for at, token in enumerate(ids)] for ids in IDS]
    for name in "ab":
        records = [{"input_ids": ids, "labels": each} for ids, each in zip(IDS, labels, strict=True)]
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    sources = [Source(str(tmp_path / f"{name}.jsonl")) for name in "ab"]
    packed = pack(sources, tmp_path / "p", vocabulary=1000, workers=1, quiet=True)
    both = open_rows(packed, 32, validation=[0, 0.3])
    (rows,) = open_rows(packed, 32, validation=[0, 0.3], held_out=True)
    assert len(open_rows(packed, 32)[0].plan.pieces) == len(both[0].plan.pieces)
    assert rows.name.endswith("b.jsonl") and rows.plan.counts.documents + both[1].plan.counts.documents == 400
    for row in range(len(rows)):
        assert rows.supervised(row) == (rows.read(row, 0, 32).labels != -100).sum()
        assert all(400 <= document < 800 for document, _, _ in rows.segments(row))


def test_refused(tmp_path: Path):
    packed = pack_ids(tmp_path / "a", IDS[:20])
    for validation, message in (
        (20, "leaves none of 20 documents to train on"),
        (300, "leaves none of 20 documents to train on"),
        (1.0, "must be a number of documents, such as 100, or a share below 1"),
        (-1, "must be a number of documents"),
        (True, "must be a number of documents"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(packed, 16, source=0, split=Split(validation, 0, True))
    assert make_plan(packed, 256, source=0, split=Split(0.0001, 0, True)).counts.documents == 1, "at least one"
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest["files"]["hashes.bin"]["bytes"] == 160
    # a plan whose documents are of the other side
    split = Split(5, 0, True)
    open_plan(packed, 16, source=0, split=split)
    (kept,) = (tmp_path / "a/rows").iterdir()
    open_plan(packed, 16, source=0, split=Split(5, 0, False))
    (other,) = set((tmp_path / "a/rows").iterdir()) - {kept}
    for path in other.iterdir():
        (kept / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="pieces of documents of the other side"):
        open_plan(packed, 16, source=0, split=split)


def test_a_folder_without_hashes(tmp_path: Path):
    """As it was packed before there were any: it can be read, and nothing can be held out."""
    from ithaca.data.manifest import content_of

    packed = pack_ids(tmp_path / "a", IDS[:20])
    path = tmp_path / "a/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["hashes.bin"]
    for name in ("use", "chat_template", "marked_by", "chats"):
        del manifest["sources"][0][name]
    manifest["settings"]["chat_template"] = None
    manifest["content"] = content_of({name: about["sha256"] for name, about in manifest["files"].items()})
    path.write_text(json.dumps(manifest))
    packed = Packed(tmp_path / "a")
    assert len(open_rows(packed, 32)) == 1 and packed.manifest["sources"][0]["chats"] == 0
    with pytest.raises(
        ValueError, match="has no hashes of its documents, by which some are held out; pack the data again"
    ):
        open_rows(packed, 32, validation=[0.5])


BASE = ["model.folder=tiny_llama", "train.steps=1", "data.context=8"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.validation=1.5", "data.validation=1.5 must be a number of documents without a point"),
        (
            "data.validation=1 & data.sources=[{synthetic: recall}]",
            "data.validation=1: synthetic sources have no documents",
        ),
        ("eval.every=1", "give eval.sources or eval.packed, hold out some of the data with data.validation, or ask"),
        ("data.validation=-1", "data.validation=-1 must be at least 0"),
        ("data.sources=[{synthetic: recall, validation: 1}]", "a synthetic source has no documents to hold out"),
        ("eval.sources=[{path: x, validation: 1}]", "nothing of an evaluation is trained on; leave it out"),
        ("data.sources=[{path: x, chat: true, kind: text}]", "has both chat: true and kind: text; give one of them"),
    ],
)
def test_settings_that_are_refused(override: str, message: str):
    with pytest.raises(ValueError, match=message):
        load(None, [*BASE, "data.sources=[x]", *override.split(" & ")])


def test_settings():
    data = load(
        None,
        [*BASE, "data.validation=0.1", "data.sources=[{path: a}, {path: b, validation: 5}, {path: c, validation: 0}]"],
    )
    assert [data.config.data.held_out(source) for source in data.config.data.sources] == [0.1, 5, 0]
    assert data.config.data.holds_out and not load(None, [*BASE, "data.sources=[x]"]).config.data.holds_out
    packed = load(None, [*BASE, "data.packed=x", "data.validation=3"]).config.data
    assert packed.holds_out and packed.held_out() == 3


def test_pack_and_inspect_say_what_is_held_out(tmp_path: Path, tokenizer: Path, capsys: Any):
    write_jsonl(tmp_path / "a.jsonl", [{"text": words(20, seed)} for seed in range(60)])
    (tmp_path / "run.yaml").write_text(f"""
model: {{folder: {tokenizer}}}
data:
  context: 64
  packed: {tmp_path / "packed"}
  sources: [{{path: {tmp_path / "a.jsonl"}, validation: 6}}]
train: {{steps: 1}}
""")
    code, out, err = run(capsys, "data", "pack", tmp_path / "run.yaml", "--workers", 1, "--json")
    assert code == 0, err
    assert [plan["documents"] for plan in json.loads(out)["rows"]] == [54, 6]
    assert len(list((tmp_path / "packed/rows").iterdir())) == 2  # ready for training
    code, out, _ = run(capsys, "data", "inspect", tmp_path / "packed", "--context", 64, "--validation", 6)
    assert code == 0 and "a.jsonl, held out: " in out
    for text in ("x", "1.5", "-1", "nan"):
        code, _, err = run(capsys, "data", "inspect", tmp_path / "packed", "--context", 64, "--validation", text)
        assert code == 2 and "must be a number of documents" in err, text
    code, _, err = run(capsys, "data", "inspect", tmp_path / "packed", "--validation", 6)
    assert code == 2 and "--validation needs --context" in err
