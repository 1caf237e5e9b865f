"""`ithaca doctor`: the environment as a block to paste into a bug report, and what is missing for speed.

It never fails: every part is looked at by itself, and one that breaks is printed as broken, with the reason. That is what a
doctor is for. What could name a person or a machine is left out: no host name, user name or home folder; see `without_names`.
"""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.redact import redacted

_HELP = """\
Prints versions, GPUs, memory, limits and attention kernels as a block to paste into a report, and what is missing for speed. The
block names no host, user or home folder. Nothing is sent anywhere. The exit status is then always 0.

With --links it measures instead how fast this machine's GPUs talk to each other (all-to-all, all-gather, reduce-scatter, ring)
and keeps that for plans. Under torchrun on several nodes it measures between all of them:
  ithaca doctor --links
  torchrun --nnodes 2 --nproc-per-node 8 ... -m ithaca doctor --links
"""


def add_doctor(verbs: Any) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="print the environment, and what is missing for speed",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_doctor, traceback=False)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--links", action="store_true", help="measure the links between GPUs, for plans")
    parser.add_argument(
        "--cpu", type=int, metavar="N", help="--links between N processes on the CPU: to try it; not kept"
    )


def run_doctor(options: argparse.Namespace) -> int:
    if options.links or options.cpu is not None:
        from .doctor_links import run_links

        return run_links(options)
    block = examined()
    print(json.dumps(block, indent=1, ensure_ascii=False) if options.json else _text(block))
    return 0


def examined() -> dict[str, Any]:
    """The block, part by part, without names of people and machines."""
    from . import doctor_parts as parts

    block: dict[str, Any] = {"ithaca": {"version": __version__, **_try(_system)}}
    for name, look in parts.PARTS.items():
        block[name] = _try(look)
    hints = _try(lambda: {"hints": parts.hints(block)})
    block["hints"] = hints.get("hints", [hints])
    return without_names(block)


def _try(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return look()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return {"broken": f"{type(error).__name__}: {first}"}


def _system() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def without_names(value: Any, hidden: list[tuple[re.Pattern[str], str]] | None = None) -> Any:
    """The block without secrets, home folder, host name and user name, wherever a message brought them in."""
    if hidden is None:
        hidden = _hidden()
    if isinstance(value, dict):
        return {key: without_names(item, hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [without_names(item, hidden) for item in value]
    if isinstance(value, str):
        value = redacted(value)
        for pattern, instead in hidden:
            value = pattern.sub(instead, value)
    return value


def _hidden() -> list[tuple[re.Pattern[str], str]]:
    patterns: list[tuple[re.Pattern[str], str]] = []
    with suppress(RuntimeError):
        home = str(Path.home())
        if len(home) > 1:
            patterns.append((re.compile(re.escape(home) + r"(?=$|[/:'\"\s])"), "~"))
    patterns.append((re.compile(r"(/home|/Users)/[^/\s'\":]+"), "~"))
    names = [(socket.gethostname(), "<host>")]
    with suppress(Exception):  # a container may run under a user id without a name
        names.append((getpass.getuser(), "<user>"))
    for name, instead in names:
        if name and name not in ("root", "localhost"):
            patterns.append((re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), instead))
    return patterns


def _text(block: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, part in block.items():
        if name == "hints":
            continue
        lines.append(f"{name}:")
        for key, value in part.items():
            values = value if isinstance(value, list) else [value]
            for index, item in enumerate(values or ["none"]):
                lines.append(f"  {key if index == 0 else '':<16}{'missing' if item is None else item}")
    lines.append("missing:" if block["hints"] else "missing: nothing that ithaca could use")
    for hint in block["hints"]:
        lines.append(f"  {hint.get('what', 'broken')}: {hint.get('why', hint.get('broken', ''))}")
        if hint.get("command"):
            lines.append(f"    {hint['command']}")
    return "\n".join(lines)
