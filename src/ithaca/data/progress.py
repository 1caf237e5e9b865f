"""How far it is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO


class Progress:
    """Bytes done of a total, with documents and tokens so far."""

    def __init__(
        self, label: str, total: int, *, quiet: bool = False, every: float = 10.0, stream: TextIO | None = None
    ):
        self.label, self.total, self.every = label, max(1, total), every
        self.done = self.documents = self.tokens = 0
        self.started = self._told = time.monotonic()
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task(self.label, total=self.total, tokens="0")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and kind is None:
            self._line()

    def add(self, size: int, documents: int, tokens: int) -> None:
        self.done += size
        self.documents += documents
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self.done, self.total), tokens=f"{self.tokens:,}")
        elif not self._quiet and time.monotonic() - self._told >= self.every:
            self._told = time.monotonic()
            self._line()

    def _line(self) -> None:
        seconds = max(time.monotonic() - self.started, 1e-6)
        share = min(self.done / self.total, 1.0)
        rest = f", {seconds / share * (1 - share):.0f} s to go" if 0 < share < 1 else ""
        print(
            f"{self.label}: {share:4.0%}, {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {self.documents:,} documents, "
            f"{self.tokens:,} tokens, {self.done / 1e6 / seconds:.1f} MB/s{rest}",
            file=self._stream,
            flush=True,
        )
