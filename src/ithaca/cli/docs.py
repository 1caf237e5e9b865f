"""`ithaca docs`: the pages for users, which travel in the package as Markdown, so that a message can name one that is there."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any

ROOMS = ("start", "guides", "concepts", "reference", "help")
_HELP = """\
Read the documentation here: in colour on a terminal, as Markdown into a pipe. Without a page: all of them, with a line each.

examples:
  ithaca docs
  ithaca docs tutorial
  ithaca docs troubleshooting
  ithaca docs config | grep lr
"""


def add_docs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "docs",
        help="read the documentation that comes with ithaca",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_docs, traceback=False)
    parser.add_argument("page", nargs="?", default=None, help="its name, as tutorial or guides/data")
    parser.add_argument("--list", action="store_true", help="the pages there are, with their titles")
    parser.add_argument("--path", action="store_true", help="print where the page lies, instead of what it says")


def folder() -> Path:
    """Where the pages are: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / "docs", package.parents[1] / "docs"):
        if (place / "index.md").is_file():
            return place
    raise ValueError(
        f"the pages did not come with this installation ({package / 'docs'} is not there); install ithaca again"
    )


def pages() -> dict[str, Path]:
    """Every page by its name; in the order of the rooms."""
    place = folder()
    found = [place / "index.md", *(path for room in ROOMS for path in sorted((place / room).glob("*.md")))]
    return {path.stem: path for path in found}


def find(name: str) -> Path:
    known = pages()
    stem = name.removesuffix(".md").rpartition("/")[2]
    path = known.get(stem)
    if path is not None and name.removesuffix(".md") in (stem, f"{path.parent.name}/{stem}"):
        return path
    near = difflib.get_close_matches(stem, known, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"there is no page {name[:80]!r}; {meant}`ithaca docs --list` names all {len(known)}")


def title(path: Path) -> str:
    return next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:]


def text(path: Path) -> str:
    """The page without what is only for the site: comments, and places where docstrings are filled in."""
    markdown = re.sub(r"<!--.*?-->\n*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"^::: (\S+)$(\n .*)*", r"    python -m pydoc \1", markdown, flags=re.MULTILINE)


def _docs(options: argparse.Namespace) -> int:
    if options.page is None or options.list:
        if options.page is not None or options.path:
            raise ValueError("--list names all pages; give it alone, or name a page without it")
        room = ""
        for name, path in pages().items():
            if path.parent.name != room and name != "index":
                room = path.parent.name
                print(f"\n{room}")
            print(f"  {name:20}  {title(path)}")
        print("\nithaca docs PAGE shows one")
        return 0
    path = find(options.page)
    if options.path:
        print(path)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console(width=min(Console().width, 120)).print(Markdown(text(path), hyperlinks=False))
    else:
        print(text(path), end="")
    return 0
