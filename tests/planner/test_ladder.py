"""The ladder: each rung takes something away, as table, JSON and drawing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ithaca.base.units import format_bytes
from ithaca.cli.main import main
from ithaca.planner.chart import ladder_svg
from ithaca.planner.ladder import ladder

DOCS = Path(__file__).parents[2] / "docs"


def test_each_rung_takes_something_away():
    found = ladder("llama3_8b", gpus="8xH100-80GB", context="3M")
    peaks = [rung.plan.peak for rung in found.rungs]
    assert [rung.name for rung in found.rungs][:3] == ["plain", "+FSDP", "+Ulysses"] and found.rungs[
        -1
    ].name == "+streamed layer"
    assert peaks == sorted(peaks, reverse=True)
    assert [rung.plan.fits for rung in found.rungs] == [False] * 5 + [True] * 3
    largest = [rung.largest for rung in found.rungs[3:6]]
    assert largest == ["kept", "tile", "attention"], "what is behind checkpointing, offload and tiling"
    for points in found.sweeps.values():
        sizes = [each.plan.peak for each in points]
        assert len(points) > 2 and sizes == sorted(sizes)


def test_the_published_peaks():
    """Llama3-8B, 8 GPUs, 3M tokens, offload and tiling (arXiv 2602.21196): 64.6 GiB, with Untied Ulysses 51.1 GiB."""
    rungs = {rung.name: rung.plan for rung in ladder("llama3_8b", gpus="8xH100-80GB", context="3M").rungs}
    assert rungs["+tiling"].memory.peak / 2**30 == pytest.approx(64.6, rel=0.1)
    assert rungs["+Untied Ulysses"].memory.peak / 2**30 == pytest.approx(51.1, rel=0.1)


@pytest.mark.parametrize(
    ("pinned", "left_out"),
    [
        ({"tile": None}, {"+tiling"}),
        ({"ulysses": 4, "ring": 2}, {"+Ulysses"}),
        ({"recompute": "none"}, {"+checkpointing", "+offload", "+streamed layer"}),
        ({"store": "disk"}, {"plain", "+FSDP", "+Ulysses", "+offload"}),
        ({"engine": "composed", "recompute": "layer"}, {"+checkpointing", "+streamed layer"}),
        ({"heads_per_stage": 2, "attention": "flash"}, {"+Untied Ulysses"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_field_that_is_given_is_so_on_every_rung(pinned: dict, left_out: set[str]):
    options = {"gpus": "8xH100-80GB", "context": "1M", "layers": 2}
    every, found = ladder("llama3_8b", **options), ladder("llama3_8b", **options, **pinned)
    assert {rung.name for rung in every.rungs} - {rung.name for rung in found.rungs} == left_out
    for rung in found.rungs:
        assert {name: getattr(rung.plan.stack, name) for name in pinned} == pinned
        assert not rung.plan.stack.violations(8)
    assert not found.sweeps.keys() & pinned.keys()


def picture() -> str:
    """Of the first page: the ladder without its sweeps."""
    return ladder_svg({**ladder("llama3_8b", gpus="8xH100-80GB", context="3M").json(), "sweeps": {}})


def test_the_pages_show_the_ladder_of_today(capsys: pytest.CaptureFixture[str]):
    """Else: python -m tests.planner.test_ladder > docs/images/ladder.svg, and the same in README.md and docs/guides/plan.md."""
    assert (DOCS / "images/ladder.svg").read_text() == picture()
    assert main(["ladder", "llama3_8b", "--gpus", "8xH100-80GB", "--context", "3M"]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^  (?:plain|\+).*$", (DOCS / "guides/plan.md").read_text(), re.MULTILINE)
    assert len(shown) == 8 and all(
        line.startswith(was.removesuffix(" ...")) for line, was in zip(printed[1:9], shown, strict=True)
    )
    first, last = (re.findall(r"[\d.]+ [TG]B", line)[0] for line in (printed[1], printed[8]))
    assert f"plain {first}, with all of them {last}]" in (DOCS.parent / "README.md").read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drawn, page, photo = tmp_path / "ladder.svg", tmp_path / "ladder.html", tmp_path / "ladder.png"
    arguments = ["ladder", "llama32_1b", "--gpus", "1xH200", "--context", "256K", "--json", "--svg", str(drawn)]
    assert main([*arguments, "--html", str(page), "--png", str(photo)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ladder"] == 1 and "+FSDP" not in [rung["name"] for rung in shown["rungs"]]
    picture = ET.parse(drawn)
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    for rung in shown["rungs"]:
        assert rung["name"] in texts and sum(rung["holders"].values()) == rung["peak"]
    for name, points in shown["sweeps"].items():
        assert f"other values of {name} at the top" in texts and len(points) > 2
        assert all(any(text.startswith(format_bytes(each["peak"])) for text in texts if text) for each in points)
    assert photo.read_bytes().startswith(b"\x89PNG") and photo.stat().st_size > 20_000
    assert "+streamed layer" in page.read_text()
    assert main(["ladder", "llama32_1b", "--gpus", "1xH200", "--context", "256K"]) == 0
    told = capsys.readouterr().out
    assert "largest:" in told and "heads_per_stage at the top" in told and "tile at the top" in told


def test_a_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["ladder", "llama32_1b", "--gpus", "1xH200", "--context", "8K", "--png", str(tmp_path / "x.png")]) == 2
    assert "pip install 'ithaca[plots]'" in capsys.readouterr().err


if __name__ == "__main__":
    print(picture(), end="")
