"""Packing: what comes out is what went in, whatever the format; and a folder is whole, the same again, or refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.data.find import HIDDEN, UNKNOWN, find_files
from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.readers import read_text, split_parts
from ithaca.data.source import Source
from ithaca.data.tokenizer import check_tokenizer, load_tokenizer

from .make import CHATML, byte_level, chat, pack_ids, pack_random, save_tokenizer, words, write_jsonl

TEXTS = [words(5 + 7 * i, i, odd=i % 3 == 0) for i in range(40)]
EOS = 2


def documents(packed: Packed) -> list[list[int]]:
    return [packed.read(int(a), int(b)).tolist() for a, b in zip(packed.offsets[:-1], packed.offsets[1:], strict=True)]


def masks(packed: Packed) -> list[list[bool] | None]:
    found = [packed.mask(int(a), int(b)) for a, b in zip(packed.offsets[:-1], packed.offsets[1:], strict=True)]
    return [None if mask is None else mask.tolist() for mask in found]


def packing(tmp_path: Path, path: Path | str, tokenizer: Path | None, **more: Any) -> Packed:
    source = {name: more.pop(name) for name in ("format", "columns", "kind", "split") if name in more}
    options = {"workers": 1, "quiet": True, **more}
    return pack([Source(str(path), **source)], tmp_path / "packed", tokenizer=tokenizer and str(tokenizer), **options)


def expected(tokenizer: Path, texts: list[str] = TEXTS) -> list[list[int]]:
    return [ids + [EOS] for ids in load_tokenizer(tokenizer)(texts, add_special_tokens=False)["input_ids"]]


# Formats.


def test_jsonl(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    packed = packing(tmp_path, path, tokenizer)
    assert documents(packed) == expected(tokenizer)
    assert packed.manifest["tokens"] == sum(map(len, documents(packed))) and packed.manifest["documents"] == 40
    assert packed.manifest["supervised"] == packed.manifest["tokens"] - 40 and set(masks(packed)) == {None}
    assert packed.manifest["dropped"] == {} and packed.dtype == np.uint16
    packed.verify()


def test_jsonl_with_a_byte_order_mark_windows_lines_and_blank_ones(tmp_path: Path, tokenizer: Path):
    lines = b"\r\n".join(json.dumps({"text": text}).encode() + b"\r\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\r\n" + lines.rstrip())  # and no line end at the end
    assert documents(packing(tmp_path, tmp_path / "a.jsonl", tokenizer)) == expected(tokenizer)


def test_parquet_and_column_mapping(tmp_path: Path, tokenizer: Path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"body": TEXTS, "more": list(range(40))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    packed = packing(tmp_path, tmp_path / "a.parquet", tokenizer, columns={"text": "body"})
    assert documents(packed) == expected(tokenizer)


def test_text_files_in_a_folder_are_documents(tmp_path: Path, tokenizer: Path):
    folder = tmp_path / "books"
    for number in (2, 0, 1):
        (folder / f"part{number}").mkdir(parents=True)
        (folder / f"part{number}" / "book.txt").write_text(TEXTS[number], encoding="utf-8-sig" if number else "utf-8")
    (folder / ".hidden.txt").write_text("not this")
    (folder / "README").write_text("nor this")
    packed = packing(tmp_path, folder, tokenizer)
    assert documents(packed) == expected(tokenizer, TEXTS[:3])
    assert packed.manifest["sources"][0]["left_out"] == {HIDDEN: [".hidden.txt"], UNKNOWN: ["README"]}


def test_a_long_text_file_is_read_in_pieces(tmp_path: Path, tokenizer: Path):
    """More than two blocks, so that characters may be cut in two."""
    text = "".join(words(2000, seed, odd=True) + "é日本語😀\n" for seed in range(55))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert (tmp_path / "a.txt").stat().st_size > 1 << 19
    assert documents(packing(tmp_path, tmp_path / "a.txt", tokenizer)) == expected(tokenizer, [text])


def test_characters_that_lie_on_the_edge_of_a_block(tmp_path: Path):
    (tmp_path / "a.txt").write_text("日" * 200_000, encoding="utf-8")  # three bytes each
    pieces = list(read_text(str(tmp_path / "a.txt")))
    assert "".join(text for text, _ in pieces) == "日" * 200_000 and len(pieces) == 4
    assert sum(size for _, size in pieces) == 600_000


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_what_stands_around_a_document(tmp_path: Path, bos: bool, eos: bool):
    folder = save_tokenizer(tmp_path / "tokenizer", byte_level(bos=bos))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    (found,) = documents(packing(tmp_path, path, folder, eos=eos))
    assert found == load_tokenizer(folder)("hello")["input_ids"] + [EOS] * eos
    assert (found[0] == 1) == bos


def test_chats(tmp_path: Path, tokenizer: Path):
    talks = [chat("hello there", "good day", "so?", "so."), chat("nobody answers"), chat("hi", "ho")]
    packed = packing(tmp_path, write_jsonl(tmp_path / "a.jsonl", talks), tokenizer)
    loaded = load_tokenizer(tokenizer)
    texts = [loaded.apply_chat_template(talk["messages"], tokenize=False) for talk in (talks[0], talks[2])]
    assert [loaded.decode(ids) for ids in documents(packed)] == texts
    said = []
    for ids, mask in zip(documents(packed), masks(packed), strict=True):
        assert mask is not None
        said.append(loaded.decode([token for token, seen in zip(ids, mask, strict=True) if seen]))
    assert said == ["good day<|end|>so.<|end|>", "ho<|end|>"]
    assert packed.manifest["dropped"] == {"unsupervised": 1} and packed.manifest["sources"][0]["kind"] == "chat"
    assert packed.manifest["supervised"] == sum(sum(mask or []) for mask in masks(packed))
    assert packed.supervised().tolist() == [sum(mask or []) for mask in masks(packed)]


def test_chats_from_parquet_have_no_keys_they_were_not_given(tmp_path: Path, tokenizer: Path):
    """A table gives every message every key, with null; the template must not see them."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ ' CALL' if 'tool_calls' in m }};{% endfor %}"
    talk = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": "b", "tool_calls": "x"},
    ]
    parquet.write_table(arrow.table({"messages": [talk]}), tmp_path / "a.parquet")
    packed = packing(tmp_path, tmp_path / "a.parquet", tokenizer, chat_template=template)
    assert load_tokenizer(tokenizer).decode(documents(packed)[0]) == "user:a;assistant:b CALL;"


