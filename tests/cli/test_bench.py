"""`ithaca bench` on the CPU: real ranks, a report that can be sent, and mistakes in words."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from ithaca.cli.bench import Report, _markdown, stacks
from ithaca.cli.main import main


def test_a_report_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["tiny_llama", "--cpu", "2", "--contexts", "128,256", "--out", str(tmp_path / "bench")]
    assert main(["bench", *words]) == 0
    shown = capsys.readouterr().out
    page, whole = (tmp_path / "bench/report.md").read_text(), json.loads((tmp_path / "bench/report.json").read_text())
    assert page.startswith("# ithaca bench: 2 × CPU, tiny_llama\n") and page == shown
    assert len(whole["verify"]) == 3 and all(case["ok"] for case in whole["verify"])
    assert whole["links"]["per_node"] == 2 and whole["links"]["all_to_all"] > 0
    assert [row["context"] for row in whole["steps"]] == [128, 256]
    for row in whole["steps"]:
        assert row["layers"] == row["depth"] == 2 and row["seconds"] > 0 and row["kernel"] == "cpu"
        assert row["tokens_per_second"] == pytest.approx(row["at_least"]) and row["peaks"] == [None, None]
    assert page.count("| ok | llama3, float32: ") == 3
    assert socket.gethostname() not in page + json.dumps(whole) or socket.gethostname() == "localhost"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", ","], "--contexts names none"),
        (["--contexts", "64X"], "64X"),
        (["--minutes", "0"], "--minutes 0 must be from 0.1 to 10,000"),
        (["--minutes", "nan"], "--minutes nan must be"),
        (["--cpu", "2", "--ranks", "3"], "--cpu N says how many ranks there are"),
        (["--cpu", "0"], "0 ranks cannot be"),
        pytest.param(
            ["--ranks", "3"],
            "--ranks 3, but torch sees 0 GPUs; lower it, or rehearse with --share-gpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU"),
        ),
        (["no_such_model", "--cpu", "2"], "no_such_model"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["bench", *words, "--out", str(tmp_path / "x")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_it_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    job = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    assert main(["bench", "tiny_llama", "--cpu", "2"]) == 2
    assert "a launcher started 2 processes, but this starts its own ranks" in capsys.readouterr().err


def test_every_way_to_share_a_sequence():
    assert [(s.ulysses, s.ring, s.replicate) for s in stacks(1)] == [(1, 1, 1)] * 2
    assert [(s.ulysses, s.ring, s.replicate) for s in stacks(3)] == [(3, 1, 1), (3, 1, 1), (1, 3, 1)]
    assert [(s.ulysses, s.ring, s.replicate) for s in stacks(8)] == [
        (8, 1, 1), (8, 1, 1), (1, 8, 1), (4, 2, 1), (4, 1, 2)
    ]  # fmt: skip


ROW = {
    "context": 2**16, "stack": "S", "depth": 32, "layers": 4, "kernel": "fa4", "seconds": 2.0, "planned_seconds": 1.9,
    "tokens_per_second": 4096.0, "at_least": 512.0, "peaks": [9 * 10**9, 10**10], "planned_peak": 10_200_000_000, "around": 5,
    "pinned": 0,
}  # fmt: skip
ABOUT = {"ithaca": "0.1.0", "date": "2026-11-17", "model": "llama3_8b", "ranks": 8, "device": "H100", "shared": False}


def test_what_a_gpu_took_beside_the_plan():
    steps = [ROW, {"context": 2**20, "stack": "S", "depth": 32, "left out": "the plan says that it does not fit"}]
    lines = _markdown(Report(ABOUT, steps=steps)).splitlines()
    assert "| 64K | 4 of 32 | 10.0 GB | 10.2 GB | +2.0% | 2.00 s | 1.90 s | -5.0% | 512 | S |" in lines
    assert "| 1M | - of 32 | the plan says that it does not fit | | | | | | | S |" in lines


def test_ranks_that_share_a_gpu_claim_no_time():
    page = _markdown(Report({**ABOUT, "shared": True}, steps=[ROW]))
    assert "8 ranks that share a GPU, H100" in page and "times mean nothing" in page
    assert "| +2.0% | 2.00 s | - | - | - | S |" in page


def test_a_case_that_missed_or_failed_is_not_good():
    good = {"case": "llama3: ulysses=2", "ok": True, "worst": "loss", "of": 1e-7, "limit": 1e-5}
    assert Report(ABOUT, verify=[good]).good and not Report(ABOUT, verify=[good, {**good, "ok": False}]).good
    page = _markdown(Report(ABOUT, verify=[{"case": "llama3: ring=2", "ok": False, "error": "rank 1 died"}]))
    assert "| FAILED | llama3: ring=2 | rank 1 died | |" in page
