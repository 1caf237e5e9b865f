"""Hooks of mkdocs (mkdocs.yml): what the site shows beyond the files of docs/.

- Pages that live elsewhere in the repository, because tools look for them there: CONTRIBUTING, CHANGELOG, results of benchmarks.
  Links between them and docs/ are written as the repository has them, and changed here to what the site has.
- A folder in the nav stands for its pages, so that a new decision or result needs no line there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = {
    f"benchmarks/results/{path.name}": f"developer/results/{path.name}" for path in ROOT.glob("benchmarks/results/*.md")
}
ELSEWHERE = {"CONTRIBUTING.md": "developer/contributing.md", "CHANGELOG.md": "help/changelog.md", **RESULTS}
LINK = re.compile(r"(?<=\])\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    config.nav = _expanded(config.nav)


def on_files(files: Files, config: Any) -> None:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/, or a page that does, lead to where the site has the target; without one their words stay."""
    here = page.file.src_uri
    source = next((path for path, uri in ELSEWHERE.items() if uri == here), f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), link[1]))
        if target.startswith("docs/") and source.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            raise ValueError(f"{source}: the link to {link[1]} leads nowhere")
        inside = {"README.md": "index.md", "benchmarks/results": max(RESULTS.values())}.get(
            target, ELSEWHERE.get(target)
        )
        if inside is None and target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        if inside is None:
            return f" (`{target}`)"
        return f"({os.path.relpath(inside, os.path.dirname(here) or '.')}{link[2] or ''})"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings explain parameters a line each ("device: where to train"); keep these lines apart."""
    if page.file.src_uri != "reference/api.md":
        return html
    return re.sub(r"\n(?=[a-z_]+(?:, [a-z_]+)*: )", "<br>\n", html)


def _expanded(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_expanded(each) for each in nav]
    if isinstance(nav, dict):
        return {name: _expanded(each) for name, each in nav.items()}
    if not nav.endswith("/"):
        return nav
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / nav).glob("*.md")}
    return sorted(found | {uri for uri in ELSEWHERE.values() if uri.startswith(nav)})
