"""What a person sees of a run: a live panel on a terminal, a plain line per logged step elsewhere.

    with Display("llama3_8b_1m", steps=1000, folder="runs/llama3_8b_1m") as display:
        display.say(headline(facts))
        display.doing("step 1")
        ...
        display.step(record, eta=timer.eta(999), next_save=100)

Lines that are said go above the panel, and so does whatever else is printed while it is shown. Everything said also goes to the log
file of the rank (logs.py), where steps always have the plain form. A file, a pipe and a terminal that cannot move its cursor
(TERM=dumb) get plain lines; NO_COLOR is obeyed. Nothing here stops a run: a terminal that is gone is a display that is silent.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live

from .panel import REMEMBERED, State
from .record import StepRecord
from .text import number, plain_line

logger = logging.getLogger(__name__)

_PLAIN = str.maketrans({"×": "x", "·": "-", "…": "...", "−": "-", "≤": "<=", "≥": ">="})


class Display:
    """Shows one run. Ranks other than 0 show nothing. quiet: only warnings and errors are shown.

    console: where to, instead of the standard output.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        folder: str = "",
        quiet: bool = False,
        rank: int = 0,
        console: Console | None = None,
    ) -> None:
        self._state = State(title, folder, steps)
        self._quiet, self._first = quiet, rank == 0
        self._console = console or open_console()
        self._live: Live | None = None

    def __enter__(self) -> Display:
        console = self._console
        if self._first and not self._quiet and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=lambda: self._state, refresh_per_second=4)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.ended("failed")
        if self._live is not None:
            self._live.stop()  # the last panel stays on the terminal
            self._live = None

    @property
    def live(self) -> bool:
        return self._live is not None

    def say(self, text: str) -> None:
        """A line, or several, for the person and for the log."""
        logger.info("%s", text)
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """A line that is shown even when quiet. The logging handler calls it; others use logging."""
        self._print(text, "yellow")

    def doing(self, what: str, done: int | None = None) -> None:
        """What happens now, such as `step 12`, `saving` or `evaluating`: the panel counts its seconds. done: steps so far, of which
        not all are logged."""
        done = self._state.done if done is None else done
        self._state = replace(self._state, doing=what, since=time.monotonic(), done=done)

    def ended(self, how: str, done: int | None = None) -> None:
        """Nothing happens any more: `finished`, `stopped`, `failed`. The last panel says so, and no clock goes on."""
        self.doing(how, done)
        self._state = replace(self._state, since=0.0, due=None, typical=None, next_save=None)

    def step(
        self,
        record: StepRecord,
        *,
        eta: float | None = None,
        typical: float | None = None,
        next_save: int | None = None,
    ) -> None:
        """A step is done. eta: seconds left; typical: seconds of a step; next_save: the step of the next checkpoint."""
        state = self._state
        lines = [plain_line(record, state.steps, eta, next_save)]
        evaluated = state.last_eval
        if record.eval_loss is not None:
            evaluated = (record.step, record.eval_loss)
            lines.append(f"step {record.step}/{state.steps} eval_loss {number(record.eval_loss, 4)}")
        self._state = replace(
            state,
            record=record,
            typical=typical,
            due=None if eta is None else time.monotonic() + eta,
            next_save=next_save,
            last_eval=evaluated,
            losses=(*state.losses, record.loss)[-REMEMBERED:],
        )
        for line in lines:
            logger.info("%s", line)
            if not self.live and not self._quiet:
                self._print(line)

    def _print(self, text: str, style: str | None = None) -> None:
        if self._first:
            # soft_wrap: a long line is the terminal's to wrap, and a file's to keep whole
            self._console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def open_console(file: TextIO | None = None) -> Console:
    """A console on the standard output (or `file`) that cannot fail. A live one only on a real terminal, whatever FORCE_COLOR says:
    many build systems set it, and a panel in their logs would be thousands of lines."""
    output = Steady(file or sys.stdout)
    if output.isatty():
        return Console(file=cast(TextIO, output))
    return Console(file=cast(TextIO, output), force_terminal=False, color_system=None)


class Steady:
    """An output that never raises. Characters its encoding does not have are replaced; when its other end is gone (the window was
    closed, `| head` has seen enough), the rest is thrown away."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding: str = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(UnicodeEncodeError):
            self._try(self._file.write, text)
            return len(text)
        plain = text.translate(_PLAIN).encode(self.encoding, "replace").decode(self.encoding)
        self._try(self._file.write, plain)
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def isatty(self) -> bool:
        with suppress(ValueError, AttributeError):  # closed, or not a real file
            return self._file.isatty()
        return False

    def fileno(self) -> int:
        return self._file.fileno()

    def _try(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except UnicodeEncodeError:
            raise
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                self._leave()
        except ValueError:  # the file was closed
            pass

    def _leave(self) -> None:
        """Let the descriptor lead nowhere: what is still buffered would raise again when the interpreter ends."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
