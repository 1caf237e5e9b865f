"""The page in a real browser: every chart is there, numbers are those of the files, nothing leaves it, pointer and keys work."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ithaca.observe.report import write_report

from . import samples
from .browser import Browser, Tab

CURVES = ("loss", "lr", "grad_norm", "rate", "memory", "copy_wait")
SWEEPS = tuple(f"sweep-{name}-{what}" for name in ("heads_per_stage", "tile") for what in ("peak", "rate"))
BARS = {"phases": 5, "at-peak": 2, "ladder": 8, "times": 5}


def assert_quiet(tab: Tab, page: Path) -> None:
    assert tab.troubles() == []
    assert {url for url in tab.requests() if not url.startswith("data:")} == {page.resolve().as_uri()}


def overflow(tab: Tab) -> int:
    return tab.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def read_rows(tab: Tab, selector: str) -> list[list[str]]:
    """The text of a table, row by row."""
    cells = "[...row.cells].map((cell) => cell.textContent)"
    rows = tab.ask(f"[...document.querySelectorAll({json.dumps(selector + ' tr')})].map((row) => {cells})")
    return [[cell.replace("\u00a0", " ") for cell in row] for row in rows]


def test_every_chart_is_drawn(browser: Browser, page: Path):
    with browser.open(page) as tab:
        for name in (*CURVES, *SWEEPS, "timeline", *BARS):
            assert tab.count(f'[data-chart="{name}"]') == 1, name
        assert tab.count("[data-chart]") == len((*CURVES, *SWEEPS, "timeline", *BARS))
        for name in CURVES:
            lines = 2 if name in ("loss", "memory") else 1
            assert tab.count(f'[data-chart="{name}"] path[data-line]') == lines, name
            d = tab.ask(f"document.querySelector('[data-chart=\"{name}\"] path[data-line]').getAttribute('d')")
            assert d.count("L") == 399 and "NaN" not in d, name
        assert tab.count('[data-chart="timeline"] path.area') == 13
        for name, rows in BARS.items():
            assert tab.count(f'[data-chart="{name}"] .bar') == rows, name
        phases = samples.plan()["phases"]
        assert tab.count('[data-chart="phases"] rect.segment') == sum(map(len, phases.values()))
        assert tab.count('[data-chart="ladder"] .mark') == 3 and tab.count('[data-chart="ladder"] .torn') == 5
        assert tab.count('[data-chart="phases"] line.limit') == 2 * 5  # the GPU's and the budget's, through every bar
        assert (
            tab.count(f'[data-chart="{SWEEPS[0]}"] circle.dot') == 4
            and tab.count(f'[data-chart="{SWEEPS[0]}"] .open') == 1
        )
        assert tab.count(".legend") == 1 and tab.count(".legend button") == 13
        assert "NaN" not in tab.ask("document.body.innerHTML.replace(/<script[^]*?<\\/script>/g, '')")
        assert_quiet(tab, page)


def test_every_chart_has_a_table(browser: Browser, page: Path):
    with browser.open(page) as tab:
        without = tab.ask(
            "[...document.querySelectorAll('[data-chart]')]"
            ".filter((chart) => !chart.closest('.card').querySelector('details table')).map((chart) => chart.dataset.chart)"
        )
        assert without == []
        rows = read_rows(tab, "#phases details")
        assert rows[0] == ["", "load", "forward", "loss", "backward", "step"] and rows[-1][4] == "47.7 GB"
        assert ["loss", "", "", "5.6 GB", "", ""] in rows
        loss = read_rows(tab, ".curve-card details")
        assert loss[0] == ["step", "loss", "evaluation"] and loss[1][0] == "1" and len(loss) >= 40
        tab.ask("document.querySelector('#phases summary').focus()")
        tab.press("Enter")
        assert tab.ask("document.activeElement === document.querySelector('#phases summary')")


def test_numbers_are_those_of_the_files(browser: Browser, page: Path, run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "event" not in line]
    plan, ladder, profile = (json.loads((run / f"{kind}.json").read_text()) for kind in ("plan", "ladder", "profile"))
    with browser.open(page) as tab:
        assert tab.text("h1") == "llama3_8b_1m" and tab.text(".state") == "finished"
        assert tab.text(".progress") == "step 400 of 400"
        facts = tab.text(".facts")
        for words in ("Llama 3 8B", "8.03B", "1M", "8 × H100-80GB", "1.0 TB"):
            assert words in facts
        peak, rate = max(line["gpu_peak"] for line in lines), median(line["tokens_per_second"] for line in lines[1:])
        assert tab.text('[data-figure="Peak GPU memory"] .value') == f"{peak / 1e9:.1f} GB"
        assert tab.text('[data-figure="Peak GPU memory"] .note') == f"{peak / samples.GPU:.1%} of 85.0 GB".replace(
            "%", " %"
        )
        assert tab.text('[data-figure="Tokens/s per GPU"] .value') == f"{rate:.0f}"
        assert tab.text('[data-figure="Final loss"] .value') == f"{lines[-1]['loss']:.4f}"
        assert tab.text('[data-figure="MFU"] .value') == f"{median(line['mfu'] for line in lines[1:]):.1%}".replace(
            "%", " %"
        )
        compared = {row[0]: row[1:4] for row in read_rows(tab, ".comparison")}
        assert compared["Peak GPU memory"] == [
            "45.7 GB",
            f"{peak / 1e9:.1f} GB",
            f"+{100 * (peak / plan['allocated'] - 1):.1f} %",
        ]
        assert compared["Host memory"] == ["69.0 GB", "68.7 GB", "−0.4 %"]
        drawn = tab.ask(
            "[...document.querySelectorAll('[data-chart=phases] rect.segment')].map((each) => Number(each.dataset.value))"
        )
        assert drawn == [size for phase in plan["phases"].values() for size in phase.values()]
        notes = tab.ask("[...document.querySelectorAll('[data-chart=ladder] .bar-note')].map((each) => each.innerText)")
        notes = [note.replace("\u00a0", " ") for note in notes if note]
        for note, rung in zip(notes, ladder["rungs"], strict=True):
            assert f"largest: {rung['largest']}" in note and ("✓" if rung["fits"] else "✕") in note
        assert "✓ 47.7 GB" in notes[-1] and "723 tok/s" in notes[-1] and "15.3 TB" in notes[0]
        kernels = read_rows(tab, '[data-table="kernels"]')
        assert kernels[1][1:] == ["101.2 s", "53.8 %", "32,768"] and kernels[1][0] == profile["kernels"][0]["name"]
        assert len(kernels) == 11 and tab.count("#kernels tbody tr") == 40 and "25 smaller ones" in tab.text("#kernels")
        stack = {row[0]: row[1:] for row in read_rows(tab, '[data-table="stack"]')}
        assert stack["heads_per_stage"] == ["1", samples.REASONS[1][2]]
        assert tab.text("#footer").startswith("ithaca ") and "2026-11-16 02:57:00 UTC" in tab.text("#footer")


def test_lengths_are_those_of_the_numbers(browser: Browser, page: Path):
    plan = samples.plan()
    with browser.open(page) as tab:
        boxes = "(each) => [each.getBoundingClientRect().left, each.getBoundingClientRect().right]"
        bars = tab.ask(
            "[...document.querySelectorAll('[data-chart=phases] .bar')].map((bar) => ({"
            f"parts: [...bar.querySelectorAll('rect.segment')].map({boxes}),"
            f" limit: [...bar.querySelectorAll('.limit.gpu')].map({boxes})[0][0], zero: bar.getBoundingClientRect().left}}))"
        )
        for bar, phase in zip(bars, plan["phases"].values(), strict=True):
            scale = samples.GPU / (bar["limit"] - bar["zero"])  # bytes of a pixel
            end = bar["zero"]
            for (left, right), size in zip(bar["parts"], phase.values(), strict=True):
                assert left == pytest.approx(end, abs=1.1), "one behind the other"  # a pixel is the gap between them
                assert (right - left) * scale == pytest.approx(size, abs=1.2 * scale)
                end = right
            assert (end - bar["zero"]) * scale == pytest.approx(sum(phase.values()), abs=2 * scale)


def test_heights_are_those_of_the_numbers(browser: Browser, page: Path, run: Path):
    """The highest point of the timeline, and the first of the loss, read off the ticks of their axes."""

    def read_off(name: str, y: float) -> float:
        ticks = tab.ask(
            f"[...document.querySelectorAll('[data-chart=\"{name}\"] .rule')].map((rule) => [Number(rule.getAttribute('y1')), "
            "rule.parentNode.textContent])"
        )
        (low, low_text), (high, high_text) = ticks[0], ticks[-1]
        values = [float(each.split("\u00a0")[0]) for each in (low_text, high_text)]
        return values[0] + (y + 10 - low) / (high - low) * (values[1] - values[0])  # the plot begins 10 pixels down

    def path(selector: str) -> list[list[float]]:
        d = tab.ask(f"document.querySelector({json.dumps(selector)}).getAttribute('d')")
        return [[float(each) for each in point.split(",")] for point in d.strip("MZ").split("L")]

    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    with browser.open(page) as tab:
        top = min(y for _, y in path('[data-chart="timeline"] path.area[data-category="context"]'))
        assert read_off("timeline", top) == pytest.approx(samples.profile()["peak"] / 1e9, abs=0.2)
        assert read_off("loss", path('[data-chart="loss"] path[data-line="loss"]')[0][1]) == pytest.approx(
            first["loss"], abs=0.02
        )


@pytest.mark.parametrize(("width", "dark"), [(320, False), (390, False), (390, True), (768, False), (1280, True)])
def test_it_fits_the_screen(browser: Browser, page: Path, width: int, dark: bool):
    with browser.open(page, width=width, dark=dark) as tab:
        assert tab.ask("innerWidth") == width and overflow(tab) <= 0
        tab.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.settle()
        assert overflow(tab) <= 0
        outside = tab.ask(
            "[...document.querySelectorAll('.card, .figure, h1, h2, .plot > svg, .bar, .bar-note')].filter((each) => "
            "each.getBoundingClientRect().right > innerWidth + 1 || each.getBoundingClientRect().left < -1).length"
        )
        assert outside == 0
        background = tab.ask("getComputedStyle(document.documentElement).backgroundColor")
        assert background == ("rgb(16, 18, 21)" if dark else "rgb(245, 245, 242)")
        assert_quiet(tab, page)


def test_pointing_reads_all_curves_at_once(browser: Browser, page: Path, run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "event" not in line}
    with browser.open(page) as tab:
        assert tab.ask("document.getElementById('tip').hidden")
        box = tab.box('[data-chart="loss"]')
        tab.mouse("Moved", box["left"] + 200, box["top"] + 80)
        tip = tab.text("#tip")
        step = int(tip.split("loss")[0].removeprefix("step "))
        assert 100 < step < 300 and f"{steps[step]['loss']:.4f}" in tip
        readouts = tab.ask(
            "[...document.querySelectorAll('.readout')].map((each) => each.textContent.replace('\\u00a0', ' '))"
        )
        assert readouts[0] == f"{steps[step]['loss']:.4f}" and readouts[4] == f"{steps[step]['gpu_peak'] / 1e9:.1f} GB"
        assert tab.count(".cursor") == len(CURVES)
        tab.mouse("Moved", 5, 5)
        assert tab.count(".cursor") == 0 and tab.ask("document.getElementById('tip').hidden")


def test_dragging_zooms_all_curves_and_a_double_click_resets(browser: Browser, page: Path):
    def points(name: str) -> int:
        return tab.ask(
            f"document.querySelector('[data-chart=\"{name}\"] path[data-line]').getAttribute('d').split('L').length"
        )

    with browser.open(page) as tab:
        box = tab.box('[data-chart="loss"]')
        y, whole = box["top"] + 80, points("lr")
        tab.drag(box["left"] + 150, y, box["left"] + 250)
        assert 50 < points("loss") < whole / 2 and points("lr") == points("loss")
        assert not tab.ask("document.querySelector('#training .reset').hidden")
        tab.double_click(box["left"] + 200, y)
        assert points("lr") == points("loss") == whole
        assert tab.ask("document.querySelector('#training .reset').hidden")
        tab.mouse("Pressed", box["left"] + 200, y, button="left", clickCount=1)  # a click alone zooms nothing
        tab.mouse("Released", box["left"] + 200, y, button="left", clickCount=1)
        assert points("loss") == whole


def test_a_finger_reads_and_zooms(browser: Browser, page: Path):
    with browser.open(page, width=390, height=844) as tab:
        box = tab.box('[data-chart="loss"]')
        tab.swipe(box["left"] + 200, box["top"] + 80, box["left"] + 200)
        assert tab.text("#tip").startswith("step ") and not tab.ask("document.getElementById('tip').hidden")
        tab.swipe(box["left"] + 200, box["top"] - 30, box["left"] + 200)  # elsewhere
        assert tab.ask("document.getElementById('tip').hidden") and tab.count(".cursor") == 0
        tab.swipe(box["left"] + 120, box["top"] + 80, box["left"] + 240)
        assert not tab.ask("document.querySelector('#training .reset').hidden")
        segment = tab.box('[data-chart="phases"] .bar rect')
        tab.swipe(segment["left"] + 4, segment["top"] + 10, segment["left"] + 4)
        assert tab.text("#tip").startswith("loadparameters4.0 GB")


def test_the_timeline_reads_and_zooms(browser: Browser, page: Path, run: Path):
    profile = json.loads((run / "profile.json").read_text())
    with browser.open(page) as tab:
        box = tab.box('[data-chart="timeline"]')
        middle = box["top"] + 120
        tab.mouse("Moved", box["left"] + 56, middle)
        tip = tab.text("#tip")
        first = {name: values[0] for name, values in profile["timeline"]["categories"].items()}
        assert f"{sum(first.values()) / 1e9:.1f} GB" in tip and f"optimizer{first['optimizer'] / 1e9:.1f} GB" in tip
        labels = "[...document.querySelectorAll('[data-chart=timeline] .mark-label')].map((each) => each.textContent)"
        assert tab.ask(labels) == ["forward", "backward"], "the loss is too short for its name"
        tab.drag(box["left"] + 400, middle, box["left"] + 420)
        ticks = tab.ask("[...document.querySelectorAll('[data-chart=timeline] .tick')].map((each) => each.textContent)")
        assert not any(tick.startswith(("20\u00a0s", "180")) for tick in ticks)
        tab.ask("document.querySelector('#timeline .reset').click()")
        tab.settle()
        ticks = tab.ask("[...document.querySelectorAll('[data-chart=timeline] .tick')].map((each) => each.textContent)")
        assert "20\u00a0s" in ticks and "180\u00a0s" in ticks
        assert_quiet(tab, page)


def test_keys_do_what_the_pointer_does(browser: Browser, page: Path):
    with browser.open(page) as tab:
        tab.ask("document.querySelector('[data-chart=\"loss\"]').focus()")
        tab.press("End")
        assert tab.text("#tip").startswith("step 400")
        tab.press("ArrowLeft")
        assert tab.text("#tip").startswith("step 399")
        tab.press("+")
        assert not tab.ask("document.querySelector('#training .reset').hidden")
        tab.press("Escape")
        assert tab.ask("document.querySelector('#training .reset').hidden")
        tab.ask("document.activeElement.blur()")
        assert tab.ask("document.getElementById('tip').hidden")


def test_a_category_can_be_singled_out(browser: Browser, page: Path):
    with browser.open(page) as tab:
        tab.ask("document.querySelector('.legend [data-category=\"attention\"]').click()")
        assert (
            tab.count('rect[data-category="attention"].faded') == 0
            and tab.count('rect[data-category="kept"]:not(.faded)') == 0
        )
        assert tab.count('path[data-category="optimizer"].faded') == 1
        tab.ask("document.querySelector('.legend [data-category=\"attention\"]').click()")
        assert tab.count(".faded") == 0


def test_bars_can_be_shown_whole(browser: Browser, page: Path):
    with browser.open(page) as tab:
        tab.ask("document.querySelector('#rungs .reset').click()")
        assert tab.count('[data-chart="ladder"] .torn') == 0 and tab.count('[data-chart="ladder"] .bar') == 8
        assert tab.text("#rungs .reset") == "Show the part around the limit"


def test_the_theme_can_be_chosen(browser: Browser, page: Path):
    with browser.open(page, dark=True) as tab:
        for theme, colour in (
            ("light", "rgb(245, 245, 242)"),
            ("dark", "rgb(16, 18, 21)"),
            ("auto", "rgb(16, 18, 21)"),
        ):
            tab.ask("document.getElementById('theme').click()")
            assert tab.text("#theme") == f"Theme: {theme}"
            assert tab.ask("getComputedStyle(document.documentElement).backgroundColor") == colour


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_names_are_text_and_nothing_else(browser: Browser, tmp_path: Path):
    """Wherever a text can come from: it is shown, and does not run."""
    run = samples.write_run(
        tmp_path / "run", name=EVIL, steps=10, parts=False, state="failed", cause=EVIL, resume=EVIL, time=EVIL
    )
    plan, ladder, profile = samples.plan(), samples.ladder(), samples.profile(50)
    plan["model"] = {"name": EVIL, "family": EVIL}
    plan["phases"] = {EVIL: {EVIL: 5, "kept": 3}}
    plan["reasons"] = [{"field": EVIL, "value": EVIL, "why": EVIL}]
    plan["time"]["parts"] = {EVIL: 3.0}
    ladder["rungs"][0] = {"name": EVIL, "adds": EVIL, "holders": {EVIL: 7}, "largest": EVIL, "peak": 7}
    ladder["sweeps"][EVIL] = [{"value": EVIL, "peak": 5, "tokens_per_second": 5}, {"value": 2, "peak": 6}]
    profile["kernels"][0]["name"] = profile["modules"][0]["name"] = profile["lines"][0]["where"] = EVIL
    profile["timeline"]["categories"][EVIL] = [5] * 50
    profile["timeline"]["phases"][0]["name"] = profile["missing"][0] = EVIL
    ladder["rungs"][1]["measured"] = {"peak": None, "problem": EVIL}
    page = write_report(tmp_path / "page.html", run=run, plan=plan, ladder=ladder, profile=profile)
    with browser.open(page) as tab:
        assert tab.text("h1") == EVIL and tab.ask("document.title") == f"{EVIL} · ithaca"
        assert tab.count("script") == 2 and tab.count("img") == 0
        assert EVIL in tab.text(".callout") and EVIL in tab.text(".legend") and EVIL in tab.text("#stack")
        assert_quiet(tab, page)


def test_the_policy_stops_what_should_not_be_there(browser: Browser, page: Path, tmp_path: Path):
    """The test of the test: a page that was tampered with does nothing but complain."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        page.read_text().replace(
            "</body>", '<script>document.title = "owned"</script><img src="http://example.com/x"></body>'
        )
    )
    with browser.open(bad) as tab:
        assert tab.ask("document.title") == "llama3_8b_1m · ithaca"
        assert sum("Content Security Policy" in each for each in tab.troubles()) == 2


