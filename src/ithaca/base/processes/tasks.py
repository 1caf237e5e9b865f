"""A few processes for many tasks, with an end that can be trusted.

`multiprocessing.Pool` waits for ever when a worker is killed (out of memory, say), and `ProcessPoolExecutor` cannot
stop workers in the middle of a task. Here every worker has a pipe (worker.py). The parent hands out tasks in order, one at a time,
collects reports and results, and notices a pipe that closes. After a failure no new task begins; those before the
failed one are waited for, so that of several bad records the first is reported, whatever the number of workers; then
all workers are ended. Workers are processes of their own, not forks, so nothing is inherited: no locks, no threads, no GPU.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from .worker import Worker, receive, send, stop

_WORD_SECONDS = 10.0  # for one whose pipe has ended to end itself

Start = Callable[[Any], Callable[[Any, Callable[[Any], None]], Any]]


def run_tasks(
    start: Start, job: Any, tasks: Sequence[Any], workers: int, on_report: Callable[[Any], None]
) -> list[Any]:
    """Results of all tasks, in order. `start(job)` runs once per process and returns the function for tasks; both must be
    importable by name."""
    if min(workers, len(tasks)) <= 1:
        handle = start(job)
        return [handle(task, on_report) for task in tasks]
    # one thread each, there are as many workers as cores
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    pool: list[Worker] = []
    try:
        for _ in range(min(workers, len(tasks))):
            pool.append(Worker("ithaca tasks", _serve, start, job, environ=environ))
        return _drive(pool, tasks, on_report)
    finally:
        stop(pool)


def _drive(pool: list[Worker], tasks: Sequence[Any], on_report: Callable[[Any], None]) -> list[Any]:
    results: list[Any] = [None] * len(tasks)
    failed: dict[int, BaseException] = {}
    busy: dict[Connection, tuple[Worker, int]] = {}
    idle, following = list(pool), 0
    while True:
        while idle and following < len(tasks) and not failed:
            worker = idle.pop(0)
            busy[worker.pipe] = (worker, following)
            with suppress(OSError):  # one that has died is noticed below
                send(worker.pipe, tasks[following])
            following += 1
        if failed and all(task > min(failed) for _, task in busy.values()):
            raise failed[min(failed)]
        if not busy:
            return results
        for pipe in wait(list(busy)):
            assert isinstance(pipe, Connection)
            worker, task = busy[pipe]
            try:
                what, value = receive(pipe)
            except (EOFError, ConnectionResetError):
                failed[task] = _death(worker)
                del busy[pipe]
                continue
            if what == "report":
                on_report(value)
                continue
            if what == "done":
                results[task] = value
            else:
                failed[task] = {"ValueError": ValueError, "OSError": OSError}.get(what, RuntimeError)(value)
            del busy[pipe]
            idle.append(worker)


def _death(worker: Worker) -> ChildProcessError:
    cause = worker.cause_of_death(_WORD_SECONDS)
    how = f"was {cause}" if cause.startswith("killed") else f"ended: {cause}"
    hint = "; most likely memory ran out: use fewer workers" if worker.process.status == -signal.SIGKILL else ""
    return ChildProcessError(f"a worker (pid {worker.process.pid}) {how}{hint}")


def _serve(pipe: Connection, start: Start, job: Any) -> None:
    """A worker's life, until the parent is done, or gone."""
    handle = None
    while True:
        task = receive(pipe)
        try:
            handle = handle or start(job)
            send(pipe, ("done", handle(task, lambda value: send(pipe, ("report", value)))))
        except (BrokenPipeError, EOFError):
            raise
        except ValueError as error:
            send(pipe, ("ValueError", str(error)))
        except OSError as error:
            send(pipe, ("OSError", str(error)))
        except BaseException:
            send(pipe, ("crash", traceback.format_exc()))
