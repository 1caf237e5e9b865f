"""Texts with known answers: the same whichever way they are cut, the answer stands where it is said to, and seeds matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ithaca.data.needles import EVERY, Needles
from ithaca.data.rows import IGNORE
from ithaca.data.tokenizer import load_tokenizer
from ithaca.evaluation.languages import EVERY_TASK, Ids, Language, Pairs, Words
from ithaca.evaluation.tasks import VALUES, Task

from ..data.make import byte_level, save_tokenizer

LENGTH = 4096


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Language]:
    folder = save_tokenizer(tmp_path_factory.mktemp("words") / "tokenizer", byte_level(bos=True, size=400))
    return {"pairs": Pairs(128), "ids": Ids(1000, seed=3), "words": Words(load_tokenizer(folder))}


CASES = [(name, kind) for name in ("pairs", "ids", "words") for kind in EVERY_TASK if name != "pairs" or "key" in kind]
CASES.append(("pairs", "needle"))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_text_is_the_same_however_it_is_cut(languages, name: str, kind: str):
    task = Task(kind, languages[name], LENGTH, 0.3 if kind == "needle" else None, seed=7)
    for row in range(3):
        whole = task.read(row, 0, LENGTH)
        for cuts in ([1, 2, 3000, 4095], list(range(512, LENGTH, 512))):
            parts = [task.read(row, a, b) for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
            for got, wanted in zip(zip(*parts, strict=True), whole, strict=True):
                assert np.array_equal(np.concatenate(got), wanted)
        asked = np.flatnonzero(whole.labels != IGNORE)
        assert len(asked) == task.supervised(row) > 0 and asked[-1] == LENGTH - 2
        assert np.array_equal(whole.labels[asked], whole.ids[asked + 1]), "the answer stands behind the question"
        assert whole.ids.min() >= 0 and whole.ids.max() <= task.largest_token
    again, other = (
        Task(kind, languages[name], LENGTH, task.depth, seed=seed).read(0, 0, LENGTH).ids for seed in (7, 8)
    )
    assert np.array_equal(again, task.read(0, 0, LENGTH).ids) and not np.array_equal(other, again)


def test_what_is_asked_can_be_answered(languages):
    """A reader with eyes only: finds the facts in the ids and says what the labels say."""
    language = languages["ids"]
    for row in range(8):
        ids, labels, _ = Task("multi_value", language, LENGTH).read(row, 0, LENGTH)
        answers = labels[labels != IGNORE]
        key = ids[-1 - VALUES]
        told = [ids[at + 1] for at in np.flatnonzero(ids[: -1 - VALUES] == key)]
        assert len(answers) == VALUES and [t for t in told if t in answers] == list(answers)
        ids, labels, _ = Task("variable_tracking", language, LENGTH).read(row, 0, LENGTH)
        variable = ids[-2]
        for _ in range(4):
            variable = ids[np.flatnonzero(ids == variable)[0] + 1]  # where it is first named, it is defined
        assert variable == labels[-2]
        ids, labels, _ = Task("common_words", language, LENGTH).read(row, 0, LENGTH)
        answers = labels[labels != IGNORE]
        words, counts = np.unique(ids[: -1 - len(answers)], return_counts=True)
        assert list(words[np.argsort(-counts, kind="stable")][:3]) == list(answers)
        task = Task("multi_key", languages["pairs"], LENGTH)
        ids, labels, _ = task.read(row, 0, LENGTH)
        facts = languages["pairs"].tokens.fact(int(ids[-2]) - 1, np.arange(8))
        (stated,) = np.intersect1d(facts, ids)
        assert labels[-2] == languages["pairs"].tokens.value(int(np.flatnonzero(facts == stated)[0]))


def test_words_are_words(languages):
    task = Task("needle", languages["words"], 400, 0.5)
    text = languages["words"].tokenizer.decode(task.read(0, 0, 400).ids)
    assert "The secret number of the" in text and "What is the secret number" in text and text.startswith("<s>")
    number = text.rsplit(" ", 1)[1]
    assert number.isdigit() and len(number) == 7 and text.count(number) == 2


@pytest.mark.parametrize("name", ["pairs", "ids", "words"])
def test_depth_is_where_the_needle_lies(languages, name: str):
    places = []
    for depth in (0.0, 0.25, 0.5, 1.0):
        sample = Task("needle", languages[name], LENGTH, depth).sample(0)
        places.append(sample.pieces[-3][0])
    room = sample.pieces[-2][0] - len(sample.pieces[-3][1]) - len(languages[name].begin)
    assert places[0] == len(languages[name].begin) and places[-1] + len(sample.pieces[-3][1]) == sample.pieces[-2][0]
    assert [round((place - places[0]) / room, 2) for place in places] == [0.0, 0.25, 0.5, 1.0]


def test_what_does_not_fit_says_so(languages):
    with pytest.raises(ValueError, match=r"needle does not fit into eval length 20.*use lengths of at least \d+"):
        Task("needle", languages["words"], 20, 0.5)
    with pytest.raises(ValueError, match="multi_key does not fit into eval length 8"):
        Task("multi_key", languages["ids"], 8)
    with pytest.raises(ValueError, match="common_words cannot be asked in the language pairs"):
        Task("common_words", languages["pairs"], 512)
    with pytest.raises(ValueError, match="vocabulary of 20 tokens is too small"):
        Ids(20)


def test_needles_are_asked_for_at_every_distance(tmp_path: Path):
    source = Needles(1024, 128, seed=5)
    distances, unanswerable = [], 0
    for row in range(60):
        ids, labels, places = source.read(row, 0, 1024)
        cut = [source.read(row, a, a + 256) for a in range(0, 1024, 256)]
        assert all(
            np.array_equal(np.concatenate(g), w)
            for g, w in zip(zip(*cut, strict=True), (ids, labels, places), strict=True)
        )
        at, values = source.facts(row)
        assert len(set(at)) == source.keys and (ids[at] == source.tokens.fact(np.arange(source.keys), values)).all()
        asked = np.flatnonzero(labels != IGNORE)
        assert len(asked) == source.supervised(row) == 1024 // EVERY
        subject = ids[asked] - 1
        assert (labels[asked] == source.tokens.value(values[subject])).all()
        distances += list((asked - at[subject])[asked > at[subject]])
        unanswerable += int((asked < at[subject]).sum())
    assert 0.25 < unanswerable / (60 * 256) < 0.42
    assert min(distances) < 16 and max(distances) > 1000 and np.histogram(distances, 8, (0, 1024))[0].min() > 50
    with pytest.raises(ValueError, match="too short for 4 facts"):
        Needles(16, 128)