def test_prompts_and_completions(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "two and two is", "completion": " four", "n": 1}])
    packed = packing(tmp_path, path, tokenizer)
    (ids,), (mask,) = documents(packed), masks(packed)
    assert mask is not None
    loaded = load_tokenizer(tokenizer)
    assert loaded.decode([token for token, seen in zip(ids, mask, strict=True) if seen]) == " four</s>"
    assert loaded.decode(ids) == "two and two is four</s>"


@pytest.mark.parametrize("vocabulary", [1000, 65_536, 65_537, 200_000])
def test_ids_and_labels(tmp_path: Path, vocabulary: int):
    ids = [[vocabulary - 1, 0, 5, 7], [1, 2, 3], [4, 5, 6]]
    labels = [[-100, 0, -100, 7], None, [4, -100, 6]]
    packed = pack_ids(tmp_path / "p", ids, labels, vocabulary)
    assert documents(packed) == ids and masks(packed) == [[False, True, False, True], [True] * 3, [True, False, True]]
    assert packed.dtype == (np.uint16 if vocabulary <= 65_536 else np.uint32)
    assert packed.largest_token == vocabulary - 1 and packed.vocabulary == vocabulary
    assert packed.supervised().tolist() == [2, 2, 1]  # nobody predicts a first token


def test_arrays(tmp_path: Path):
    flat = np.arange(20, dtype=np.uint16)
    np.save(tmp_path / "a.npy", flat)
    assert documents(packing(tmp_path, tmp_path / "a.npy", None, vocabulary=20)) == [flat.tolist()]
    np.save(tmp_path / "a.offsets.npy", np.array([0, 5, 5, 20]))
    packed = pack([Source(str(tmp_path / "*.npy"))], tmp_path / "two", vocabulary=20, workers=1, quiet=True)
    assert documents(packed) == [flat[:5].tolist(), flat[5:].tolist()] and packed.manifest["dropped"] == {"empty": 1}
    np.save(tmp_path / "b.npy", flat.reshape(4, 5))
    packed = pack([Source(str(tmp_path / "b.npy"))], tmp_path / "three", vocabulary=20, workers=1, quiet=True)
    assert documents(packed) == flat.reshape(4, 5).tolist()


