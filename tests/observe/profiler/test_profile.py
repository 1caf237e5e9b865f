"""A profile of a tiny model on CPU tensors: every byte has a category, a module and a line; table and JSON say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.base.holding import CATEGORIES
from ithaca.base.units import format_bytes
from ithaca.cli.main import main
from ithaca.observe.profiler.journal import Journal, read
from ithaca.observe.profiler.text import describe
from ithaca.observe.profiler.trace import Span, busy, by_time, copies_alone

SIZES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 65536,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


@pytest.fixture(scope="module")
def profiled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """profile.json, what was printed, and the folder, of rank 0 of 2 with everything switched on."""
    out = tmp_path_factory.mktemp("profile")
    printed = pytest.MonkeyPatch()
    lines: list[str] = []
    printed.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
    try:
        code = main([
            "profile", str(tiny), "--gpus", "2xH100", "--context", "512", "--cpu", "--layers", "2", "--states", "--steps", "1",
            "--set", "tile=128,store=host,heads_per_stage=2", "--out", str(out), "--html", str(out / "page.html"),
        ])  # fmt: skip
    finally:
        printed.undo()
    assert code == 0
    return json.loads((out / "profile.json").read_text()), lines[-1], out


def test_every_byte_is_told(profiled):
    found, _, _ = profiled
    assert found["profile"] == 1 and set(found["categories"]) <= set(CATEGORIES)
    for parts in ("modules", "lines"):
        assert sum(each["bytes"] for each in found[parts]) == found["peak"]
    assert sum(found["categories"].values()) == found["peak"]
    assert max(sum(by.values()) for by in found["phases"].values()) == found["peak"]
    assert found["categories"] == found["phases"][found["peak_phase"]]
    assert found["categories"].get("other", 0) < 0.02 * found["peak"]
    weights = (2 * (128 * 16 * (8 + 8 + 2 * 4) + 3 * 128 * 256 + 2 * 128) + 128 + 2 * 512 * 128) // 2
    missing = (128 * 16 * (8 + 8 + 2 * 4) + 3 * 128 * 256 + 2 * 128) // 2  # the third layer, whose states are held
    assert found["phases"]["load"]["parameters"] == pytest.approx(4 * (weights + missing), rel=0.02)
    assert found["phases"]["backward"]["optimizer"] == pytest.approx(8 * (weights + missing), rel=0.03)
    assert found["phases"]["step"]["gradients"] == pytest.approx(4 * (weights + missing), rel=0.05)
    names = {each["name"] for each in found["modules"]}
    assert {"model.layers.1", "model.layers.0.mlp", "model.embed_tokens", "lm_head"} <= names
    assert any(each["where"].startswith("engine/attention/stages.py:") for each in found["lines"])


def test_the_timeline_holds_the_peak(profiled):
    found, _, _ = profiled
    timeline = found["timeline"]
    totals = [sum(column) for column in zip(*timeline["categories"].values(), strict=True)]
    assert len(totals) == len(timeline["seconds"]) <= 2000 and max(totals) == found["peak"]
    assert timeline["seconds"] == sorted(timeline["seconds"])
    starts = {each["name"]: each["from"] for each in timeline["phases"]}
    assert list(starts) == ["forward", "loss", "backward", "step"] and list(starts.values()) == sorted(starts.values())
    top = timeline["seconds"][totals.index(max(totals))]
    assert starts["backward"] <= top <= starts["step"] and found["peak_phase"] == "backward"


def test_the_plan_stands_beside_it(profiled):
    found, _, out = profiled
    planned = found["planned"]
    assert planned["peak"] == pytest.approx(found["peak"], rel=0.15)
    assert planned["phases"]["backward"]["parameters"] == pytest.approx(found["categories"]["parameters"], rel=0.02)
    assert json.loads((out / "plan.json").read_text())["model"]["layers"] == 2
    assert found["model"]["layers"] == 3 and found["layers"] == 2 and found["rank_of"] == 2


def test_table_and_json_say_the_same(profiled):
    found, printed, out = profiled
    told = describe(found)
    assert printed.splitlines()[:-1] == told and str(out) in printed.splitlines()[-1]
    planned = found["planned"]["phases"][found["planned"]["peak_phase"]]
    for name in ("parameters", "optimizer", "attention"):
        row = next(line for line in told if line.split()[0] == name)
        assert f"{format_bytes(planned[name])}  " in row and f"{format_bytes(found['categories'][name])}  " in row
    assert any(found["lines"][0]["where"] in line for line in told)
    assert "waited for" in printed and "not to be had without a GPU" in printed and found["missing"]
    assert (out / "trace.json.gz").stat().st_size > 1000 and not (out / "memory.pickle").exists()
    assert "Over time, as measured" in (out / "page.html").read_text()


def test_copies_and_operators(profiled):
    found, _, _ = profiled
    copies = found["copies"]
    kept = 2 * 256 * 128 * 2  # inputs of two layers, 256 tokens of this rank in bf16
    assert copies["bytes_out"] >= kept and copies["bytes_in"] >= kept
    assert copies["exposed"] == copies["seconds"] > 0, "on a CPU a copy is waited for"
    names = [each["name"] for each in found["kernels"]]
    assert "aten::mm" in names and names == [
        each["name"] for each in sorted(found["kernels"], key=lambda each: -each["seconds"])
    ]


def test_a_journal_is_read_back():
    journal = Journal(torch.device("cpu"))
    journal.hold("parameters", 100, "weights")
    with journal.watching():
        journal.begin("load")
        journal.begin("forward")
        a = torch.empty(2048, dtype=torch.uint8)
        journal.see(a, "kept", module="layer")
        b = torch.empty(1024, dtype=torch.uint8)
        del b
        journal.begin("backward")
        c = torch.empty(512, dtype=torch.uint8)
        del a, c
    account = read(journal)
    assert account.peak == 100 + 2048 + 1024 and account.peak_phase == "forward"
    assert account.categories == {"parameters": 100, "kept": 2048, "other": 1024}
    assert dict(account.modules) == {"layer": 2048, "outside of modules": 1124}
    assert sum(account.phases["backward"].values()) == 100 + 2048 + 512 and account.phases["load"] == {
        "parameters": 100
    }
    totals = [sum(column) for column in zip(*account.timeline["categories"].values(), strict=True)]
    assert totals[-1] == 100 and max(totals) == account.peak and min(totals) == 100, "no dip where a name changes"


def test_time_is_counted_once():
    spans = [
        Span("step", 0, 100), Span("mm", 10, 40), Span("copy", 20, 30), Span("mm", 50, 60), Span("mm", 0, 5, lane=1),
    ]  # fmt: skip
    assert [(row["name"], round(row["seconds"] * 1e9), row["calls"]) for row in by_time(spans)] == [
        ("step", 60, 1), ("mm", 35, 3), ("copy", 10, 1),
    ]  # fmt: skip
    spans = [
        Span("kernel", 0, 50), Span("kernel", 40, 60, lane=1), Span("kernel", 100, 120), Span("Memcpy DtoD", 200, 210),
        Span("Memcpy HtoD (Pinned -> Device)", 30, 110, lane=2), Span("Memcpy DtoH (Device -> Pinned)", 90, 130, lane=3),
    ]  # fmt: skip
    whole, alone = copies_alone(spans)
    assert (round(whole * 1e9), round(alone * 1e9)) == (100, 50)  # 30 to 130, of which 60 to 100 and 120 to 130
    assert round(busy(spans) * 1e9) == 90


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--context", "1K"], 2, "--gpus is needed where there is no GPU"),
        (["--context", "1K", "--gpus", "8xH100", "--rank-of", "4"], 2, "but --gpus names 8"),
        (["--context", "1K", "--gpus", "8xH100", "--layers", "0"], 2, "--layers 0 must be at least 1"),
        (["--context", "1K", "--gpus", "8xH100", "--steps", "0"], 2, "--steps 0 must be at least 1"),
        (["--context", "1X", "--gpus", "8xH100"], 2, "is not a number of tokens"),
        (["--context", "1K", "--gpus", "1xH100", "--out", "{file}/x"], 2, "name another folder with --out"),
        (["--context", "1K", "--gpus", "1xH100", "--set", "attention=fa4"], 2, "no attention kernel"),
        (["--context", "256M", "--gpus", "8xH100"], 5, "take a shorter --context"),
    ],
)
def test_mistakes_fit_on_a_screen(arguments, code, words, tiny: Path, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [each.format(file=tmp_path / "file") for each in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert main(["profile", str(tiny), "--cpu", *out, *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err and not captured.out and len(captured.err.splitlines()) <= 5
