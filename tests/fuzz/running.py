"""One case of the fuzzer: set up, run, look at what came of it.

In this process, with an alarm, unless it is asked for as a real command. What would start workers, or compute for long, is replaced
by an exception that says that the request was accepted: the fuzzer is about what is refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ithaca.cli.main import main

LIMIT = 20  # seconds
CODES = {0, 1, 2, 3, 4, 5, 6}  # docs/reference/run_folder.md; 1 is a failed check of `verify` only


@dataclass(frozen=True)
class Case:
    name: str
    argv: tuple[str, ...]
    nonsense: bool  # by construction: it must not end with 0
    change: Callable[[Path], None] | None = None  # of a copy of the folders below
    copied: tuple[str, ...] = ()

    @property
    def verb(self) -> str:
        sub = self.argv[0] in ("data", "ckpt", "recipes") and len(self.argv) > 1
        return " ".join(self.argv[: 2 if sub else 1])


@dataclass
class Outcome:
    case: Case
    code: int | None
    said: str
    problem: str | None = None  # what must not be

    def __str__(self) -> str:
        return (
            f"{self.problem}: {self.case.name}\n    ithaca {' '.join(self.case.argv)!r:.600}\n    {self.said[-1200:]}"
        )


class Accepted(BaseException):
    """It would have been done. Not an Exception: nobody on the way may take it for an error."""


class Hang(BaseException):
    pass


def _accept(*_: Any, **__: Any) -> Any:
    raise Accepted


STARTS = (
    "ithaca.base.processes.pool.Workers.__init__",
    "ithaca.training.entry.start",
    "ithaca.observe.profiler.measure.measure",
    "ithaca.observe.profiler.rungs.measure_ladder",
    "ithaca.planner.dry_run.run.dry_run",
    "webbrowser.open",
)


@contextlib.contextmanager
def _place(case: Case, world: Path, scratch: Path) -> Iterator[Path]:
    """A folder that looks like the world; what the case changes is a copy, the rest are links."""
    scratch.mkdir()
    for each in world.iterdir():
        copied = each.name in case.copied
        if copied and each.is_dir():
            shutil.copytree(each, scratch / each.name, symlinks=True)
        elif copied:
            shutil.copy(each, scratch / each.name)
        else:
            (scratch / each.name).symlink_to(each)
    before = os.getcwd()
    os.chdir(scratch)
    try:
        if case.change is not None:
            case.change(scratch)
        yield scratch
    finally:
        os.chdir(before)
        shutil.rmtree(scratch, ignore_errors=True)


def run_case(case: Case, world: Path, scratch: Path, *, command: bool = False) -> Outcome:
    with _place(case, world, scratch):
        outcome = _as_command(case) if command else _here(case)
    if outcome.problem is None:
        if "Traceback (most recent call last)" in outcome.said:
            outcome.problem = "traceback"
        elif outcome.code not in CODES or (outcome.code == 1 and case.verb != "verify"):
            outcome.problem = f"exit code {outcome.code}"
        elif outcome.code == 0 and case.nonsense:
            outcome.problem = "nonsense was accepted"
        elif outcome.code and not outcome.said.strip():
            outcome.problem = "not a word"
    return outcome


def _as_command(case: Case) -> Outcome:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ithaca", *case.argv],
            capture_output=True,
            timeout=6 * LIMIT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Outcome(case, None, "", "hang")
    return Outcome(case, done.returncode, (done.stdout + done.stderr).decode(errors="replace"))


def _here(case: Case) -> Outcome:
    said = io.StringIO()

    def ring(*_: Any) -> None:
        raise Hang

    code: int | None = None
    problem = None
    before = signal.signal(signal.SIGALRM, ring)
    with contextlib.ExitStack() as opened:
        for name in STARTS:
            opened.enter_context(patch(name, _accept))
        opened.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        opened.enter_context(contextlib.redirect_stdout(said))
        opened.enter_context(contextlib.redirect_stderr(said))
        signal.alarm(LIMIT)
        try:
            code = main(case.argv)
        except Accepted:
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except Hang:
            problem = "hang"
            said.write(traceback.format_exc())
        except BaseException:
            problem = "traceback"
            said.write(traceback.format_exc())
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            _leave_group()
    return Outcome(case, code, said.getvalue(), problem)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Tally:
    """How many cases of which verb, and what must not be."""

    counts: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    bad: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        verb = outcome.case.verb
        self.counts[verb] = self.counts.get(verb, 0) + 1
        self.refused += outcome.code != 0
        if outcome.problem is not None:
            self.bad.append(outcome)

    def words(self) -> str:
        verbs = ", ".join(f"{verb} {count}" for verb, count in sorted(self.counts.items(), key=lambda each: -each[1]))
        total = sum(self.counts.values())
        return f"{total:,} cases, {self.refused:,} refused, {len(self.bad)} bad; {verbs}"
