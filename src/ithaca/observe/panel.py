"""The live panel: the state of a run as a box that fits the terminal, whatever its size.

rich asks for it several times a second and says each time how large the terminal is now. Wide: three columns; narrower: two, then
one; too low or too narrow for any box: a single line. Clocks go on between steps, because a step may take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .record import StepRecord
from .text import UNKNOWN, duration, number, plain_line, written

REMEMBERED = 120  # losses of the sparkline
BESIDE = 27  # characters of a column that are not the sparkline's
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class State:
    """What the panel shows. Replaced as a whole, because another thread draws it. Moments are those of time.monotonic."""

    title: str
    folder: str
    steps: int
    doing: str = "starting"
    since: float = 0.0  # when it began to do so; 0: it does nothing any more
    done: int = 0  # steps, logged or not
    record: StepRecord | None = None
    typical: float | None = None  # seconds of a step
    due: float | None = None  # the moment the run will be done
    next_save: int | None = None
    last_eval: tuple[int, float] | None = None  # step, loss
    losses: tuple[float, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        width, height = options.max_width, options.size.height
        columns = 3 if width >= 104 else 2 if width >= 64 else 1
        groups = self._cells(width // columns, ascii_only=options.ascii_only)
        rows = -(-sum(map(len, groups)) // columns)
        if width < 32 or height < rows + 6:
            yield Text(self._short(now), no_wrap=True, overflow="ellipsis")
            return
        yield Panel(
            Group(self._progress(now, narrow=columns == 1), self._doing(now), _table(groups, columns)),
            title=Text(self.title, "bold"),
            title_align="left",
            subtitle=Text(self.folder, "dim"),
            subtitle_align="right",
            box=ROUNDED,
            border_style="dim",
        )

    def _step(self) -> int:
        return max(self.done, 0 if self.record is None else self.record.step)

    def _left(self, now: float) -> float | None:
        return None if self.due is None else max(0.0, self.due - now)

    def _progress(self, now: float, *, narrow: bool) -> Table:
        step, eta = self._step(), f"ETA {duration(self._left(now))}"
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        count = f"{step:,}/{self.steps:,}" if narrow else f"step {step:,} of {self.steps:,}"
        end = eta if narrow else f"{step / self.steps:.1%}  {eta}"
        bar = ProgressBar(total=self.steps, completed=step, pulse=False)
        line.add_row(Text(count, "bold"), bar, Text(end))
        return line

    def _doing(self, now: float) -> Text:
        text = self.doing
        if self.since:
            text += f", {duration(now - self.since)}"
            if self.typical is not None and self.doing.startswith("step "):
                text += f" of about {duration(self.typical)}"
        return Text(text + "\n", "dim", no_wrap=True, overflow="ellipsis")

    def _cells(self, room: int, *, ascii_only: bool) -> list[list[tuple[str, str]]]:
        """Learning, speed, room: (label, value). room: characters of a column."""
        record = self.record
        more = {"loss": "", "copy_wait": ""}
        if len(self.losses) > 1 and not ascii_only:
            # beside label and number: what does not fit is cut off at its end, which is the newest
            more["loss"] = "  " + sparkline(self.losses, max(4, min(16, room - BESIDE)))
        if record is not None and record.seconds > 0:
            more["copy_wait"] = f" ({record.copy_wait / record.seconds:.1%})"
        columns: dict[str, list[tuple[str, str]]] = {"learning": [], "speed": [], "room": []}
        for name, shown in StepRecord.shown_of(record).items():
            columns[shown.column].append((shown.label, written(record, name) + more.get(name, "")))
        evaluated = (
            UNKNOWN if self.last_eval is None else f"{number(self.last_eval[1], 4)} at step {self.last_eval[0]:,}"
        )
        save = UNKNOWN
        if self.next_save is not None:
            save = f"step {self.next_save:,}"
            if self.typical is not None:
                save += f", in {duration(max(0, self.next_save - self._step()) * self.typical)}"
        columns["learning"].append(("last eval", evaluated))
        columns["room"].append(("next save", save))
        rows = max(map(len, columns.values()))
        return [cells + [("", "")] * (rows - len(cells)) for cells in columns.values()]

    def _short(self, now: float) -> str:
        if self.record is None:
            return f"{self.title}: {self.doing}"
        line = plain_line(self.record, self.steps, self._left(now), self.next_save)
        return line if self.done <= self.record.step else f"{self.doing}; {line}"


def _table(groups: list[list[tuple[str, str]]], columns: int) -> Table:
    if columns == 1:
        groups = [[cell for group in groups for cell in group]]
    elif columns == 2:
        cells = [cell for group in groups for cell in group]
        groups = [cells[: len(cells) // 2], cells[len(cells) // 2 :]]
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in groups:
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in zip(*groups, strict=True):
        table.add_row(*(Text(text) for cell in row for text in cell))
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of some values in `width` characters or fewer; the lowest bar is the smallest of them."""
    values = [value for value in values if isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
