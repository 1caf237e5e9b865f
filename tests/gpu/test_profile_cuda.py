"""A profile on a GPU: every byte that torch counts has a category, and torch's own files are there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ithaca.cli.main import main

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama32_1b", ["--gpus", "1xH200", "--context", "32K", "--layers", "4"]),
        (
            "llama3_8b",
            ["--rank-of", "8", "--context", "256K", "--layers", "2", "--set", "store=host,heads_per_stage=1"],
        ),
        (
            "llama32_1b",
            ["--gpus", "1xH200", "--context", "64K", "--layers", "2", "--kernel", "cudnn", "--set", "tile=8192"],
        ),
    ],
    ids=["one GPU", "rank of 8", "cuDNN"],
)
def test_the_peak_is_attributed(model: str, more: list[str], tmp_path: Path):
    assert (
        main(["profile", model, *more, "--steps", "1", "--out", str(tmp_path), "--html", str(tmp_path / "page.html")])
        == 0
    )
    found = json.loads((tmp_path / "profile.json").read_text())
    assert sum(found["categories"].values()) == found["peak"] > 1e9
    assert found["peak"] == pytest.approx(found["allocated"]["counted"], rel=0.03)
    assert found["peak"] == pytest.approx(found["allocated"]["steps"], rel=0.03)
    totals = [sum(column) for column in zip(*found["timeline"]["categories"].values(), strict=True)]
    assert max(totals) == found["peak"]
    assert found["categories"].get("other", 0) < 0.02 * found["peak"], "every line of ours has a category"
    assert found["planned"]["peak"] == pytest.approx(found["peak"], rel=0.1)
    assert found["missing"] == [] and found["kernels"] and found["busy"] > 0
    if "store=host" in more[-1]:
        copies = found["copies"]
        assert 0 <= copies["exposed"] <= copies["seconds"] and copies["traced"]["alone"] <= copies["traced"]["seconds"]
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert (tmp_path / "memory.pickle").stat().st_size > 10_000
    assert "Over time, as measured" in (tmp_path / "page.html").read_text()
