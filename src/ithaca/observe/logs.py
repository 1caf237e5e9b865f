"""Where messages go: everything into the rank's log file, warnings of rank 0 also onto the terminal, tracebacks into the file only.

    with log_to(folder, rank, display):
        logging.getLogger("ithaca.training").info("...")

    except Exception as error:                      # around it, in the command line
        print(explain(error, folder.log(rank)))     # one screen: what, where, what to do, where the traceback is

Any module of ithaca logs with `logging.getLogger(__name__)` and needs no set-up of its own. Python's warnings and the warnings of
other libraries take the same way, and so do exceptions in threads, which would else be printed across the display.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ..base.run_folder import RunFolder
from .display import Display

logger = logging.getLogger(__name__)

_SCREEN = 18  # lines of an explanation
_FILE_ONLY = {"file_only": True}


@contextmanager
def log_to(folder: RunFolder, rank: int, display: Display | None = None) -> Iterator[Path]:
    """Log to logs/rank-R.log for as long as the block runs; an exception that leaves it is written there with its traceback.

    display: where warnings of rank 0 are shown; None = the standard error. -> path of the log file
    """
    path = folder.log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [_LogFile(path)]
    if rank == 0:
        handlers.append(_Terminal(display))
    root, own = logging.getLogger(), logging.getLogger("ithaca")
    before, thread_hook = own.level, threading.excepthook
    for handler in handlers:
        root.addHandler(handler)
    own.setLevel(logging.INFO)  # others speak up from WARNING on: the level of the root
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    try:
        yield path
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            logger.error("the run ends with %s", type(error).__name__, exc_info=True, extra=_FILE_ONLY)
        raise
    finally:
        threading.excepthook = thread_hook
        logging.captureWarnings(False)
        own.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class _LogFile(logging.FileHandler):
    """2026-11-15T12:00:00Z WARNING ithaca.observe.metrics: message"""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        form = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        form.converter = time.gmtime
        self.setFormatter(form)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is told about once, by metrics.jsonl; logging would print a traceback for every line."""

    def close(self) -> None:
        with suppress(OSError):  # what is left in the buffer does not fit either
            super().close()


class _Terminal(logging.Handler):
    """One line of words per warning; tracebacks are in the file."""

    def __init__(self, display: Display | None) -> None:
        super().__init__(logging.WARNING)
        self._display = display
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if (
            record.name == "py.warnings"
        ):  # "path:line: Category: text", and then the source line, which tells a user nothing
            text = text.splitlines()[0]
        text = f"{record.levelname.lower()}: {text}"
        if self._display is not None:
            self._display.warn(text)
        else:
            print(text, file=sys.stderr, flush=True)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is SystemExit or failed.exc_value is None:
        return
    name = failed.thread.name if failed.thread else "a thread"
    trace: tuple[type[BaseException], BaseException, TracebackType | None] = (
        failed.exc_type, failed.exc_value, failed.exc_traceback,
    )  # fmt: skip
    logger.error("thread %r ended with %s: %s", name, failed.exc_type.__name__, failed.exc_value, exc_info=trace)


def explain(error: BaseException, log_path: str | os.PathLike[str]) -> str:
    """An error on one screen: its message, its causes, where it came from, what may help, and where the whole traceback is.

    ValueError and OSError are how ithaca says that a request cannot be carried out: their words are enough. Anything else is named
    and placed, for a bug report.
    """
    lines = _message(error)
    expected = isinstance(error, (ValueError, OSError, KeyboardInterrupt))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None:
        lines.append(f"caused by {type(cause).__name__}: {(_words(cause) or [''])[0]}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if not expected:
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            lines.append(f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
    tail = [f"help: {_hint(error)}"] if _hint(error) else []
    tail.append(f"traceback: {os.fspath(log_path)}")
    room = _SCREEN - len(tail)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines in the log"]
    return "\n".join([*lines, *tail])


def _words(error: BaseException) -> list[str]:
    return [line.rstrip() for line in str(error).strip().splitlines()]


def _message(error: BaseException) -> list[str]:
    if isinstance(error, KeyboardInterrupt):
        return ["stopped by Ctrl-C"]
    words = [line if len(line) <= 400 else line[:400] + "..." for line in _words(error)]
    if isinstance(error, (ValueError, OSError)) and words:
        return words
    name = type(error).__name__
    return [f"{name}: {words[0]}", *words[1:]] if words else [name]


def _hint(error: BaseException) -> str | None:
    kind = type(error).__name__
    if kind == "OutOfMemoryError" or (isinstance(error, RuntimeError) and "CUDA out of memory" in str(error)):
        return (
            "the GPU has too little memory for this stack; lower stack.heads_per_stage or stack.tile, raise stack.ulysses, or "
            "use stack.store host or disk"
        )
    if isinstance(error, MemoryError):
        return "the host has too little memory; use stack.store disk, or fewer processes on this host"
    if isinstance(error, (ValueError, OSError, KeyboardInterrupt)):
        return None
    return "if this looks like a bug, report it with the log file and the output of: ithaca doctor"
