"""A call in a process of its own: what it allocates is gone when it ends, and what kills it kills nobody else.

The process is a fork of one that has done the imports (fork_server.py), so that a table of many rows pays for them once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any

from ..exits import code_of
from .fork_server import MODELS
from .worker import Worker, ready_template, receive, send, stop

_LOOK_SECONDS = 0.5  # between two looks whether it has died and left its pipe to a child of its own
_END_SECONDS = 10.0  # for one whose pipe has ended to end itself


@dataclass
class Ended:
    status: int | None  # exit code, or minus the signal; None: it took too long and was killed
    value: Any  # what the function returned, where the status is 0
    printed: str  # stdout and stderr


def run_apart(
    function: Callable[..., Any],
    *args: Any,
    environ: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    seconds: float = inf,
) -> Ended:
    """function(*args), both importable by name. environ: its variables, None = those here. preload: modules to import before the
    first fork; what it needs beside them it imports itself, every time."""
    environ = dict(os.environ if environ is None else environ)
    template = ready_template([*MODELS, *preload], environ)
    with tempfile.TemporaryFile() as printed:
        files = (printed.fileno(), printed.fileno())
        worker = Worker("ithaca case", _answer, function, args, environ=environ, template=template, files=files)
        try:
            status, value = _outcome(worker, time.monotonic() + seconds)
        finally:
            stop([worker])
        printed.seek(0)
        return Ended(status, value, printed.read().decode(errors="replace"))


def _outcome(worker: Worker, until: float) -> tuple[int | None, Any]:
    while not worker.pipe.poll(max(0.0, min(_LOOK_SECONDS, until - time.monotonic()))):
        if worker.process.ended():
            return worker.process.status, None
        if time.monotonic() >= until:
            return None, None
    try:
        return 0, receive(worker.pipe)
    except (EOFError, OSError):
        return worker.process.wait(_END_SECONDS), None


def _answer(pipe: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    code, value = 0, None
    try:
        value = function(*args)
    except SystemExit as left:
        print(left.code if isinstance(left.code, str) else "", file=sys.stderr, end="")
        code = code_of(left)
    except BaseException as error:
        traceback.print_exc()
        code = code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        send(pipe, value)  # at the end: who has heard it ends this process
    os._exit(code)
