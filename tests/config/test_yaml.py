"""Files that are not plain YAML: each is refused with its place, and nothing in them runs or grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ithaca.config import load

GOOD = "model: {folder: x}\ndata: {context: 64, sources: [a]}\ntrain: {steps: 2, warmup: 1}\n"


def refused(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        load(path)
    return str(error.value).replace(f"{path.parent}/", "").removeprefix("the configuration cannot be used: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", "run.yaml:2:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("train:\n\tsteps: 3\n", "run.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token; indent with"),
        ("a: 'x\n", "not valid YAML: found unexpected end of stream"),
        ("a: \x07\n", "run.yaml: not valid YAML: unacceptable character"),
        (b"a: \xff\n", "run.yaml: not UTF-8 text (byte 3)"),
        ("- a\n- b\n", "run.yaml:1: the file must be sections of key: value lines"),
        ("just words\n", "run.yaml:1: the file must be sections"),
        (GOOD + "---\n" + GOOD, "run.yaml:4: several documents (---)"),
        (GOOD + "train: {steps: 3}\n", "run.yaml:4: duplicate key train; it is also at run.yaml:3"),
        ("train: {steps: 3, steps: 4}\n", "run.yaml:1: duplicate key steps"),
        (GOOD + "log: {<<: {every: 2}}\n", "run.yaml:4: merge keys (<<) are not read"),
        (GOOD + "log: {? [a, b] : 2}\n", "run.yaml:4: a key must be a word"),
        (GOOD + "description: *nobody\n", "run.yaml:4:14: not valid YAML: found undefined alias"),
        (GOOD + "description: !secret x\n", "run.yaml:4: the tag !secret is refused"),
    ],
)  # fmt: skip
def test_refused_with_its_place(path: Path, text: bytes | str, words: str):
    assert words in refused(path, text)


def test_python_tags_are_refused_and_run_nothing(path: Path):
    marker = path.parent / "ran"
    text = GOOD + f"description: !!python/object/apply:os.system ['touch {marker}']\n"
    words = refused(path, text)
    assert (
        words
        == "run.yaml:4: the tag !!python/object/apply:os.system is refused; only plain values are read, no objects"
    )
    assert not marker.exists()


def test_a_refused_value_is_not_missing_too(path: Path):
    words = refused(path, GOOD.replace("folder: x", "folder: !!python/name:os.system ''"))
    assert "refused" in words and "missing" not in words


def test_aliases_work(path: Path):
    path.write_text("model: {folder: &place x}\ndata: {context: 64, sources: [*place]}\ntrain: {steps: 2, warmup: 1}\n")
    assert load(path).config.data.sources[0].path == "x"


def test_bombs_are_small(path: Path):
    """The first would be 3 billion values: expanded it would never end."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "aliases (*name) expand to more than 10,000 values or 20 levels" in refused(path, "\n".join(lines))
    assert "aliases (*name) expand to more than" in refused(path, "a: &a [*a]\n")
    assert "more than 20 levels or 10,000 values" in refused(path, "a: " + "[" * 5000)
    assert "more than 20 levels or 10,000 values" in refused(path, "a: [" + "1," * 50000 + "]")
    assert "characters; the limit is 262,144" in refused(path, "#" * 300_000)
    assert "characters; the limit is 262,144" in refused(path, "#" * 3_000_000)


def test_a_byte_order_mark_and_windows_lines_are_read(path: Path):
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(path).config.train.steps == 2
