"""The page: one HTML file with style, script and data in it, that asks for nothing from anywhere.

Two rules keep it harmless. Everything that was read goes into the page as JSON with every `<` escaped, and the script puts it into
the document as text, never as markup, so a run may be called `<script>`. And the page carries a Content-Security-Policy that
allows the style and the script whose hashes it names, and nothing else: no request, no form, no other script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.files import write_atomically, write_output
from ...base.run_folder import RunFolder
from . import about, charts, evaluations, summary, versus
from .inputs import Inputs, gather
from .values import CATEGORIES

_SCRIPTS = (
    "format.js",
    "dom.js",
    "bars.js",
    "plot.js",
    "parts.js",
    "summary.js",
    "training.js",
    "versus.js",
    "about.js",
    "evaluation.js",
    "memory.js",
    "page.js",
)


def write_report(
    out: Path | None = None,
    *,
    run: Path | None = None,
    plan: dict[str, Any] | None = None,
    ladder: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
) -> Path:
    """Write the page, and return where. Folders are made. out: None = the page of the run folder. For the rest see `render`."""
    page = render(run=run, plan=plan, ladder=ladder, profile=profile)
    return write_page(None if out is None else Path(out), page, run)


def render(
    *,
    run: Path | None = None,
    plan: dict[str, Any] | None = None,
    ladder: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
) -> str:
    """The page as text.

    run: a run folder; plan.json, ladder.json and profile.json in it are taken too. plan, ladder, profile: as
    docs/reference/report.md describes them; they win over those in the folder.
    """
    return page_of(gather(run, {"plan": plan, "ladder": ladder, "profile": profile}))


def page_of(inputs: Inputs) -> str:
    return fill(asset("page.html"), asset("page.css"), "\n".join(map(asset, _SCRIPTS)), view(inputs))


def fill(page: str, style: str, script: str, data: Any, *, asks_its_server: bool = False) -> str:
    """One page of these parts. asks_its_server: its script may send requests to where the page came from."""
    rules = ["default-src 'none'", f"style-src {_hash(style)}", f"script-src {_hash(script)}", "img-src data:"]
    rules += ["base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if asks_its_server else [])]
    policy = "; ".join(rules)
    # The data last: what it says must not be taken for a place to fill in.
    for name, value in (("policy", policy), ("style", style), ("script", script), ("data", as_json(data))):
        head, mark, tail = page.partition(f"{{{{{name}}}}}")
        assert mark, f"page.html has no place for {name}"
        page = head + value + tail
    return page


def write_page(out: Path | None, page: str, run: Path | None = None, other: Path | None = None) -> Path:
    """out: None = that of the run folder, which is replaced whatever it is: a link in a folder of somebody else leads nowhere.
    other: a run that it is compared with, on a page of its own."""
    name = "index.html" if other is None else f"with-{other.resolve().name}.html"
    path = out or (RunFolder(run).report / name if run else Path("report.html"))
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if out is None and run:
            write_atomically(path, page)
        else:
            write_output(path, page)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); name another file with --out") from None
    return path


def view(inputs: Inputs) -> dict[str, Any]:
    """Everything the page shows."""
    return {
        "version": __version__,
        "categories": CATEGORIES,
        "heading": summary.heading(inputs),
        "figures": summary.figures(inputs),
        "versus": versus.versus(inputs),
        "comparison": summary.comparison(inputs),
        "phases": charts.phases(inputs),
        "at_peak": charts.at_peak(inputs),
        "times": charts.times(inputs),
        "ladder": charts.ladder(inputs),
        "timeline": charts.timeline(inputs),
        "profile": charts.profile(inputs),
        "tables": charts.tables_of_profile(inputs),
        "curves": charts.curves(inputs),
        "evaluation": evaluations.evaluation(inputs),
        "events": charts.events(inputs),
        "stack": charts.stack(inputs),
        "settings": about.settings(inputs),
        "data": about.data(inputs),
        "environment": about.environment(inputs),
        "config": inputs.config_text,
    }


def as_json(value: Any) -> str:
    """JSON that may stand inside <script>: without a `<` it can neither end the block nor open a comment in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def asset(name: str) -> str:
    """A file of the page that lies beside this one."""
    return resources.files("ithaca.observe.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
