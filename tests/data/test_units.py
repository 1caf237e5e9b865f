"""Units: pairs and groups of completions stay together from the record to the row, and what cannot be learned from is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.base.files import sha256_of
from ithaca.cli.main import main
from ithaca.data.batch import batch_of_units
from ithaca.data.folder import Packed
from ithaca.data.manifest import PART, content_of
from ithaca.data.pack import pack
from ithaca.data.report import summary
from ithaca.data.rows import open_rows
from ithaca.data.source import Source
from ithaca.stack import Stack

from .make import mesh_of, words, write_jsonl


def packed(folder: Path, records: list[dict[str, Any]], **more: Any) -> Packed:
    path = write_jsonl(folder / "data.jsonl", records)
    more = {"vocabulary": 100, **more}
    return pack([Source(str(path))], folder / "packed", workers=1, quiet=True, **more)


def ids_of(packed: Packed, document: int) -> list[tuple[list[int], list[int]]]:
    """Ids and supervised ids of each part."""
    start, found = int(packed.offsets[document]), []
    for length in packed.parts(document)[1]["length"].tolist():
        ids, seen = packed.read(start, start + length), packed.mask(start, start + length)
        found.append((ids.tolist(), ids.tolist() if seen is None else ids[seen].tolist()))
        start += length
    return found


def test_both_answers_as_each_would_be_alone(tmp_path: Path, tokenizer: Path):
    user, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "ho ho"), ("assistant", "no"))
    )
    text = {"prompt": words(4) + " ", "chosen": words(3, 1), "rejected": words(5, 2)}
    records = [
        text,
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
    ]
    found = packed(tmp_path, records, tokenizer=str(tokenizer), vocabulary=None)
    for column in ("chosen", "rejected"):
        folder = tmp_path / column
        folder.mkdir()
        alone = [{"prompt": text["prompt"], "completion": text[column]}]
        chats = [{"messages": each[column] if "prompt" not in each else [user, *each[column]]} for each in records[1:]]
        write_jsonl(folder / "a.jsonl", alone)
        write_jsonl(folder / "b.jsonl", chats)
        sources = [Source(str(folder / name)) for name in ("a.jsonl", "b.jsonl")]
        plain = pack(sources, folder / "packed", tokenizer=str(tokenizer), workers=1, quiet=True)
        for document in range(3):
            start, stop = (int(at) for at in plain.offsets[document : document + 2])
            ids, seen = plain.read(start, stop), plain.mask(start, stop)
            assert seen is not None
            assert ids_of(found, document)[column == "rejected"] == (ids.tolist(), ids[seen].tolist())


def _node(said: Any, parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {"text" if isinstance(said, str) else "messages": said, "parent": parent, **more}


def test_texts_and_chats_with_branches(tmp_path: Path, tokenizer: Path):
    """Each way is what it would be alone, and ways share tokens, not letters."""
    said = [
        {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "ho"), ("assistant", "no no"))
    ]
    trees = [
        {"nodes": [_node("abc ab", train=False), _node("cdef", 0), _node("xyz", 0, train=False), _node("k", 2)]},
        {
            "nodes": [
                _node(said[:1]),
                _node(said[1:2], 0),
                _node([said[0], said[2]], 1),
                _node(said[2:], 0, train=False),
            ]
        },
    ]
    found = packed(tmp_path, trees, tokenizer=str(tokenizer), vocabulary=None)
    alone = tmp_path / "alone"
    alone.mkdir()
    write_jsonl(
        alone / "a.jsonl", [{"prompt": "abc ab", "completion": "cdef"}, {"prompt": "abc abxyz", "completion": "k"}]
    )
    write_jsonl(alone / "b.jsonl", [{"messages": [said[0], said[1], said[0], said[2]]}])
    names = [Source(str(alone / name)) for name in ("a.jsonl", "b.jsonl")]
    plain = pack(names, alone / "packed", tokenizer=str(tokenizer), workers=1, quiet=True)
    ways = [*ids_of(found, 0), *ids_of(found, 1)]
    for document, way in enumerate(ways):
        start, stop = (int(at) for at in plain.offsets[document : document + 2])
        ids, seen = plain.read(start, stop), plain.mask(start, stop)
        assert seen is not None and way == (ids.tolist(), ids[seen].tolist())
    assert len(ways) == 3
    # "abc ab" + "cdef" is tokenised as one text: what is shared ends before the token that reaches over the boundary
    one, two = ways[0][0], ways[1][0]
    alike = next(at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    assert found.shared(0) == [0, alike - 1] and 0 < alike < len(one)
    assert found.manifest["dropped"] == {"unsupervised": 1}  # the branch that is not trained on


def pairs(count: int, seed: int = 0, longest: int = 9) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(0, 100, rng.integers(1, longest)).tolist()  # noqa: E731
    return [{"prompt": draw(), "chosen": draw(), "rejected": draw()} for _ in range(count)]


def test_what_teaches_nothing_is_left_out_and_counted(tmp_path: Path):
    same, empty = {"prompt": [1], "chosen": [2], "rejected": [2]}, {"prompt": [1], "chosen": [], "rejected": [2]}
    found = packed(tmp_path, [*pairs(20), same, empty, same])
    assert found.manifest["dropped"] == {"same": 2, "no_answer": 1} and found.manifest["documents"] == 20
    assert "documents left out: 2 pairs without a difference, 1 with an empty answer" in "\n".join(summary(found))
    (tmp_path / "only").mkdir()
    with pytest.raises(ValueError, match=r"no document is left of source .*: 1 same"):
        packed(tmp_path / "only", [same])


def test_units_are_never_cut(tmp_path: Path):
    records = [*pairs(60, 1), {"prompt": [1] * 30, "chosen": [2] * 3, "rejected": [3]}]
    found = packed(tmp_path, records)
    (rows,) = open_rows(found, 40)
    counts = rows.plan.counts
    assert (counts.dropped_documents, counts.long_documents, counts.split_pieces) == (1, 1, 0)
    seen = []
    for row in range(len(rows)):
        units, documents = rows.units(row), rows.documents(row)
        assert set(units.counts) == {2} and sum(documents) == 40 and len(documents) - len(units.parts) in (0, 1)
        assert [found.every_part[part]["length"] for part in units.parts] == documents[: len(units.parts)]  # pyright: ignore
        slice = rows.read(row, 0, 40)
        at = 0
        for part, length in zip(units.parts, documents, strict=False):
            record = records[part // 2]
            answer = record["rejected" if part % 2 else "chosen"]
            assert slice.ids[at : at + length].tolist() == [*record["prompt"], *answer]
            labels = slice.labels[at : at + length]
            assert labels[labels != -100].tolist() == answer and labels[-1] == -100
            at += length
        seen += (units.parts[::2] // 2).tolist()
    assert sorted(seen) == list(range(60))
    with pytest.raises(
        ValueError, match=r"all 61 units are longer than the context of 2 tokens, and a unit is never cut"
    ):
        open_rows(found, 2)


def rollout(**more: Any) -> dict[str, Any]:
    return {"prompt": [1, 2], "completions": [[3, 4], [5]], "rewards": [0, 1], **more}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (rollout(rewards=[1]), "rewards is 1 numbers; expected a list of numbers, one for each of the 2 completions"),
        (rollout(rewards=[1, None]), "rewards[1] is None; expected a finite number"),
        (rollout(advantages=[1, 2]), "both 'rewards' and 'advantages' are given; expected one"),
        (rollout(rewards=None), "neither 'rewards' nor 'advantages' is given; expected one"),
        (rollout(completions=[]), "the column 'completions' is empty; expected a list of completions"),
        (
            rollout(completions=[[3], "x"]),
            "the column 'prompt' is a list and 'completions[1]' is a str; expected two texts",
        ),
        (
            rollout(logprobs=[[-1, -2]]),
            "the column 'logprobs' is 1 lists; expected a list for each of the 2 completions",
        ),
        (rollout(logprobs=[[-1, -2], [-1, -2]]), "logprobs[1] has 2 numbers, and its completion has 1 tokens"),
        (rollout(logprobs=[[-1, 0.5], [-1]]), "logprobs[0] has 0.5; a log-probability is at most 0"),
        (rollout(logprobs=[[-1, "a"], [-1]]), "logprobs[0][1] is 'a'; expected a finite number"),
        (rollout(prompt="", completions=["a", "b"]), "these are texts, so a tokenizer is needed"),
        ({**rollout(advantages=[1, 2]), "rewards": None}, "there are advantages, and rewards in records before"),
        (rollout(prompt=[999]), "token 0 is 999, outside the vocabulary of 100 tokens"),
    ],
)
def test_bad_rollouts(tmp_path: Path, record: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'data.jsonl'}:2: ") + ".*" + re.escape(message)):
        packed(tmp_path, [rollout(), record])
    assert not (tmp_path / "packed").exists()


def test_log_probabilities_in_all_records_or_in_none(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data.jsonl:2: some records before this one have log-probabilities"):
        packed(tmp_path, [rollout(), rollout(logprobs=[[-1, -2], [-1]])])


def test_rewards_that_are_all_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    equal = rollout(rewards=[1, 1])
    with pytest.raises(ValueError, match="all rewards of each prompt are equal, so there is nothing to learn"):
        packed(tmp_path, [equal, equal])
    found = packed(tmp_path, [rollout(), equal, rollout(rewards=[3, 2])])
    words = "1 of the prompts: the completions' rewards are all equal, so there is nothing to learn from them"
    assert words in "\n".join(summary(found))
    assert main(["data", "inspect", str(found.folder)]) == 0
    out = capsys.readouterr().out
    assert words in out and "document 0: 7 tokens (4 + 3)" in out and "rollout (rewards)" in out
    assert main(["data", "inspect", str(tmp_path / "data.jsonl"), "--samples", "1"]) == 0
    assert "prompt: 1 2\ncompletion, reward 0: ⟦3 4⟧\ncompletion, reward 1: ⟦5⟧" in capsys.readouterr().out


@pytest.mark.parametrize(("ulysses", "ring", "data"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_every_rank_knows_the_units_and_has_the_numbers_of_its_tokens(
    tmp_path: Path, ulysses: int, ring: int, data: int
):
    rng = np.random.default_rng(0)
    records = []
    for _ in range(30):
        completions = [rng.integers(0, 100, rng.integers(1, 6)).tolist() for _ in range(3)]
        old = [(-rng.random(len(each))).tolist() for each in completions]
        records.append(
            {"prompt": [7, 7], "completions": completions, "rewards": rng.random(3).tolist(), "logprobs": old}
        )
    (rows,) = open_rows(packed(tmp_path, records), 37)
    every, whole = [], rows.old(0, 0, 37)
    for rank in range(ulysses * ring * data):
        mesh, stack = mesh_of(ulysses, ring, data, rank), Stack(ulysses=ulysses, ring=ring)
        batch = batch_of_units(rows, [0, 1], mesh, stack, 100, lambda start, stop: np.arange(start, stop) + 0.5)
        assert batch.units is not None and batch.old is not None and batch.reference is not None
        units = batch.units
        values = [records[part // 3]["rewards"][part % 3] for part in units.parts.tolist()]
        lengths = [len(records[part // 3]["completions"][part % 3]) for part in units.parts.tolist()]
        assert units.values.tolist() == values and units.lengths.tolist() == lengths
        assert units.count == len(values) // 3 and units.unit.tolist() == [i // 3 for i in range(len(values))]
        first = len(rows.units(0).parts)
        gap = rows.documents(0)[first:]  # padding is a document, of no unit
        assert units.documents.tolist() == [*range(first), *range(first + len(gap), len(values) + len(gap))]
        where = batch.layout.tokens(mesh.ring.rank, mesh.ulysses.rank)
        if mesh.data.rank == 0:
            every += zip(
                where.tolist(),
                batch.old[0].tolist(),
                batch.reference[0].tolist(),
                batch.labels[0].tolist(),
                strict=True,
            )
    found = {at: (old, scored, label) for at, old, scored, label in every if at < 37}
    assert whole is not None and [found[at][0] for at in range(37)] == whole.tolist() and whole.any()
    for at, (old, scored, label) in found.items():
        assert (old != 0) == (label != -100)
        if label != -100:  # the number of the token that is predicted
            assert rows.packed.read(int(scored), int(scored) + 1)[0] == label, at


def test_parts_that_do_not_fit_their_documents_are_refused(tmp_path: Path):
    found = packed(tmp_path, pairs(8))
    path, manifest = found.folder / "parts.bin", json.loads((found.folder / "manifest.json").read_text())
    parts = np.fromfile(path, PART)
    for name, change in (("length", 1), ("supervised", 1), ("length", -100)):
        wrong = parts.copy()
        wrong[name][0] += change
        wrong.tofile(path)
        manifest["files"]["parts.bin"]["sha256"] = sha256_of(path)
        manifest["content"] = content_of({n: a["sha256"] for n, a in manifest["files"].items()})
        (found.folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(
            ValueError, match=r"units.bin, parts.bin and documents.bin do not agree; pack the data again"
        ):
            Packed(found.folder)
