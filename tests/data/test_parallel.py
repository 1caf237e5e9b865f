"""The pool of packing workers: order, the first error, death, and nothing left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import psutil
import pytest

from ithaca.base.processes.tasks import run_tasks
from ithaca.data.progress import Progress


def start(job: Any):
    """Tasks: a number is squared; a text is something bad."""

    def handle(task: Any, report: Any) -> Any:
        report(1)
        if isinstance(task, int):
            return (task * task, os.getpid())
        if task.startswith("value"):
            raise ValueError(f"bad record: {task}")
        if task == "disk":
            raise OSError(28, "No space left on device")
        if task == "bug":
            raise KeyError("oops")
        os.kill(os.getpid(), signal.SIGKILL)

    return handle


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = psutil.Process().children()  # other tests may have some of their own
    yield
    assert not set(psutil.Process().children()) - {*before}


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int):
    reports: list[int] = []
    results = run_tasks(start, None, list(range(20)), workers, reports.append)
    assert [value for value, _ in results] == [i * i for i in range(20)] and len(reports) == 20
    assert (os.getpid() in {pid for _, pid in results}) == (workers == 1)


@pytest.mark.parametrize(
    ("tasks", "kind", "message"),
    [
        ([1, "disk", 2], OSError, "No space left on device"),
        ([1, "kill", 2], ChildProcessError, r"was killed by SIGKILL; most likely memory ran out: use fewer workers"),
        ([1, "bug", 2], RuntimeError, r"Traceback(.|\n)*KeyError: 'oops'"),
    ],
)
def test_failures(tasks: list[Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        run_tasks(start, None, tasks, 2, lambda report: None)


def test_of_several_failures_the_first_is_told_and_not_the_fastest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "ithaca.base.processes.tasks.wait", lambda pipes: wait(pipes[-1:])
    )  # the last that works is heard first
    with pytest.raises(ValueError, match="bad record: value 1"):
        run_tasks(start, None, ["value 1", "value 2", 1, 2], 2, lambda report: None)


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    with Progress("packing", 10_000_000, every=0.0) as progress:
        progress.add(2_500_000, 10, 1000)
        progress.add(7_500_000, 30, 3000)
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("packing:  25%, 2.5 of 10.0 MB, 10 documents, 1,000 tokens, ") and first.endswith(
        " s to go"
    )
    assert last.startswith("packing: 100%, 10.0 of 10.0 MB, 40 documents, 4,000 tokens, ") and last.endswith(" MB/s")
    assert second.split(" MB/s")[0].startswith("packing: 100%")


def test_progress_can_be_quiet(capsys: pytest.CaptureFixture[str]):
    with Progress("packing", 10, quiet=True, every=0.0) as progress:
        progress.add(5, 1, 1)
    assert capsys.readouterr().err == ""
