"""`run_local`: one process per worker on this machine, watched until the last has ended.

The workers run the same command as the launcher did, with the variables that torchrun would set (environment.py), so one
code path serves both. The launcher itself stays small: no torch, no threads, one loop.

Meeting point    The launcher binds a free port on loopback and hands the listening socket to rank 0: nobody can take the port
                 between choosing and using it. A new run has a new socket, so no address of a dead run is ever found.
Output           All ranks write to their logs. Rank 0 also to where the launcher writes: if that is a terminal, its stdout is the
                 terminal itself, live, and its stderr goes to the log only, so that no library tears the display; if it
                 is none, both pass through the launcher into the log and on.
No orphans       A worker asks the kernel to be killed when the launcher dies (`tie_to_launcher`). Each worker leads a
                 session of its own, so that what it started (data workers) can be found and ended after it.
Signals          Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are passed on once, to the workers only and not to their children; then the
                 launcher waits: workers save and end with 75. The second signal ends everything at once.
Failure          One cause first (cause.py). The other workers get SIGTERM, and SIGKILL after a grace: without the failed rank
                 they would wait in a collective for ever.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import exits
from .cause import End, describe, last_line, root
from .environment import LAUNCHER, LISTENER, REPORT
from .process import Copy, Worker, catch_signals, say, usable_cores

LOOPBACK = "127.0.0.1"
SETTLE_SECONDS = 0.5  # after the first failure, for the others to end and to say why
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Outcome:
    code: int
    cause: str | None = None


def run_local(
    command: Sequence[str],
    *,
    workers: int,
    logs: Path,
    environ: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run `command` as ranks 0..workers-1 of a job on this machine; return the exit code (docs/run_folder.md).

    logs: folder for rank-R.log, which are appended to. The cause of a failure goes to stderr.
    """
    outcome = watch(command, workers=workers, logs=logs, environ=environ, grace=grace)
    if outcome.cause:
        if os.isatty(1):
            with suppress(OSError):
                os.write(1, b"\x1b[?25h")  # a display that was killed has left the cursor hidden
        say(outcome.cause)
    return outcome.code


def watch(
    command: Sequence[str],
    *,
    workers: int,
    logs: Path,
    environ: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
) -> Outcome:
    """One attempt: start, watch, end. Prints nothing about a failure, so that a caller may start another attempt."""
    logs.mkdir(parents=True, exist_ok=True)
    with catch_signals(PASSED_ON) as signals, ExitStack() as opened:
        run = _Run(workers, grace, signals)
        opened.callback(run.kill)
        run.start(command, logs, os.environ if environ is None else environ)
        return run.watch()


@dataclass
class _Run:
    world: int
    grace: float
    signals: list[int]  # that have arrived
    workers: list[Worker] = field(default_factory=list)
    streams: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    passed_on: int | None = None
    failed: list[End] = field(default_factory=list)  # by themselves, not because we ended them
    failed_at: float | None = None
    asked: bool = False  # the others to end

    def start(self, command: Sequence[str], logs: Path, environ: Mapping[str, str]) -> None:
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        common = {
            **environ,
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(listener.getsockname()[1]),
            LAUNCHER: str(os.getpid()),
            "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // self.world))),
            "PYTHONUNBUFFERED": "1",  # lines appear when they are printed, and the last words of a killed rank are kept
            "PYTHONFAULTHANDLER": environ.get("PYTHONFAULTHANDLER", "1"),  # where a crash in C happened
        }
        with listener:
            for rank in range(self.world):
                mine = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                inherited = []
                if rank == 0:
                    mine[LISTENER] = str(listener.fileno())
                    inherited = [listener.fileno()]
                self.workers.append(self._start_one(command, rank, logs / f"rank-{rank}.log", mine, inherited))

    def _start_one(
        self, command: Sequence[str], rank: int, log: Path, environ: dict[str, str], inherited: list[int]
    ) -> Worker:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        with open(log, "ab") as file:
            start = file.tell()
            out, err = (None, file) if os.isatty(1) else (subprocess.PIPE, subprocess.PIPE)
            process = subprocess.Popen(
                list(command),
                env={**environ, REPORT: str(writing)},
                stdin=subprocess.DEVNULL,
                stdout=file if rank else out,
                stderr=file if rank else err,
                pass_fds=[*inherited, writing],
                start_new_session=True,
            )
        os.close(writing)
        for stream, terminal in ((process.stdout, 1), (process.stderr, 2)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self.streams.register(
                    stream, selectors.EVENT_READ, Copy(stream, terminal, os.open(log, os.O_WRONLY | os.O_APPEND))
                )
        return Worker(rank, process, reading, log, start)

    def watch(self) -> Outcome:
        while not all(worker.end for worker in self.workers):
            if self.streams.get_map():
                for key, _ in self.streams.select(0.05):
                    if not key.data.once():
                        self.streams.unregister(key.fileobj).data.close()
            else:
                time.sleep(0.05)
            for worker in self.workers:
                if worker.look():
                    self._judge(worker)
            if self._pass_on_signals():
                return Outcome(128 + self.signals[-1], f"{_name(self.signals[-1])} came again: stopped at once")
            self._end_others()
        self._drain()
        return self._outcome()

    def _judge(self, worker: Worker) -> None:
        assert worker.end is not None
        if worker.end.status in (exits.DONE, exits.STOPPED) or self.asked:
            return
        self.failed.append(worker.end)
        self.failed_at = self.failed_at or time.monotonic()

    def _pass_on_signals(self) -> bool:
        """True: a second one has come."""
        if not self.signals:
            return False
        if self.passed_on is None:
            self.passed_on = self.signals[0]
            say(f"{_name(self.passed_on)}: {self.world} workers save and stop; once more stops them at once")
            for worker in self.workers:
                worker.send(signal.SIGTERM if self.passed_on == signal.SIGHUP else self.passed_on)
        return len(self.signals) > 1

    def _end_others(self) -> None:
        if self.failed_at is None:
            return
        since = time.monotonic() - self.failed_at
        if since > SETTLE_SECONDS and not self.asked:
            self.asked = True
            for worker in self.workers:
                worker.send(signal.SIGTERM)
        if since > SETTLE_SECONDS + self.grace:
            for worker in self.workers:
                worker.send(signal.SIGKILL, children=True)

    def _outcome(self) -> Outcome:
        if not self.failed:
            codes = {worker.end.status for worker in self.workers if worker.end}
            return Outcome(exits.STOPPED if exits.STOPPED in codes else exits.DONE)
        first = root(self.failed)
        for worker in self.workers:
            if worker.end is first:
                first.last_line = last_line(worker.log, worker.log_start)
        if self.passed_on is not None and first.status in (-self.passed_on, 128 + self.passed_on, -signal.SIGTERM):
            return Outcome(128 + self.passed_on, f"{_name(self.passed_on)} ended the run before it could save")
        code = first.status if first.status in exits.TABLE else exits.LOST
        return Outcome(code, describe(self.failed, self.world))

    def _drain(self) -> None:
        """What rank 0 said last; without waiting for an end of file, which a process it left behind may hold off."""
        for key in list(self.streams.get_map().values()):
            while key.data.once(only_if_there=True):
                pass

    def kill(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGKILL, children=True)
        for worker in self.workers:
            if worker.end is None:
                worker.process.wait()
            os.close(worker.report)
        self._drain()
        for key in list(self.streams.get_map().values()):
            key.data.close()
        self.streams.close()


def _name(number: int) -> str:
    return signal.Signals(number).name