PARTIAL: dict[str, dict[str, Any]] = {
    "plan": {"plan": samples.plan()},
    "ladder": {"ladder": samples.ladder()},
    "profile": {"profile": samples.profile(400)},
    "plan alone": {"plan": {"plan": 1, "peak": 7}},
    "ladder alone": {
        "ladder": {"ladder": 1, "rungs": [{"name": "one", "peak": 7}], "sweeps": {"tile": [{"value": None, "peak": 9}]}}
    },
    "profile alone": {
        "profile": {"profile": 1, "steps": [{"seconds": 3}], "kernels": [{"seconds": 1e-5}], "copies": {"seconds": 0}}
    },
    "does not fit": {
        "plan": {**samples.plan(), "fits": False, "spare": -5 * samples.GB, "hardware": {"gpu_memory": 2 * samples.GB}}
    },
    "nothing": {"plan": {"plan": 1}},
}


@pytest.mark.parametrize("case", PARTIAL)
def test_parts_by_themselves(browser: Browser, tmp_path: Path, case: str):
    page = write_report(tmp_path / "page.html", **PARTIAL[case])
    with browser.open(page, width=390) as tab:
        assert overflow(tab) <= 0 and "NaN" not in tab.ask("document.body.innerText")
        if case == "profile":  # what was planned and measured of each phase that it ran, and where each begins
            assert tab.count('[data-chart="phases"] .mark') == 2 and "another thing" in tab.text("#watched")
            assert tab.count('[data-chart="timeline"] .event') == 3 and "85.0 GB" in tab.text(".figures")
        assert_quiet(tab, page)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_short_runs(browser: Browser, tmp_path: Path, steps: int):
    run = samples.write_run(tmp_path / "run", steps=steps, wanted=400, parts=False, state="stopped", cause="SIGTERM")
    page = write_report(tmp_path / "page.html", run=run)
    with browser.open(page, width=390) as tab:
        assert tab.count("[data-chart]") == len(CURVES) and "SIGTERM" in tab.text(".callout")
        box = tab.box('[data-chart="loss"]')
        tab.mouse("Moved", box["left"] + 100, box["top"] + 50)
        assert tab.text("#tip").startswith("step ")
        assert (
            "NaN" not in tab.ask("document.body.innerHTML.replace(/<script[^]*?<\\/script>/g, '')")
            and overflow(tab) <= 0
        )
        assert_quiet(tab, page)
