"""Evaluations on the page: numbers of the files, drawn as heat maps, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ithaca.evaluation.heatmap import colour, ink, pixels, svg
from ithaca.observe.report import render, write_report

from .browser import Browser
from .samples import write_run
from .test_browser import assert_quiet, overflow, read_rows
from .test_view import data_of


def record(step: int, share: float) -> dict[str, Any]:
    cells = [[1.0, 1.0, 1.0], [share, (1 + share) / 2, 1.0]]
    ranges = [(0, 512), (512, 1024), (1024, 2048)]
    return {
        "eval": 1, "step": step,
        "needle": {"lengths": [1024, 2048], "depths": [0.0, 0.5, 1.0], "accuracy": cells, "samples": 8, "mean": 0.5},
        "held_out": {"loss": 2.0, "positions": [{"from": a, "to": b, "loss": 3.0 - b / 1024, "tokens": 9} for a, b in ranges]},
        "tasks": [{"task": "multi_key", "length": 2048, "accuracy": 0.75, "exact": 0.5, "log_probability": -0.5}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("evaluated") / "run")
    (run / "eval").mkdir()
    for step, share in ((100, 0.0), (200, 0.3), (400, 0.9)):
        (run / "eval" / f"step-{step}.json").write_text(json.dumps(record(step, share)))
    return run


def test_the_first_and_the_newest_are_shown(evaluated: Path):
    found = data_of(render(run=evaluated))["evaluation"]
    assert [each["step"] for each in found["maps"]] == [100, 400] and found["count"] == 3
    assert found["maps"][0]["cells"][1] == [0.0, 0.5, 1.0] and found["maps"][1]["cells"][1][0] == 0.9
    assert [each["step"] for each in found["positions"]] == [100, 400] and found["tasks"][0]["accuracy"] == 0.75


def test_odd_records_leave_gaps_and_broken_ones_are_one_sentence(evaluated: Path, tmp_path: Path):
    odd = {
        "eval": 1,
        "step": "x",
        "needle": {"lengths": [1, 2], "depths": [0], "accuracy": [[None]]},
        "tasks": [{"task": 3}],
    }
    run = write_run(tmp_path / "run")
    (run / "eval").mkdir()
    (run / "eval" / "step-1.json").write_text(json.dumps(odd))
    found = data_of(render(run=run))["evaluation"]
    assert found["maps"] == [] and found["positions"] == [] and found["tasks"][0]["accuracy"] is None
    (run / "eval" / "step-2.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-2.json cannot be read"):
        render(run=run)


def test_the_heat_map_in_a_browser(browser: Browser, evaluated: Path, tmp_path: Path):
    page = write_report(tmp_path / "index.html", run=evaluated)
    for width, dark in ((1280, False), (390, True)):
        with browser.open(page, width=width, dark=dark) as tab:
            assert tab.count("#evaluation .heat") == 2 and tab.count("#evaluation .heat-cell") == 12
            rows = read_rows(tab, '[data-chart="needles-400"]')
            assert rows == [["", "0 %", "50 %", "100 %"], ["1K", "100", "100", "100"], ["2K", "90", "95", "100"]]
            shown = tab.ask(
                "getComputedStyle(document.querySelector('[data-chart=\"needles-100\"] tbody tr:last-child td')).backgroundColor"
            )
            assert shown == "rgb({}, {}, {})".format(*colour(0.0))
            assert tab.count('[data-chart="loss-by-position"] path[data-line]') == 2 and overflow(tab) == 0
            assert_quiet(tab, page)


def test_the_picture_for_files_and_trackers():
    needle = record(1, 0.25)["needle"]
    drawn = svg(needle, "a < b & c")
    assert drawn.count("<rect") == 7 and "a &lt; b &amp; c" in drawn and ">25%<" in drawn and ">2K<" in drawn
    assert pixels(needle, 4).shape == (8, 12, 3) and tuple(pixels(needle)[-1, 0]) == colour(0.25)
    assert colour(0) != colour(0.5) != colour(1.0) and ink(0.5) == "#222222" and ink(1.0) == "#ffffff"
