"""Data, environment, settings with their origins, and two runs beside each other: what the page is told of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ithaca.config import load
from ithaca.config.dump import origins
from ithaca.observe.report import read_inputs
from ithaca.observe.report.about import data, environment, settings
from ithaca.observe.report.charts import stack
from ithaca.observe.report.inputs import Inputs
from ithaca.observe.report.page import page_of, view
from ithaca.observe.report.versus import versus

from . import samples
from .browser import Browser
from .test_browser import assert_quiet, overflow, read_rows

HOSTILE: list[Any] = [
    None,
    1,
    "<script>",
    [],
    {},
    [[]],
    [{"name": "x" * 9000, "dropped": [1], "counts": {"full": "a"}}],
    {"a": {}},
]


def of(about: Any) -> Inputs:
    return Inputs(run=Path("x"), about=about)


def test_data_and_what_was_left_out_of_it():
    found = data(of(samples.about()))
    assert found is not None and found["counted"] and found["tokens"] == 980_000_000
    books, chats = found["sources"]
    assert (books["share"], books["full"], books["supervised"], chats["kind"]) == (
        0.75,
        0.9989,
        9e8,
        "preference (chosen only)",
    )
    assert books["notes"] == [
        "7 documents empty left out", "2 files left out: of no known format", "200 documents held out: not trained on",
        "310 documents are longer than a row (the longest 4,200,000 tokens): 990 pieces",
        "3 pieces without a supervised token left out",
    ]  # fmt: skip
    assert chats["notes"] == ["the assistant's turns are told by our chat template llama3"]
    older = replace(of({}), config={"data": {"sources": [{"path": "a.jsonl"}, {"synthetic": "recall"}]}})
    names = data(older)
    assert (
        names is not None
        and not names["counted"]
        and [each["name"] for each in names["sources"]] == ["a.jsonl", "recall"]
    )
    assert data(of({})) is None and environment(of({})) is None


def test_the_machine_and_its_software():
    found = environment(of(samples.about(nodes=2)))
    assert found is not None and found["command"] == "ithaca train run.yaml --train.steps 400"
    facts = {fact["label"]: fact["value"] for fact in found["facts"]}
    assert facts["ranks"] == "8 × NVIDIA H100 80GB HBM3 on 2 machines" and facts["memory"] == 2_000 * samples.GB
    assert {"name": "torch", "version": "2.11.0"} in found["versions"]


def test_whatever_the_file_says_a_page_comes_of_it():
    for value in HOSTILE:
        for about in (
            {"data": value},
            {"environment": value},
            {"data": {"sources": value}},
            {"environment": {"versions": value}},
        ):
            page_of(replace(of(about), other=of(about)))


def test_origins_are_read_back_from_what_was_written(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: tiny_cpu\ntrain: {rows: 8}\ndata: {sources: [{synthetic: recall, weight: 2}]}\n")
    loaded = load(file, ["train.steps=30"])
    wanted = {
        name: str(place) for name, place in loaded.origins.items() if "[" not in name and "stack.auto" not in name
    }
    assert {name: str(place) for name, place in origins(loaded.text).items() if name != "stack.auto"} == wanted
    assert wanted["train.steps"] == "--train.steps" and wanted["stack.tile"].startswith("recipe tiny_cpu:")


def test_every_setting_has_a_reason(tmp_path: Path):
    """The plan's, or what it means; and where it was said."""
    run = samples.write_run(tmp_path / "run", steps=8)
    loaded = load(None, ["train.steps=30"], "tiny_cpu")
    (run / "config.yaml").write_text(loaded.text)
    inputs = read_inputs([run])
    rows = {row["field"]: row for row in stack(inputs)}
    assert all(row["why"] for row in rows.values())
    assert rows["tile"]["why"].startswith("Larger tiles") and rows["tile"]["from"].startswith("recipe tiny_cpu:")
    assert rows["ring"]["why"].startswith("Ranks, times") and rows["engine"]["from"] == "default"
    given = {row["name"]: row for row in settings(inputs)}
    assert given["train.steps"] == {
        "name": "train.steps", "value": "30", "from": "--train.steps",
        "why": "Optimizer steps of the whole run; 0 = as many as train.epochs takes.",
    }  # fmt: skip
    assert "data.sources" not in given and "stack.tile" not in given and "train.clip" not in given


def two(tmp_path: Path) -> Inputs:
    first = samples.write_run(tmp_path / "first", steps=40)
    second = samples.write_run(tmp_path / "second", name="other", steps=24, parts=False)
    config = (
        (second / "config.yaml")
        .read_text()
        .replace("tile: 4096", "tile: 2048")
        .replace("rows: 1", "rows: 2\n  lr: 0.1")
    )
    (second / "config.yaml").write_text(config)
    (second / "about.json").write_text(json.dumps(samples.about(device="NVIDIA H200", versions={"torch": "2.12.0"})))
    return read_inputs([first, second])


def test_two_runs(tmp_path: Path):
    inputs = two(tmp_path)
    found = versus(inputs)
    assert found is not None and found["names"] == ["llama3_8b_1m", "other"] and inputs.other is not None
    figures = {row["label"]: row for row in found["figures"]}
    losses = [next(line["loss"] for line in each.steps if line["step"] == 24) for each in (inputs, inputs.other)]
    assert figures["Loss at step 24"]["values"] == losses, "at the last step that both have"
    assert figures["Steps done"]["values"] == [40, 24] and figures["Steps done"]["change"] == 24 / 40 - 1
    differ = {row["name"]: row["values"] for row in found["settings"]}
    assert differ == {"stack.tile": ["4096", "2048"], "train.rows": ["1", "2"], "train.lr": [None, "0.1"]}
    about = {row["name"]: row["values"] for row in found["environment"]}
    assert about["device"] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"] and about["torch"] == ["2.11.0", "2.12.0"]
    assert [chart["name"] for chart in found["curves"]] == [
        f"versus-{n}" for n in ("loss", "rate", "grad_norm", "memory")
    ]
    assert view(replace(inputs, other=None))["versus"] is None
    never = replace(inputs, other=Inputs(run=Path("never"), config=inputs.config))
    alone = versus(never)
    assert alone is not None and alone["curves"] == [] and not any("Loss" in row["label"] for row in alone["figures"])


def test_in_a_browser(browser: Browser, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(page_of(two(tmp_path)))
    with browser.open(page) as tab:
        assert_quiet(tab, page)
        rows = {row[0]: row[1:] for row in read_rows(tab, '[data-table="versus"]')}
        assert rows[""] == ["llama3_8b_1m", "other", "change"] and rows["Steps done"] == ["40", "24", "−40.0 %"]
        assert read_rows(tab, '[data-table="versus-settings"]')[1:] == [
            ["stack.tile", "4096", "2048"], ["train.rows", "1", "2"], ["train.lr", "–", "0.1"],
        ]  # fmt: skip
        assert tab.count('[data-chart="versus-loss"] path[data-line]') == 2
        sources = read_rows(tab, '[data-table="sources"]')
        assert sources[1] == ["data/books/*.jsonl", "text", "75.0 %", "12.0K", "900M", "100.0 %", "858", "99.9 %"]
        assert tab.text("#environment .command") == "ithaca train run.yaml --train.steps 400"
        links = tab.ask("[...document.querySelectorAll('#nav a')].map((link) => link.textContent)")
        assert links[0] == "Beside other" and links[-4:] == ["Settings", "Data", "Environment", "Record"]
    with browser.open(page, width=390, height=844) as tab:
        assert overflow(tab) == 0