def test_datasets(tmp_path: Path, tokenizer: Path):
    datasets = pytest.importorskip("datasets")
    made = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"text": TEXTS}), "test": datasets.Dataset.from_dict({"text": TEXTS[:2]})}
    )
    made.save_to_disk(str(tmp_path / "saved"))
    assert documents(packing(tmp_path, tmp_path / "saved", tokenizer)) == expected(tokenizer)
    other = [Source(str(tmp_path / "saved"), split="test")]
    packed = pack(other, tmp_path / "other", tokenizer=str(tokenizer), quiet=True)
    assert documents(packed) == expected(tokenizer, TEXTS[:2])
    with pytest.raises(ValueError, match=r"has no 'tests'; did you mean 'test'\?; the splits train, test"):
        packing(tmp_path / "x", tmp_path / "saved", tokenizer, split="tests")


def test_empty_and_tiny_documents_are_counted(tmp_path: Path, tokenizer: Path):
    records = [{"text": ""}, {"text": "  \n "}, {"text": None}, {"text": "word"}, {"text": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    packed = packing(tmp_path, path, tokenizer, eos=False)
    assert packed.manifest["dropped"] == {"empty": 3, "too_short": 1} and packed.manifest["documents"] == 1
    assert packed.manifest["tokens"] == len(documents(packed)[0])


def test_long_documents_among_short_ones_keep_their_place(tmp_path: Path, tokenizer: Path):
    texts = [TEXTS[0], words(60_000, 3), TEXTS[1], TEXTS[2]]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    assert len(texts[1]) > 1 << 18
    assert documents(packing(tmp_path, path, tokenizer)) == expected(tokenizer, texts)


# Many parts, many workers.


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch):
    from ithaca.data import readers

    monkeypatch.setattr(readers, "_LEAST", 3000)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    talks = write_jsonl(tmp_path / "b.jsonl", [chat(words(5, i), words(9, i)) for i in range(30)])
    sources = [Source(str(path)), Source(str(talks))]
    files = find_files(sources[0])
    assert len(split_parts(0, files)) > 5
    one = pack(sources, tmp_path / "one", tokenizer=str(tokenizer), workers=1, quiet=True)
    three = pack(sources, tmp_path / "three", tokenizer=str(tokenizer), workers=3, quiet=True)
    assert one.identity == three.identity and len(one.manifest["shards"]) > 6
    assert one.manifest["sources"] == three.manifest["sources"]
    ranges = [source["range"] for source in one.manifest["sources"]]
    assert ranges == [[0, 40], [40, 70]] and documents(one)[:40] == expected(tokenizer)
    assert masks(one)[0] is None and masks(one)[40] is not None  # a mask only where it is needed
    for name in ("lengths", "supervised"):
        assert np.array_equal(getattr(one, name)(), getattr(three, name)())
    assert one.lengths(1).tolist() == [len(ids) for ids in documents(one)[40:]]


def test_lines_are_read_once_wherever_parts_are_cut(tmp_path: Path):
    from ithaca.data.readers import read_records
    from ithaca.data.source import Piece

    path = write_jsonl(tmp_path / "a.jsonl", [{"n": i, "text": "x" * (i * 7 % 23)} for i in range(50)])
    size = path.stat().st_size
    for cut in range(0, size + 1, 3):
        pieces = [Piece(str(path), 0, cut, 1), Piece(str(path), cut, size, 1)]
        found = [record.values["n"] for piece in pieces for record in read_records("jsonl", piece, Source("x"), None)]
        assert found == list(range(50))


def test_small_files_share_a_shard(tmp_path: Path, tokenizer: Path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    packed = packing(tmp_path, tmp_path / "*.txt", tokenizer)
    assert documents(packed) == expected(tokenizer) and len(packed.manifest["shards"]) == 1


# A folder is whole or not there; the same again is found; anything else is refused.


def test_the_same_again_does_nothing(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    packing(tmp_path, path, tokenizer)
    before = {each: each.stat().st_mtime_ns for each in (tmp_path / "packed").rglob("*")}
    said: list[str] = []
    os.utime(path)  # another time, the same content
    packing(tmp_path, path, tokenizer, say=said.append)
    assert said == [
        f"{tmp_path / 'packed'} already holds this data, packed with the same tokenizer and settings: nothing to do"
    ]
    assert before == {each: each.stat().st_mtime_ns for each in (tmp_path / "packed").rglob("*")}


def test_something_else_is_refused_and_named(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    identity = packing(tmp_path, path, tokenizer).identity
    other = save_tokenizer(tmp_path / "other", byte_level(size=380), template=CHATML + " ")
    cases: list[tuple[Any, list[str]]] = [
        (lambda: packing(tmp_path, path, tokenizer, eos=False), ["eos was True, is now False"]),
        (
            lambda: packing(tmp_path, path, other),
            ["the tokenizer's vocabulary or rules differ", "vocabulary was 400, is now 380"],
        ),
        (lambda: packing(tmp_path, tmp_path, tokenizer, format="jsonl"), ["b.jsonl is new"]),
        (lambda: packing(tmp_path, tmp_path / "b.jsonl", tokenizer), ["the file b.jsonl is new", "a.jsonl is gone"]),
    ]
    write_jsonl(tmp_path / "b.jsonl", [{"text": "x y"}])
    for again, words_of in cases:
        with pytest.raises(ValueError, match=r"exists and holds something else(.|\n)*pass --force to replace") as error:
            again()
        assert all(word in str(error.value) for word in words_of), error.value
        assert "chat template" not in str(error.value)  # of no importance to plain text
    text = path.read_text()
    path.write_text(text.replace("a", "b", 1))
    with pytest.raises(ValueError, match=r"a.jsonl has changed \(SHA-256 differs\)"):
        packing(tmp_path, path, tokenizer)
    path.write_text(text + '{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl had [\d,]+ bytes, now"):
        packing(tmp_path, path, tokenizer)
    assert Packed(tmp_path / "packed").identity == identity  # untouched by all this
    assert packing(tmp_path, path, tokenizer, force=True).manifest["documents"] == 41
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "other",
        "packed",
    ]  # nothing left over


def test_changed_offsets_are_noticed(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(20))
    np.save(tmp_path / "a.offsets.npy", np.array([0, 5, 20]))
    packing(tmp_path, tmp_path / "a.npy", None, vocabulary=20)
    np.save(tmp_path / "a.offsets.npy", np.array([0, 6, 20]))
    with pytest.raises(ValueError, match=r"a.offsets.npy has changed"):
        packing(tmp_path, tmp_path / "a.npy", None, vocabulary=20)


def test_a_folder_that_is_something_else_is_never_touched(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "precious").write_text("mine")
    for force in (False, True):
        with pytest.raises(
            ValueError, match=r"is not a packed folder.*not replaced: choose another folder, or remove it"
        ):
            packing(tmp_path, path, tokenizer, force=force)
    assert (tmp_path / "packed" / "precious").read_text() == "mine"


def test_an_empty_folder_may_be_used(tmp_path: Path, tokenizer: Path):
    (tmp_path / "packed").mkdir()
    assert (
        packing(tmp_path, write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}]), tokenizer).manifest["documents"] == 1
    )


def test_nothing_stays_after_a_failure(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": 5}])
    with pytest.raises(ValueError, match=r"a.jsonl:2: the column 'text' is a int"):
        packing(tmp_path, path, tokenizer)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_killed_pack_leaves_nothing_that_looks_done_and_is_swept(tmp_path: Path, tokenizer: Path):
    """At the last moment: everything is written, and is about to be brought to the disk."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": list(range(3000))}])
    program = f"""if True:
        import os, signal
        from ithaca.data import publish
        from ithaca.data.pack import pack
        from ithaca.data.source import Source
        publish.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        pack([Source({str(path)!r})], {str(tmp_path / "packed")!r}, vocabulary=3000, workers=1, quiet=True)
    """
    process = subprocess.Popen([sys.executable, "-c", program])
    assert process.wait() == -signal.SIGKILL
    mark = f".packed.unfinished-{socket.gethostname()}-{process.pid}"
    assert (tmp_path / mark / "tokens-00000.bin").exists() and not (tmp_path / "packed").exists()
    small = write_jsonl(tmp_path / "b.jsonl", [{"text": "hello"}])
    packing(tmp_path, small, tokenizer)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "packed"]


def test_damage_is_found(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 20, 50, masked=True)
    shard = tmp_path / "p" / packed.manifest["shards"][0]["file"]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-4] + bytes(4))
    with pytest.raises(ValueError, match=r"tokens-00000.bin has changed since it was written \(SHA-256 differs\)"):
        Packed(tmp_path / "p").verify()
    shard.write_bytes(raw[:-4])
    with pytest.raises(
        ValueError, match=r"tokens-00000.bin has [\d,]+ bytes, manifest.json says [\d,]+; copy it again"
    ):
        Packed(tmp_path / "p")
    with pytest.raises(ValueError, match=r"tokens-00000.bin ends at byte [\d,]+: it was cut short"):
        packed.read(int(packed.offsets[-2]), int(packed.offsets[-1]))
    shard.unlink()
    with pytest.raises(ValueError, match=r"tokens-00000.bin is missing, though manifest.json lists it"):
        Packed(tmp_path / "p")


def test_manifests_that_are_none(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 20, 50, masked=False)
    path, good = tmp_path / "p" / "manifest.json", packed.manifest
    for text, message in [
        ("{", "manifest.json cannot be read"),
        ("[]", "is not the manifest of a packed folder"),
        (json.dumps({**good, "version": 99}), "has format version 99, this ithaca reads 1"),
        (json.dumps({**good, "documents": 5}), "'documents.bin' should have 48 bytes by its counts, not 168"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Packed(tmp_path / "p")
    with pytest.raises(ValueError, match=r"nowhere is not there; make it with 'ithaca data pack"):
        Packed(tmp_path / "nowhere")


def test_the_tokenizer_has_to_be_the_same(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    packed = packing(tmp_path, path, tokenizer)
    check_tokenizer(packed, load_tokenizer(tokenizer))
    check_tokenizer(packed, load_tokenizer(tmp_path / "packed" / "tokenizer"))  # it keeps its own
    retemplated = load_tokenizer(save_tokenizer(tmp_path / "template", template="{{ messages }}"))
    check_tokenizer(packed, retemplated)  # of no importance to plain text
    other = load_tokenizer(save_tokenizer(tmp_path / "other", byte_level(size=380)))
    with pytest.raises(
        ValueError, match=r"was packed with another tokenizer .* than that of my-model: vocabulary or rules differ"
    ):
        check_tokenizer(packed, other, "my-model")
    talks = pack(
        [Source(str(write_jsonl(tmp_path / "c.jsonl", [chat("a", "b")])))], tmp_path / "c", tokenizer=str(tokenizer)
    )
    with pytest.raises(ValueError, match="chat template differ"):
        check_tokenizer(talks, retemplated)


def test_a_given_chat_template_is_part_of_the_data_not_of_the_tokenizer(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")])
    packed = packing(tmp_path, path, tokenizer, chat_template=CHATML.replace("<|start|>", "#"))
    assert load_tokenizer(tokenizer).decode(documents(packed)[0]).startswith("#user")
    check_tokenizer(packed, load_tokenizer(tokenizer))
    with pytest.raises(ValueError, match="it was packed with another chat template"):
        packing(tmp_path, path, tokenizer)
