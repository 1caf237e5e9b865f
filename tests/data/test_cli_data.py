"""`ithaca data pack | inspect` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ithaca.cli.main import main

from .make import byte_level, chat, pack_ids, save_tokenizer, words, write_jsonl


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pack_says_what_became_of_everything(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    texts = [words(20, seed) for seed in range(60)] + [words(800, 99), "", "  "]
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in texts])
    (folder / "notes.md").write_text("not data")
    command = (
        "data",
        "pack",
        folder,
        "--tokenizer",
        tokenizer,
        "--out",
        tmp_path / "packed",
        "--context",
        "512",
        "--workers",
        1,
    )
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert "61 documents, " in out and "left out: 2 empty" in out
    assert "left out: 1 file, text beside records: notes.md" in out
    assert "rows of 512 tokens, " in out and "1 documents are longer (longest " in out and "split into " in out
    assert "packing: 100%" in err  # plain lines where there is no terminal
    code, out, _ = run(capsys, *command)
    assert code == 0 and "already holds this data" in out and "61 documents" in out


def test_pack_of_a_yaml_file(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    write_jsonl(tmp_path / "a.jsonl", [{"body": words(20, seed)} for seed in range(60)])
    write_jsonl(tmp_path / "b.jsonl", [chat("a b c", words(9, seed)) for seed in range(30)])
    (tmp_path / "run.yaml").write_text(f"""
model: {{folder: {tokenizer}}}
data:
  context: 128
  packed: {tmp_path / "packed"}
  sources:
    - {{path: {tmp_path / "a.jsonl"}, columns: {{text: body}}, weight: 3}}
    - {{path: {tmp_path / "b.jsonl"}, chat: true}}
train: {{steps: 1}}
""")
    code, out, err = run(capsys, "data", "pack", tmp_path / "run.yaml", "--workers", 1, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [source["kind"] for source in report["sources"]] == ["text", "chat"] and report["reused"] is False
    assert [plan["context"] for plan in report["rows"]] == [128, 128] and all(
        plan["full"] > 0.5 for plan in report["rows"]
    )
    assert len(list((tmp_path / "packed" / "rows").iterdir())) == 2  # ready for training
    code, _, err = run(capsys, "data", "pack", tmp_path / "run.yaml", "--kind", "text")
    assert code == 2 and "--kind is for files; with a YAML file it belongs to data.sources" in err


def test_pack_without_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "data", "pack", write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    assert code == 2 and "add --out FOLDER" in err


def test_inspect(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hello there", "good [day]") for _ in range(40)])
    run(capsys, "data", "pack", path, "--tokenizer", tokenizer, "--out", tmp_path / "packed", "--workers", 1)
    code, out, err = run(capsys, "data", "inspect", tmp_path / "packed", "--context", "256", "--verify")
    assert code == 0, err
    assert "40 documents" in out and "checksums are right" in out and "shortest" in out and "50% " in out
    assert "rows of 256 tokens" in out and "% full" in out and "100.0%" in out
    assert (
        "── document 0: " in out
        and "<|start|>user\nhello there<|end|>\n<|start|>assistant\n⟦good [day]<|end|>⟧\n" in out
    )
    assert not (tmp_path / "packed" / "rows").exists()  # looking changes nothing
    code, out, _ = run(capsys, "data", "inspect", tmp_path / "packed", "--context", "256", "--json", "--samples", 1)
    report = json.loads(out)
    assert code == 0 and report["documents"] == 40 and report["verified"] is False and len(report["sample"]) == 1
    lengths, (plan,) = report["lengths"], report["rows"]
    assert lengths["shortest"] == lengths["longest"] == lengths["quantiles"]["0.5"] == report["tokens"] / 40
    assert plan["tokens"] == report["tokens"] and plan["padding"] == plan["rows"] * 256 - report["tokens"]
    assert sum(bucket["documents"] for bucket in report["histogram"]) == 40
    assert sum(bucket["tokens"] for bucket in report["histogram"]) == report["tokens"]
    code, out, _ = run(capsys, "data", "inspect", path, tmp_path / "packed", "--json", "--samples", 1)
    assert code == 0 and [about.get("kind") or about["documents"] for about in json.loads(out)] == ["chat", 40]


def test_inspect_of_ids_shows_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pack_ids(tmp_path / "p", [[5, 6, 7], list(range(100, 400))], [[-100, 6, 7], None])
    code, out, _ = run(capsys, "data", "inspect", tmp_path / "p", "--samples", 2)
    assert code == 0 and "5 ⟦6 7 ⟧" in out and "300 tokens, the first 160" in out and "100 101 102" in out


def test_inspect_refuses_another_tokenizer(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": words(50)}])
    run(capsys, "data", "pack", path, "--tokenizer", tokenizer, "--out", tmp_path / "packed", "--workers", 1)
    other = save_tokenizer(tmp_path / "other", byte_level(size=380))
    code, _, err = run(capsys, "data", "inspect", tmp_path / "packed", "--tokenizer", other)
    assert code == 2 and "was packed with another tokenizer" in err and "vocabulary or rules differ" in err
    assert run(capsys, "data", "inspect", tmp_path / "packed", "--tokenizer", tokenizer)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words_of"),
    [
        (["--context", "1"], "a row needs at least 2 tokens"),
        (["--context", "much"], "'much' is not a number of tokens such as 4096, 64K or 1M"),
        (["--context", "64", "--long-documents", "cut"], "long_documents='cut' is unknown"),
        (["--context", "64", "--long-documents", "error"], "1 documents are longer than the context of 64 tokens"),
    ],
)
def test_inspect_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words_of: str):
    pack_ids(tmp_path / "p", [range(100), range(50)])
    code, out, err = run(capsys, "data", "inspect", tmp_path / "p", *arguments)
    assert code == 2 and out == "" and words_of in err and "Traceback" not in err


def test_inspect_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "data", "inspect", tmp_path)
    assert code == 2 and "is not a packed folder: it has no manifest.json" in err


def test_help_of_both(capsys: pytest.CaptureFixture[str]):
    for action, word in (("pack", "--chat-template"), ("inspect", "--long-documents")):
        with pytest.raises(SystemExit) as end:
            main(["data", action, "--help"])
        assert end.value.code == 0 and word in capsys.readouterr().out


def test_workers_import_no_torch(tmp_path: Path):
    """A hundred workers with torch would be thirty gigabytes."""
    np.save(tmp_path / "a.npy", np.arange(50))
    program = f"""if True:
        import sys
        from ithaca.data.pack import pack
        from ithaca.data.source import Source
        from ithaca.data.chat import render_chat
        import ithaca.data.work, ithaca.data.plan, ithaca.data.rows, ithaca.data.recall
        pack([Source({str(tmp_path / "a.npy")!r})], {str(tmp_path / "p")!r}, vocabulary=50, quiet=True)
        render_chat([dict(role="assistant", content="x")], "{{{{ messages[0].content }}}}", {{}})
        assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
