"""The page of plans in a real browser: what is typed is answered, keys reach everything, nothing leaves the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from ithaca.base.units import format_bytes
from ithaca.cli.main import main
from ithaca.observe.plans import answers
from ithaca.observe.plans.asking import read
from ithaca.observe.plans.server import Server
from ithaca.planner.search import plan

from ..report.browser import Browser, Tab

FIRST = {"model": "llama32_1b", "gpus": "2xH100-80GB", "context": "256K", "tokens": "1B", "price": "2"}
FIXED = {
    **FIRST,
    "stack": "ulysses=2, recompute=layer, tile=4K, heads_per_stage=4",
}  # so that all of the page is there at once


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(FIRST) as server:
        yield server


def address(server: Server, words: dict[str, str]) -> str:
    return f"{server.url}?{urlencode(words)}"


def verdict(tab: Tab, words: str) -> None:
    tab.wait(f"document.querySelector('.verdict .word')?.textContent.includes({json.dumps(words)})")


def whole(tab: Tab) -> None:
    """All that takes longer is there."""
    tab.wait("!!document.querySelector('.map') && !document.querySelector('.waiting')")


def write(tab: Tab, selector: str, text: str) -> None:
    """As a person does: the field, all of it, other letters."""
    tab.ask(f"(document.querySelector({json.dumps(selector)}).focus(), document.activeElement.select(), 1)")
    tab.call("Input.insertText", text=text)


def enter(tab: Tab) -> None:
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)


def query(tab: Tab) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(tab.ask("location.href")).query))


def assert_quiet(tab: Tab, server: Server) -> None:
    assert tab.troubles() == []
    assert all(url.startswith((server.url, "data:", "blob:")) for url in tab.requests())


def test_what_is_typed_is_answered(browser: Browser, server: Server):
    with browser.open(server.url) as tab:
        verdict(tab, "Fits")
        planned = plan("llama32_1b", gpus="2xH100-80GB", context="256K")
        assert tab.text('[data-figure="Peak GPU memory"] .value') == format_bytes(planned.peak)
        assert tab.text('[data-figure="Tokens/s per GPU"] .value') == f"{planned.speed.tokens_per_second:,.0f}"
        drawn = tab.ask(
            "[...document.querySelectorAll('[data-chart=phases] rect.segment')].map((each) => Number(each.dataset.value))"
        )
        assert sorted(drawn) == sorted(size for phase in planned.phases.values() for size in phase.values() if size)
        hours = 1e9 / planned.speed.tokens_per_second / 3600
        assert tab.text('[data-cost="cost"] dd') == (f"{2 * hours:,.2f}" if 2 * hours < 100 else f"{2 * hours:,.0f}")
        # letter by letter, faster than it is answered: the last word counts
        tab.ask("(document.querySelector('#a-context').focus(), document.activeElement.select(), 1)")
        for letter in "128K":
            tab.call("Input.insertText", text=letter)
        tab.wait("document.querySelector('.command')?.textContent.includes('--context 128K')")
        other = plan("llama32_1b", gpus="2xH100-80GB", context="128K")
        assert tab.text('[data-figure="Peak GPU memory"] .value') == format_bytes(other.peak)
        assert query(tab) == {**FIRST, "context": "128K"}
        tab.ask("(document.querySelector('[aria-label=\"twice the GPUs\"]').click(), 1)")
        tab.wait("document.querySelector('.command').textContent.includes('--gpus 4xH100-80GB')")
        write(tab, "#a-context", "128X")
        verdict(tab, "No plan")
        assert "is not a number of tokens" in tab.text("#a-context-problem")
        assert tab.ask("document.querySelector('#a-context').getAttribute('aria-invalid')") == "true"
        write(tab, "#a-context", "256K")
        verdict(tab, "Fits")
        assert not tab.ask("document.querySelector('#a-context').hasAttribute('aria-invalid')")
        # a name that is not a preset is looked for when it is whole
        before = len(tab.requests())
        write(tab, "#a-model", "/nowhere")
        assert len(tab.requests()) == before
        enter(tab)
        verdict(tab, "No plan")
        assert "no folder with a config.json" in tab.text(".verdict")
        assert_quiet(tab, server)


def test_advice_is_taken_and_the_rest_comes(browser: Browser, server: Server):
    words = {**FIXED, "gpus": "1xRTX4090", "stack": "recompute=layer, tile=4K, heads_per_stage=4", "context": "4M"}
    with browser.open(address(server, words), dark=True) as tab:
        verdict(tab, "Does not fit")
        assert not tab.count("[data-do=yaml]") and tab.count(".meter .over")
        tab.wait("document.querySelectorAll('.advice button').length > 1")
        first = tab.text(".advice li span")
        tab.ask("(document.querySelector('.advice button').focus(), 1)")
        enter(tab)
        verdict(tab, "Fits")
        assert query(tab)["gpus"] == first.partition(":")[0].replace("RTX4090-24GB", "RTX4090")
        assert tab.ask("document.activeElement.id") == "a-count"
        whole(tab)
        assert tab.count("[data-chart=ladder] .bar") >= 5 and tab.count(".longest b") == 1
        cells = tab.count("button.cell")
        assert cells == tab.ask(
            "document.querySelectorAll('.map tbody tr').length * document.querySelectorAll('.map thead th').length"
        )
        assert tab.count('button.cell[tabindex="0"]') == 1 and tab.count(".cell.here") == 1
        tab.ask("(document.querySelector('.cell.here').focus(), 1)")
        tab.press("ArrowLeft")
        chosen = tab.ask("document.activeElement.getAttribute('aria-label')")
        enter(tab)
        gpus, context = chosen.partition(":")[0].split(" at ")
        tab.wait(f"document.querySelector('.command').textContent.includes('--gpus {gpus} --context {context}')")
        colour = "getComputedStyle(document.documentElement).backgroundColor"
        assert tab.ask(colour) == "rgb(16, 18, 21)"
        assert_quiet(tab, server)


def test_two_set_ups_and_one_file(browser: Browser, server: Server, tmp_path: Path):
    with browser.open(address(server, FIXED)) as tab:
        verdict(tab, "Fits")
        whole(tab)
        tab.ask("(document.querySelector('#compare').click(), 1)")
        tab.wait("document.querySelectorAll('.setup .verdict').length === 2")
        write(tab, "#b-context", "128K")
        tab.wait("document.querySelector('.side-by-side thead')?.textContent.includes('128K')")
        both = [{**FIXED}, {**FIXED, "context": "128K"}]
        shown = [answers.answer(read(words)) for words in both]
        rows = tab.ask(
            "[...document.querySelectorAll('.side-by-side tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        peaks = next(row for row in rows if row[0] == "Peak GPU memory")
        assert [cell.replace("\u00a0", " ") for cell in peaks[1:3]] == [
            format_bytes(each["plan"]["peak"]) for each in shown if each
        ]
        assert query(tab) == {**FIXED, **{f"b.{name}": word for name, word in both[1].items()}}
        tab.wait("document.querySelectorAll('.map').length === 2 && !document.querySelector('.waiting')")
        assert tab.ask("new Set([...document.querySelectorAll('[id]')].map((each) => each.id)).size") == tab.count(
            "[id]"
        )
        page = tab.ask("fetch(document.querySelector('#file').href).then((answer) => answer.text())")
        yaml = tab.ask(
            "document.querySelector('[data-setup=a] [data-do=yaml]').closest('.card').querySelector('pre').textContent"
        )
        assert shown[0] is not None and yaml == shown[0]["yaml"]
        assert_quiet(tab, server)
    (tmp_path / "plan.html").write_text(page)
    with browser.open(tmp_path / "plan.html") as tab:
        assert tab.count(".setup") == 2 and tab.count("form") == 0 and tab.count("button.cell") == 0
        assert (
            tab.count("[data-chart=phases]") == 2 and tab.count("[data-chart=ladder]") == 2 and tab.count(".map") == 2
        )
        assert tab.count(".side-by-side") == 1 and tab.text(".setup-title") == "llama32_1b at 256K on 2xH100-80GB"
        assert tab.troubles() == [] and tab.requests() == [(tmp_path / "plan.html").resolve().as_uri()]


def test_a_file_from_the_command_line_is_the_same(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.html"
    words = ["llama32_1b", "--gpus", "2xH100-80GB", "--max-context", "--stack.ulysses", "2", "--stack.recompute", "layer",
             "--stack.tile", "4K", "--set", "heads_per_stage=4", "--compare", "heads_per_stage=1"]  # fmt: skip
    assert main(["plan", *words, "--html", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    with browser.open(out, 360, 760) as tab:
        assert tab.count(".setup") == 2 and tab.count(".map") == 2
        kept = tab.ask("data.setups.map((each) => each.answer.plan)")
        assert [each["peak"] for each in kept] == [each["peak"] for each in said]
        assert [each["stack"]["heads_per_stage"] for each in kept] == [4, 1]
        assert tab.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert tab.troubles() == []


def test_keys_and_narrow_screens(browser: Browser, server: Server):
    with browser.open(address(server, FIXED), 360, 740) as tab:
        verdict(tab, "Fits")
        whole(tab)
        assert tab.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        unnamed = (
            "[...document.querySelectorAll('input, select, button, a[href]')].filter((each) => each.offsetParent &&"
            " !each.labels?.length && !each.getAttribute('aria-label') && !each.textContent.trim()).length"
        )
        assert tab.ask(unnamed) == 0
        tab.ask("(document.body.focus(), 1)")
        reached = []
        for _ in range(34):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
            there = "document.activeElement"
            reached.append(tab.ask(f"{there}.id || {there}.getAttribute('aria-label') || {there}.textContent"))
        fields = ("model", "gpu", "count", "context", "rows", "host", "tokens", "price")
        wanted = ["compare", "file", *(f"a-{name}" for name in fields)]
        assert [name for name in reached if name in wanted] == wanted, reached
        small = (
            "[...document.querySelectorAll('.ask input[type=text]')].filter((each) => each.offsetParent"
            " && parseFloat(getComputedStyle(each).fontSize) < 16).length"
        )
        assert tab.ask(small) == 0, "a phone would zoom in"
        assert tab.ask("document.querySelector('.verdict-box').getAttribute('aria-live')") == "polite"
        tab.ask("(document.querySelector('#a-adapters').click(), 1)")
        tab.wait("document.querySelector('.command').textContent.includes('--lora 16')")
        assert query(tab)["lora"] == "16"
        assert_quiet(tab, server)


def test_a_server_that_does_not_answer_is_said(browser: Browser, server: Server):
    with browser.open(server.url) as tab:
        verdict(tab, "Fits")
        line = dict(latency=0, downloadThroughput=-1, uploadThroughput=-1)
        tab.call("Network.emulateNetworkConditions", offline=True, **line)
        write(tab, "#a-context", "64K")
        verdict(tab, "No plan")
        assert "has “ithaca plan --web” ended?" in tab.text(".verdict")
        tab.call("Network.emulateNetworkConditions", offline=False, **line)
        write(tab, "#a-context", "32K")
        verdict(tab, "Fits")
