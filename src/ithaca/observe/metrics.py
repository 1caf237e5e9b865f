"""metrics.jsonl, the truth about a run (docs/reference/run_folder.md), and copies of it for trackers.

A line is appended by a single write call, so a reader never sees half of one unless the machine stopped in the middle of it. Such a
remainder is cut off when the run is resumed; it would otherwise swallow the line that follows it.

A disk that is full does not stop a run either: the bytes that did not fit wait in memory and go first at the next line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.files import open_regular
from ..base.run_folder import RunFolder
from ..config.schema import Log
from .record import StepRecord, check_finite, utc_now
from .trackers import Background, open_trackers

logger = logging.getLogger(__name__)

_LARGEST = 1 << 30  # bytes of a metrics.jsonl that is read
_TAIL = 1 << 16  # bytes read at a time from the end, to find the last line end


class Metrics:
    """Writes what a run measures. Only rank 0 does; on other ranks every call but `due` is empty.

    name, settings: of the run, for trackers that show them. trackers: further ones, beside those of the config.
    """

    def __init__(
        self,
        folder: RunFolder,
        log: Log,
        rank: int = 0,
        *,
        name: str = "run",
        settings: Mapping[str, Any] | None = None,
        trackers: Sequence[Background] = (),
    ) -> None:
        self._every = log.every
        self._file: int | None = None
        self._unwritten = b""
        self._warned = False
        self.trackers: list[Background] = []
        if rank == 0:
            self._file = _open(folder.metrics)
            self.trackers = [*open_trackers(folder, log, name, settings or {}), *trackers]

    def due(self, step: int) -> bool:
        """Whether the config asks for a line of this step; the same on every rank. The first step always has one."""
        return step == 1 or step % self._every == 0

    def step(self, record: StepRecord) -> None:
        """Write the line of a step. An evaluation after a step belongs to its line, so such a step always has one."""
        if self._file is None:
            return
        line = record.line()
        self._write(line)
        numbers = {name: value for name, value in line.items() if isinstance(value, (int, float)) and name != "step"}
        for tracker in self.trackers:
            tracker.offer(record.step, numbers)

    def evaluation(self, step: int, numbers: Mapping[str, float], pictures: Mapping[str, Any]) -> None:
        """Write the line of an evaluation. pictures: [height, width, 3] bytes each, for trackers that show them."""
        self.event("eval", at_step=step, **numbers)
        for tracker in self.trackers:
            tracker.offer(step, {f"eval/{name}": value for name, value in {**numbers, **pictures}.items()})

    def event(self, event: str, **fields: Any) -> None:
        """Write a line that is no step: start, resume, save, eval, stop."""
        if self._file is not None:
            self._write({"event": event, "time": utc_now(), **fields})

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
        if self._file is not None:
            self._flush()
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        check_finite(line)
        self._unwritten += json.dumps(line, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "metrics.jsonl cannot be written (%s); lines wait in memory for the next try", error.strerror
                )
            self._warned = True
        else:
            self._warned = False


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that count, in the order of the file: the last of each step, and none that was cut off."""
    path = Path(path)
    with open_regular(path) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"{path} has more than {_LARGEST:,} bytes, too many for the lines of a run")
    *whole, _cut_off = text.split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(whole, 1):
        line = _parse(text)
        if line is None:
            logger.warning("%s:%d is no line of metrics and is left out", path, number)
        else:
            lines.append(line)
    last = {line["step"]: index for index, line in enumerate(lines) if "event" not in line}
    return [line for index, line in enumerate(lines) if "event" in line or last[line["step"]] == index]


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return line if isinstance(line.get("event"), str) or type(line.get("step")) is int else None


def _open(path: Path) -> int:
    """Open for appending, behind a whole line."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size = os.fstat(file).st_size
    start, tail = size, b""
    while start and b"\n" not in tail:
        start = max(0, start - _TAIL)
        tail = os.pread(file, size - start, start)
    rest = tail[tail.rfind(b"\n") + 1 :]
    if rest and _parse(rest) is not None:
        os.write(file, b"\n")  # only the line end is missing
    elif rest:
        os.ftruncate(file, size - len(rest))
        logger.warning("%s ended in the middle of a line: %d bytes are cut off", path, len(rest))
    return file
