"""`ithaca report`: where the page goes, and one sentence for what cannot be read."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.main import main
from ithaca.observe.report import render, write_report

from . import samples


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_gets_its_page(here: Path, capsys: pytest.CaptureFixture[str]):
    run = samples.write_run(here / "runs" / "first", steps=8)
    code, out, err = cli(capsys, "runs/first")
    assert (code, err) == (0, "") and out.startswith("wrote runs/first/report/index.html (")
    assert (run / "report" / "index.html").read_text() == render(run=run)
    assert cli(capsys, "runs/first")[0] == 0, "again is fine"


def test_json_files_get_a_page_here(here: Path, capsys: pytest.CaptureFixture[str]):
    for kind in ("plan", "ladder", "profile"):
        Path(f"my-{kind}").write_text(json.dumps(getattr(samples, kind)()))
    assert cli(capsys, "my-plan", "my-profile", "my-ladder")[0] == 0
    page = Path("report.html").read_text()
    assert page == render(plan=samples.plan(), ladder=samples.ladder(), profile=samples.profile())


def test_a_file_beside_a_run_wins_and_folders_are_made(here: Path, capsys: pytest.CaptureFixture[str]):
    run = samples.write_run(here / "run", steps=8)
    plan = {**samples.plan(), "allocated": 12345678}
    Path("plan.json").write_text(json.dumps(plan))
    code, out, _ = cli(capsys, "run", "plan.json", "--out", "a/b/c.html")
    assert code == 0 and "a/b/c.html" in out and "12345678" in Path("a/b/c.html").read_text()
    assert not (run / "report").exists()


def test_two_runs_get_a_page_of_their_own(here: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("first", "second"):
        samples.write_run(here / "runs" / name, steps=8, parts=False)
    assert cli(capsys, "runs/first")[0] == 0
    alone = Path("runs/first/report/index.html").read_text()
    code, out, _ = cli(capsys, "runs/first", "runs/second")
    assert code == 0 and out.startswith("wrote runs/first/report/with-second.html (")
    assert Path("runs/first/report/index.html").read_text() == alone


def test_open(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    Path("plan.json").write_text('{"plan": 1}')
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or len(opened) == 1)
    assert cli(capsys, "plan.json", "--open")[1].count("\n") == 1 and opened == [(here / "report.html").as_uri()]
    assert "no browser was found here" in cli(capsys, "plan.json", "--open")[1]


BAD = {
    "nothing there": ({}, ["gone"], "gone is not there"),
    "no run folder": ({"notes.txt": "x"}, ["."], "is no run folder: it has no config.yaml, metrics.jsonl or status.json"),
    "no json": ({"a.json": '{"plan": 1,\n oops'}, ["a.json"], "a.json cannot be read: Expecting"),
    "binary": ({"a.json": b"\x89PNG\xff"}, ["a.json"], "a.json cannot be read: 'utf-8' codec"),
    "deep": ({"a.json": "[" * 100_000}, ["a.json"], "a.json is nested too deeply"),
    "huge": ({"a.json": '{"plan": 1' + "0" * 5000 + "}"}, ["a.json"], "a.json cannot be read: Exceeds the limit"),
    "a list": ({"a.json": "[1]"}, ["a.json"], 'a.json is no plan, ladder or profile: its first key has to be "plan" or'),
    "other keys": ({"a.json": '{"name": 1, "plan": 1}'}, ["a.json"], "its first key has to be"),
    "version": ({"a.json": '{"plan": 2}'}, ["a.json"], "a.json is a plan of version 2, this ithaca knows 1"),
    "true": ({"a.json": '{"plan": true}'}, ["a.json"], "of version true"),
    "two plans": ({"a.json": '{"plan": 1}', "b.json": '{"plan": 1}'}, ["a.json", "b.json"], "two of the kind plan; give one"),
    "three runs": ({f"{n}/config.yaml": "" for n in "abc"}, ["a", "b", "c"], "a, b, c are 3 run folders; give one, or two to"),
    "no second run": ({"a/config.yaml": "", "b/x": ""}, ["a", "b"], "b is no run folder"),
    "about": ({"r/config.yaml": "", "r/about.json": "{"}, ["r"], "r/about.json cannot be read"),
    "plan in a run": ({"r/config.yaml": "", "r/plan.json": '{"ladder": 1}'}, ["r"], "r/plan.json is no plan: its first key"),
    "status": ({"r/status.json": "{"}, ["r"], "r/status.json cannot be read"),
    "contract": ({"r/status.json": '{"contract": 9}'}, ["r"], "contract version 9"),
    "config": ({"r/config.yaml": "a: [1"}, ["r"], "r/config.yaml:1:6: not valid YAML"),
    "config bytes": ({"r/config.yaml": b"\xff\xfe\x00"}, ["r"], "r/config.yaml cannot be read"),
    "out is a folder": ({"a.json": '{"plan": 1}', "d/x": ""}, ["a.json", "--out", "d"], "d is a folder; name a file"),
    "out in a file": ({"a.json": '{"plan": 1}'}, ["a.json", "--out", "a.json/x.html"], "a.json/x.html cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_sentence_for_what_cannot_be_done(case: str, here: Path, capsys: pytest.CaptureFixture[str]):
    files, arguments, words = BAD[case]
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = cli(capsys, *arguments)
    assert code == 2 and out == "" and words in err, err
    assert err.startswith("ithaca report: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not Path("report.html").exists()


def test_the_python_api_refuses_the_same(tmp_path: Path):
    with pytest.raises(ValueError, match="nothing to report on"):
        render()
    with pytest.raises(ValueError, match='the plan is no plan: its first key has to be "plan"'):
        write_report(tmp_path / "x.html", plan=samples.ladder())
    with pytest.raises(ValueError, match="is no folder"):
        render(run=tmp_path / "gone")
    assert not list(tmp_path.iterdir())
