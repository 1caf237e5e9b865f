"""A call in a process of its own: what comes back, and of what."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import psutil
import pytest

from ithaca.base.processes.apart import run_apart


def about(name: str) -> dict[str, Any]:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return {
        "variable": os.environ.get(name),
        "imported": "torch.distributed.fsdp" in sys.modules,
        "parent": os.getppid(),
    }


def large(count: int) -> bytes:
    return bytes(count)


def fail(text: str) -> None:
    raise ValueError(text)


def leave(code: int | str) -> None:
    raise SystemExit(code)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever() -> None:
    print("begun", flush=True)
    time.sleep(1e6)


def test_what_it_returns_and_prints():
    ended = run_apart(about, "HERE", environ={**os.environ, "HERE": "so"})
    assert ended.status == 0 and ended.printed == "to stdout\nto stderr\n"
    # a fork of one that has done the imports, and ours to wait for
    assert ended.value == {"variable": "so", "imported": True, "parent": os.getpid()}
    assert run_apart(about, "HERE").value["variable"] is None


def test_more_than_a_pipe_holds():
    assert run_apart(large, 10**7).value == bytes(10**7)


@pytest.mark.parametrize(
    ("function", "args", "status", "said"),
    [
        (fail, ("not like this",), 2, "ValueError: not like this"),
        (leave, (7,), 7, ""),
        (leave, ("for a reason",), 1, "for a reason"),
        (kill, (), -signal.SIGKILL, ""),
    ],
)
def test_how_it_ends(function: Any, args: tuple, status: int, said: str):
    ended = run_apart(function, *args)
    assert (ended.status, ended.value) == (status, None) and ended.printed.strip().endswith(said)


def test_one_that_takes_too_long_is_killed():
    ended = run_apart(wait_for_ever, seconds=3.0)
    assert (ended.status, ended.value) == (None, None)
    assert not [child for child in psutil.Process().children() if child.name() == "ithaca case"]
