"""`ithaca ckpt ls | verify | export`: look at the checkpoints of a run, read them through, write one for transformers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .export import add_export

if TYPE_CHECKING:
    from ..storage.listing import About

_HELP = """\
PATH is a run folder, a folder of checkpoints, or one checkpoint (step-N). Nothing is changed by ls and verify, so they may be
used while a run is saving.

examples:
  ithaca ckpt ls runs/mine
  ithaca ckpt verify runs/mine
  ithaca ckpt verify runs/mine/checkpoints/step-400 --json
  ithaca ckpt export runs/mine exported
"""
_DAMAGED = 4  # docs/reference/run_folder.md
_SHOWN = 20  # problems of a checkpoint, one a line


def add_ckpt(verbs: Any) -> None:
    parser = verbs.add_parser(
        "ckpt",
        help="list, verify and export checkpoints",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ls | verify | export", required=True)
    for name, run, words in (
        ("ls", _list, "what is there, without reading it through"),
        (
            "verify",
            _verify,
            "read every byte and compare it with the manifest, then look for numbers that are not finite; exit code 4 if one is "
            "damaged",
        ),
    ):
        action = actions.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        action.set_defaults(run=run, traceback=False)
        action.add_argument("path", metavar="PATH", type=Path, help="a run folder, its checkpoints, or one (step-N)")
        action.add_argument("--json", action="store_true", help="print JSON")
    add_export(actions)


def _list(options: argparse.Namespace) -> int:
    from ..storage.files import CheckpointError, Gone
    from ..storage.keep import unfinished
    from ..storage.listing import describe_all, folder_of

    leftovers = unfinished(folder_of(options.path))
    try:
        checkpoints = describe_all(options.path)
    except CheckpointError as error:
        if isinstance(error, Gone) or not leftovers:
            raise
        checkpoints = []  # a folder with nothing but an unfinished save is worth a listing too
    if options.json:
        rows = [checkpoint.json() for checkpoint in checkpoints]
        print(json.dumps({"checkpoints": rows, "unfinished": [str(path) for path in leftovers]}, indent=1))
        return 0
    if checkpoints:
        print(_table(checkpoints))
    for checkpoint in checkpoints:
        if checkpoint.problems:
            print(f"{checkpoint.path.name} is damaged: {'; '.join(checkpoint.problems[:3])}")
    if any(checkpoint.state == "touched" for checkpoint in checkpoints):
        print("touched: a file has another time than when it was written; 'ithaca ckpt verify' reads it")
    for path in leftovers:
        print(f"{path.name}: a save under way, or an interrupted one, which the next start of the run removes")
    return 0


def _table(checkpoints: list[About]) -> str:
    from ..base.units import format_bytes

    rows = [("checkpoint", "time", "size", "files", "ranks", "state", "run")]
    for checkpoint in checkpoints:
        marks = [mark for mark, there in (("LATEST", checkpoint.latest), ("BEST", checkpoint.best)) if there]
        name = checkpoint.path.name + (f" ({', '.join(marks)})" if marks else "")
        world = "?" if checkpoint.world is None else str(checkpoint.world)
        size = format_bytes(checkpoint.bytes)
        rows.append(
            (name, checkpoint.time or "?", size, str(checkpoint.files), world, checkpoint.state, checkpoint.run or "?")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _verify(options: argparse.Namespace) -> int:
    from ..storage.files import gone_error
    from ..storage.listing import describe_all

    results: list[dict[str, Any]] = []
    pruned: list[Path] = []  # by their run, while they were read
    while not results:
        checkpoints = [checkpoint for checkpoint in describe_all(options.path) if checkpoint.path not in pruned]
        if not checkpoints:
            break
        total = 2 * sum(checkpoint.bytes for checkpoint in checkpoints)  # bytes, then numbers
        with _Progress(total, quiet=options.json) as progress:
            for checkpoint in checkpoints:
                begin = time.perf_counter()
                problems = _problems(checkpoint, progress)
                seconds = time.perf_counter() - begin
                if problems and (gone := gone_error(checkpoint.path)):
                    if checkpoint.path == options.path:
                        raise gone
                    pruned.append(checkpoint.path)
                    if not options.json:
                        progress.say(f"{checkpoint.path.name}: pruned by its run meanwhile")
                    continue
                results.append(
                    {**checkpoint.json(), "ok": not problems, "problems": problems, "seconds": round(seconds, 3)}
                )
                if not options.json:
                    _tell(checkpoint, problems, seconds, progress)
    bad = sum(not result["ok"] for result in results)
    if options.json:
        about = {"checkpoints": results, "damaged": bad, "pruned": [str(path) for path in pruned]}
        print(json.dumps(about, indent=1))
    elif bad:
        good = next((result["path"] for result in results if result["ok"]), None)
        print(f"{bad} of {len(results)} damaged; " + (f"newest good one: {good}" if good else "none is good"))
    return _DAMAGED if bad else 0


def _tell(checkpoint: About, problems: list[str], seconds: float, progress: _Progress) -> None:
    from ..base.units import format_bytes

    about = f"{format_bytes(checkpoint.bytes)} in {checkpoint.files} files, {seconds:.1f} s"
    progress.say(f"{checkpoint.path.name}: {'DAMAGED' if problems else 'ok'} ({about})")
    for problem in problems[:_SHOWN]:
        progress.say(f"  {problem}")
    if len(problems) > _SHOWN:
        progress.say(f"  and {len(problems) - _SHOWN} more, which --json lists")


def _problems(checkpoint: About, progress: _Progress) -> list[str]:
    """By names, sizes and run first; then every byte, of what has a manifest to compare with, and every number."""
    from ..storage.check import verify

    return list(checkpoint.problems) or verify(checkpoint.path, progress.add)


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.total, self.quiet = total, quiet
        self.bar: Any = None

    def __enter__(self) -> _Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def add(self, count: int) -> None:
        if self.bar is not None:
            self.bar.advance(self.task, count)

    def say(self, text: str) -> None:
        """On stdout, which rich keeps apart from the bar."""
        if self.bar is not None and sys.stdout.isatty():
            self.bar.console.out(text, highlight=False)
        else:
            print(text, flush=True)
