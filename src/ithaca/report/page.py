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

from .. import __version__
from ..files import write_atomically
from . import charts, evaluations, summary
from .inputs import Inputs, gather
from .values import CATEGORIES

_SCRIPTS = (
    "format.js",
    "dom.js",
    "bars.js",
    "plot.js",
    "summary.js",
    "training.js",
    "evaluation.js",
    "memory.js",
    "page.js",
)


def write_report(
    out: Path,
    *,
    run: Path | None = None,
    plan: dict[str, Any] | None = None,
    ladder: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
) -> Path:
    """Write the page, whole or not at all, and return where. Folders are made. For the arguments see `render`."""
    page = render(run=run, plan=plan, ladder=ladder, profile=profile)
    return write_page(Path(out), page)


def render(
    *,
    run: Path | None = None,
    plan: dict[str, Any] | None = None,
    ladder: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
) -> str:
    """The page as text.

    run: a run folder; plan.json, ladder.json and profile.json in it are taken too. plan, ladder, profile: as docs/report.md
    describes them; they win over those in the folder.
    """
    return page_of(gather(run, {"plan": plan, "ladder": ladder, "profile": profile}))


def page_of(inputs: Inputs) -> str:
    style = _read("page.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    page = _read("page.html")
    # The data last: what it says must not be taken for a place to fill in.
    for name, value in (("policy", policy), ("style", style), ("script", script), ("data", as_json(view(inputs)))):
        head, mark, tail = page.partition(f"{{{{{name}}}}}")
        assert mark, f"page.html has no place for {name}"
        page = head + value + tail
    return page


def write_page(out: Path, page: str) -> Path:
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file to write, such as {out / 'report.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page)
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None
    return out


def view(inputs: Inputs) -> dict[str, Any]:
    """Everything the page shows."""
    return {
        "version": __version__,
        "categories": CATEGORIES,
        "heading": summary.heading(inputs),
        "figures": summary.figures(inputs),
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
        "config": inputs.config_text,
    }


def as_json(value: Any) -> str:
    """JSON that may stand inside <script>: without a `<` it can neither end the block nor open a comment in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read(name: str) -> str:
    return resources.files("ithaca.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
