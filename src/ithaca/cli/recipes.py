"""`ithaca recipes ls | show | cp`: the named runs that come with the package."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

_HELP = """\
A recipe is a complete run: model, context, stack and training settings for a given hardware, with comments that say which of its
figures were measured. Copy one and edit it, or name it and override what differs.

examples:
  ithaca recipes ls
  ithaca recipes show tiny_cpu
  ithaca recipes cp llama3_8b_1m_8xh100 run.yaml
"""


def add_recipes(verbs: Any) -> None:
    parser = verbs.add_parser(
        "recipes",
        help="list, show and copy the runs that come with ithaca",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(traceback=False)
    actions = parser.add_subparsers(dest="action", metavar="ls | show | cp", required=True)

    listing = actions.add_parser("ls", help="all recipes, one line each")
    listing.set_defaults(run=_list)
    listing.add_argument("--json", action="store_true", help="print them as JSON")

    show = actions.add_parser("show", help="print a recipe")
    show.set_defaults(run=_show)
    show.add_argument("name")

    copy = actions.add_parser("cp", help="write a recipe to a file of yours")
    copy.set_defaults(run=_copy)
    copy.add_argument("name")
    copy.add_argument("dest", nargs="?", default=None, help="a file or a folder (default: NAME.yaml here)")
    copy.add_argument("--force", action="store_true", help="replace a file that is there")


def _list(options: argparse.Namespace) -> int:
    from ..base.units import format_tokens
    from ..config import load, recipe_names

    rows = []
    for name in recipe_names():
        config = load(None, recipe=name).config
        rows.append({"name": name, "context": config.data.context, "description": config.description})
    if options.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    width = max(len(row["name"]) for row in rows)
    print(f"{'recipe':{width}}  context  for")
    for row in rows:
        print(f"{row['name']:{width}}  {format_tokens(row['context']):>7}  {row['description']}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from ..config import recipe_text

    print(recipe_text(options.name), end="")
    return 0


def _copy(options: argparse.Namespace) -> int:
    from ..config import recipe_text

    text = recipe_text(options.name)
    path = Path(options.dest or f"{options.name}.yaml")
    if path.is_dir():
        path /= f"{options.name}.yaml"
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it first")
    _write(path, text, options.force)
    print(f"wrote {path}; edit it, then run: ithaca train {path}")
    return 0


def _write(path: Path, text: str, replace: bool) -> None:
    """Open in a mode that cannot overwrite by accident, not even between a check and a write."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        with open(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} is there already, and nothing was changed; use --force to replace it") from None
