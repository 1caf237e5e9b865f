"""What packing refuses: file, line, number, cause and fix in one message; exit code 2, no traceback, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.cli.main import main

from .make import CHANGING, chat, save_tokenizer, write_jsonl

Make = Callable[[Path], list[str]]  # makes files in a folder, gives the arguments of `ithaca data pack`


def lines(*texts: str | bytes, name: str = "a.jsonl") -> Make:
    def make(folder: Path) -> list[str]:
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        (folder / name).write_bytes(b"\n".join(raw))
        return [str(folder / name)]

    return make


def ids(*records: Any, vocabulary: str = "100") -> Make:
    def make(folder: Path) -> list[str]:
        return [str(write_jsonl(folder / "a.jsonl", records)), "--vocabulary", vocabulary]

    return make


def array(value: Any, offsets: Any = None) -> Make:
    def make(folder: Path) -> list[str]:
        np.save(folder / "a.npy", value, allow_pickle=True)
        if offsets is not None:
            np.save(folder / "a.offsets.npy", offsets)
        return [str(folder / "a.npy"), "--vocabulary", "100"]

    return make


def template(text: str, *turns: str) -> Make:
    def make(folder: Path) -> list[str]:
        save_tokenizer(folder / "tokenizer", template=text or None)
        path = write_jsonl(folder / "a.jsonl", [chat(*turns)])
        return [str(path), "--tokenizer", str(folder / "tokenizer")]

    return make


def several(folder: Path) -> list[str]:
    for name in ("a.jsonl", "b.txt"):
        (folder / name).write_text('{"text": "x"}')
    return [str(folder)]


def parquet(folder: Path) -> list[str]:
    (folder / "a.parquet").write_bytes(b"PAR1 and then nothing")
    return [str(folder / "a.parquet")]


GOOD = '{"text": "good"}'
BAD: dict[str, tuple[Make, list[str]]] = {
    "an empty file": (lines(""), ["a.jsonl is empty (0 bytes)", "remove it"]),
    "only blank lines": (lines("", " ", ""), ["a.jsonl has no record: every line of it is blank"]),
    "only empty documents": (
        lines('{"text": ""}', '{"text": " "}'),
        ["no document is left of source", "a.jsonl: 2 empty"],
    ),
    "invalid UTF-8 in jsonl": (
        lines(GOOD, b'{"text": "caf\xe9"}', GOOD),
        ["a.jsonl:2: not valid UTF-8 at byte 30 of the file (0xe9)", "save the file as UTF-8"],
    ),
    "invalid UTF-8 in a text": (
        lines(b"good \xff bad", name="a.txt"),
        ["a.txt: not valid UTF-8 at byte 5 (0xff)", "save the file as UTF-8"],
    ),
    "invalid UTF-8 behind a megabyte": (
        lines("é".encode() * (1 << 19) + b"x\xc3", name="a.txt"),
        ["a.txt: not valid UTF-8 at byte 1,048,577 (0xc3)"],
    ),
    "a malformed line": (
        lines(GOOD, GOOD, '{"text": "no end'),
        ["a.jsonl:3: not valid JSON at column 10", "every line must be one object"],
    ),
    "a line that is no object": (lines(GOOD, '["text"]'), ["a.jsonl:2: the line is a list, not an object"]),
    "a line nested too deeply": (lines(GOOD, "[" * 100_000), ["a.jsonl:2: ", "nested too deeply"]),
    "no column that is known": (
        lines('{"body": "x", "Text": "y"}'),
        [
            "a.jsonl:1: none of the columns",
            "did you mean 'Text'?",
            "present are 'body', 'Text'",
            "columns: {text: body}",
        ],
    ),
    "columns that can be read in two ways": (
        lines('{"text": "x", "messages": []}'),
        ["can be read as text or as chat; choose with kind: text | chat"],
    ),
    "a missing field": (
        lines(GOOD, '{"txt": "x", "id": 5}'),
        ["a.jsonl:2: the column 'text' is missing; did you mean 'txt'?; present are 'txt', 'id'"],
    ),
    "mixed types": (lines(GOOD, '{"text": ["x"]}'), ["a.jsonl:2: the column 'text' is a list, not a text: ['x']"]),
    "half a character": (
        lines(GOOD, r'{"text": "ab\ud83d"}'),
        ["a.jsonl:2: character 2 is half a surrogate pair (\\ud83d)", "write the text as UTF-8"],
    ),
    "half a character, found when later lines are read": (
        lines(GOOD, r'{"text": "ab\ud83d"}', *[GOOD] * 1500),
        ["ithaca data: ", "/in/a.jsonl:2: character 2 is half a surrogate pair"],
    ),
    "a chat without roles": (lines('{"messages": [{"content": "x"}]}'), ["a.jsonl:1: messages[0] has no 'role'"]),
    "a chat and no template": (template("", "a", "b"), ["a.jsonl:1: ", "has no chat template", "--chat-template"]),
    "a template that changes turns": (
        template(CHANGING, "a", "b", "c", "d"),
        ["a.jsonl:1: the chat template renders message 1 differently", "{% generation %}", "--chat-template"],
    ),
    "a completion that is a list": (
        lines('{"prompt": "x", "completion": [{"role": "assistant"}]}'),
        [
            "a.jsonl:1: the column 'prompt' is a str and 'completion' is a list; expected two texts, or two lists of messages"
        ],
    ),
    "an id outside the vocabulary": (
        ids({"input_ids": [1, 2]}, {"input_ids": [5, 100, 7]}),
        ["a.jsonl:2: token 1 is 100, outside the vocabulary of 100 tokens (0 to 99)", "belong together"],
    ),
    "a negative id": (ids({"input_ids": [5, -1]}), ["a.jsonl:1: token 1 is -1, outside the vocabulary"]),
    "an id that is no number": (ids({"input_ids": [1, "x"]}), ["a.jsonl:1: the column 'input_ids' holds 'x'"]),
    "half an id": (ids({"input_ids": [1, 2.5]}), ["a.jsonl:1: the column 'input_ids' holds 2.5, which is no token id"]),
    "ids as a text": (
        ids({"input_ids": "1 2 3"}),
        ["the column 'input_ids' is a str, not a list of token ids: '1 2 3'"],
    ),
    "labels of another length": (
        ids({"input_ids": [1, 2, 3], "labels": [1, 2]}),
        ["a.jsonl:1: 'labels' has 2 numbers but there are 3 ids"],
    ),
    "labels that are shifted": (
        ids({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}),
        ["'labels'[0] is 2 but the id there is 1", "Do not shift them"],
    ),
    "ids with padding": (
        ids({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}),
        ["a.jsonl:1: 'attention_mask' has zeros, so the ids are padded"],
    ),
    "ids without the size of the vocabulary": (
        lambda folder: ids({"input_ids": [1]})(folder)[:1],
        ["without a tokenizer the size of the vocabulary must be given (--vocabulary)"],
    ),
    "an array of objects": (array(np.array([{}, {}])), ["a.npy cannot be read: it holds Python objects"]),
    "an array of floats": (array(np.ones(5)), ["a.npy is float64 of shape (5,); token ids are whole numbers"]),
    "an array outside the vocabulary": (
        array(np.array([1, 2, 3, 400]), np.array([0, 2, 4])),
        ["a.npy, document 1: token 1 is 400, outside the vocabulary of 100 tokens"],
    ),
    "offsets that do not fit": (
        array(np.arange(9), np.array([0, 5])),
        ["a.offsets.npy must rise from 0 to the 9 tokens of", "it has 2 numbers from 0 to 5"],
    ),
    "a parquet file cut short": (parquet, ["a.parquet cannot be read as parquet", "copy it again"]),
    "files of several formats": (several, ["holds files of several formats: jsonl (a.jsonl), txt (b.txt)"]),
    "a file of no known format": (
        lines("x", name="a.jsonl.gz"),
        ["a.jsonl.gz: the format cannot be told from the name", "decompress .gz"],
    ),
    "a folder without data": (
        lambda folder: [str(folder), *lines("x", name="README")(folder)][:1],
        [
            "has no file to read (.jsonl, .ndjson, .parquet, .txt, .npy",
            "among 1 files; left out: 1 file, of no known format: README",
        ],
    ),
    "a glob without a match": (lambda folder: [str(folder / "*.jsonl")], ["no file matches", "*.jsonl"]),
    "a file that is not there": (
        lambda folder: [str(folder / "b.jsonl"), *lines(GOOD)(folder)][:1],
        ["b.jsonl is not there; did you mean 'a.jsonl'?", "for a Hugging Face dataset write hf:"],
    ),
    "an unknown column name": (
        lambda folder: [*lines(GOOD)(folder), "--column", "texts=body"],
        ["columns maps 'texts', which is not a name known here; did you mean 'text'?"],
    ),
    "a column that is no mapping": (
        lambda folder: [*lines(GOOD)(folder), "--column", "text"],
        ["--column 'text' must be NAME=COLUMN, such as text=body"],
    ),
    "an unknown format": (
        lambda folder: [*lines(GOOD)(folder), "--format", "csv"],
        ["format 'csv' is unknown; choose one of auto, jsonl, json, parquet"],
    ),
    "an unknown kind": (lambda folder: [*lines(GOOD)(folder), "--kind", "poem"], ["kind 'poem' is unknown"]),
    "no workers": (lambda folder: [*lines(GOOD)(folder), "--workers", "0"], ["--workers 0 must be from 1 to 1024"]),
    "a vocabulary that is too small": (
        lambda folder: [*lines(GOOD)(folder), "--vocabulary", "50"],
        ["vocabulary=50 is smaller than the tokenizer's 400"],
    ),
    "a tokenizer that is not there": (
        lambda folder: [*lines(GOOD)(folder), "--tokenizer", str(folder / "nowhere")],
        ["the tokenizer folder", "nowhere is not there"],
    ),
    "a context of one token": (
        lambda folder: [*lines('{"text": "hello world"}')(folder), "--context", "1"],
        ["context=1: a row needs at least 2 tokens"],
    ),
}
WRITTEN = {"a context of one token"}  # the data itself is fine


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], name: str):
    make, expected = BAD[name]
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    arguments = make(folder)
    if not {"--tokenizer", "--vocabulary"} & set(arguments) and "size of the vocabulary" not in expected[0]:
        arguments += ["--tokenizer", str(tokenizer)]
    if name == "a vocabulary that is too small":
        arguments += ["--tokenizer", str(tokenizer)]
    if "--workers" not in arguments:
        arguments += ["--workers", "1"]
    assert main(["data", "pack", *arguments, "--out", str(out), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err and len(captured.err.splitlines()) <= 3
    for words in expected:
        assert words in captured.err, captured.err
    assert captured.err.count("a.jsonl:") <= 1  # one place
    assert out.exists() == (name in WRITTEN)
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("in", "out")] == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    (path,) = lines(GOOD)(tmp_path)
    (tmp_path / "file").write_text("in the way")
    assert main(["data", "pack", path, "--tokenizer", str(tokenizer), "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert "out cannot be made: " in error and "choose a folder you can write to" in error and "Traceback" not in error


def test_no_text_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (path,) = lines(GOOD)(tmp_path)
    assert main(["data", "pack", path, "--out", str(tmp_path / "out")]) == 2
    assert "holds text, so a tokenizer is needed; give its folder" in capsys.readouterr().err


def test_no_end_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tokenizer(tmp_path / "tokenizer", eos_token=None)
    (path,) = lines(GOOD)(tmp_path)
    arguments = [
        "data",
        "pack",
        path,
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    assert main(arguments) == 2
    assert "no end-of-sequence token to end documents with; pass --no-eos" in capsys.readouterr().err
    assert main([*arguments, "--no-eos"]) == 0


def test_the_first_bad_line_is_named_whatever_the_workers_do(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from ithaca.data import readers

    monkeypatch.setattr(readers, "_LEAST", 2000)
    good = json.dumps({"text": "word " * 50})
    texts = [good] * 100
    texts[37] = texts[61] = texts[90] = "{"
    (path,) = lines(*texts)(tmp_path)
    arguments = ["data", "pack", path, "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--json"]
    assert main([*arguments, "--workers", "3"]) == 2
    assert "a.jsonl:38: not valid JSON" in capsys.readouterr().err


def test_cases_are_many():
    assert len(BAD) >= 44
