"""A few processes for many tasks, with an end that can be trusted.

`multiprocessing.Pool` waits for ever when a worker is killed (out of memory, say), and `ProcessPoolExecutor` cannot
stop workers in the middle of a task. Here every worker has a pipe. The parent hands out tasks in order, one at a time,
collects reports and results, and notices a pipe that closes. After a failure no new task begins; those before the
failed one are waited for, so that of several bad records the first is reported, whatever the number of workers; then
all workers are ended. A worker whose parent is gone ends at its next report. Processes are spawned, so nothing is
inherited: no locks, no threads, no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Start = Callable[[Any], Callable[[Any, Callable[[Any], None]], Any]]


def run_tasks(
    start: Start, job: Any, tasks: Sequence[Any], workers: int, on_report: Callable[[Any], None]
) -> list[Any]:
    """Results of all tasks, in order. `start(job)` runs once per process and returns the function for tasks; both must be
    importable by name."""
    if min(workers, len(tasks)) <= 1:
        handle = start(job)
        return [handle(task, on_report) for task in tasks]
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(tasks))):
            pool.append(_Worker(context, start, job))
        return _drive(pool, tasks, on_report)
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    def __init__(self, context: Any, start: Start, job: Any):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start, job), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None

    def stop(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _drive(pool: list[_Worker], tasks: Sequence[Any], on_report: Callable[[Any], None]) -> list[Any]:
    results: list[Any] = [None] * len(tasks)
    failed: dict[int, BaseException] = {}
    following = 0
    while True:
        for worker in pool:
            if worker.task is None and following < len(tasks) and not failed:
                worker.task = following
                worker.pipe.send(tasks[following])
                following += 1
        busy = [worker for worker in pool if worker.task is not None]
        if failed and all(worker.task > min(failed) for worker in busy if worker.task is not None):
            raise failed[min(failed)]
        if not busy:
            return results
        for pipe in wait([worker.pipe for worker in busy]):
            worker = next(worker for worker in busy if worker.pipe is pipe)
            assert worker.task is not None
            try:
                what, value = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                failed[worker.task] = _death(worker)
                worker.task = None
                continue
            if what == "report":
                on_report(value)
                continue
            if what == "done":
                results[worker.task] = value
            else:
                kinds = {"ValueError": ValueError, "OSError": OSError}
                failed[worker.task] = kinds.get(what, RuntimeError)(value)
            worker.task = None


def _death(worker: _Worker) -> ChildProcessError:
    worker.process.join(10)
    code = worker.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    hint = "; most likely memory ran out: use fewer workers" if code == -signal.SIGKILL else ""
    return ChildProcessError(f"a worker (pid {worker.process.pid}) {how}{hint}")


def _serve(pipe: Connection, start: Start, job: Any) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each, there are as many workers as cores
    try:
        handle = None
        while True:
            task = pipe.recv()
            try:
                handle = handle or start(job)
                pipe.send(("done", handle(task, lambda value: pipe.send(("report", value)))))
            except (BrokenPipeError, EOFError):
                raise
            except ValueError as error:
                pipe.send(("ValueError", str(error)))
            except OSError as error:
                pipe.send(("OSError", str(error)))
            except BaseException:
                pipe.send(("crash", traceback.format_exc()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is done, or gone
