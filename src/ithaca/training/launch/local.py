"""`watch`: one process per worker on this machine, watched until the last has ended: one attempt of a run.

The workers run the same command as the launcher did, with the variables that torchrun would set (environment.py), so one
code path serves both. Where a template is given they are forks of it, which have done their imports
(base/processes/fork_server.py). The launcher itself stays small: no torch, no threads, one loop.

Meeting point    The launcher binds a free port on loopback and hands the listening socket to rank 0: nobody can take the port
                 between choosing and using it. An attempt has a socket and a store of its own, so it never finds addresses of
                 the dead.
Output           All ranks write to their logs. Rank 0 also to where the launcher writes: if that is a terminal, its stdout is the
                 terminal itself, live, and its stderr goes to the log only, so that no library tears the display; if it
                 is none, both pass through the launcher into the log and on.
No orphans       A worker asks the kernel to be killed when the launcher dies (`tie_to_launcher`). Each worker leads a
                 session of its own, so that what it started (data workers) can be found and ended after it.
Signals          Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are passed on once, to the workers only and not to their children; then the
                 launcher waits: workers save and end with 75. The second signal ends everything at once. A worker that ends
                 with 75 alone had a signal of its own before the first step: the others are then asked too.
Failure          One cause first (cause.py). The other workers get SIGTERM, and SIGKILL after a grace: without the failed rank
                 they would wait in a collective for ever.
Hang             A rank that stands in a section for longer than its limit (heartbeat.py), or gives no sign of life, ends the
                 attempt: the one that hangs is named (hang.py), and the Python stacks of all ranks are written down.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...base import exits
from ...base.processes.fork_server import Template
from ...base.processes.fork_server import start as start_process
from ...base.processes.process import adopting_orphans, reap, signal_name
from ...base.processes.system import DUMP, LAUNCHER, catch_signals, say, usable_cores
from ...config.schema import Timeouts
from .cause import End, describe, last_line, root
from .environment import LISTENER, REPORT, STACKS
from .hang import describe_hang, hanging_ranks
from .process import Copy, Worker

LOOPBACK = "127.0.0.1"
SETTLE_SECONDS = 0.5  # after the first failure, for the others to end and to say why
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
TOGETHER_SECONDS = 2.0  # in which ranks that stop together have all ended
STRAGGLING_SECONDS = 60.0  # in which the last of them may close its trackers
DUMP_SECONDS = 3.0  # for ranks to write down their stacks
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Outcome:
    code: int
    cause: str | None = None
    again: bool = False  # whether another attempt may succeed
    step: int = 0  # the furthest that a rank was in


def run_local(
    command: Sequence[str],
    *,
    workers: int,
    logs: Path,
    environ: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run `command` once as ranks 0..workers-1 of a job on this machine; return the exit code (docs/reference/run_folder.md).

    logs: folder for rank-R.log, which are appended to. The cause of a failure goes to stderr.
    """
    outcome = watch(command, workers=workers, logs=logs, environ=environ, grace=grace)
    if outcome.cause:
        show(outcome.cause)
    return outcome.code


def show(cause: str) -> None:
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a display that was killed has left the cursor hidden
    say(cause)


def watch(
    command: Sequence[str],
    *,
    workers: int,
    logs: Path,
    environ: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    signals: list[int] | None = None,
    timeouts: Timeouts | None = None,
    stacks: Path | None = None,
    inherit: Sequence[int] = (),
    listening: bool = False,
    template: Template | None = None,
    resumes: bool = True,
) -> Outcome:
    """One attempt: start, watch, end. Prints nothing about a failure, so that a caller may start another attempt.

    signals: those that have arrived, where the caller collects them. timeouts: when a rank hangs; stacks: folder for its stacks.
    inherit: open files that every worker gets too. listening: workers call `stop.listen`, and may start with signals blocked.
    template: of this command, kept for the next attempt; its workers are listening. resumes: workers save when asked to stop.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        if signals is None:
            signals = opened.enter_context(catch_signals(PASSED_ON))
        opened.enter_context(adopting_orphans())  # what a dead worker leaves behind is reaped here
        run = _Run(workers, grace, signals, timeouts, stacks, list(inherit), listening, template, resumes)
        opened.callback(run.kill)
        run.start(command, logs, os.environ if environ is None else environ)
        return run.watch()


@dataclass
class _Run:
    world: int
    grace: float
    signals: list[int]  # that have arrived
    timeouts: Timeouts | None
    stacks: Path | None
    inherit: list[int]
    listening: bool
    template: Template | None
    resumes: bool = True
    workers: list[Worker] = field(default_factory=list)
    streams: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    passed_on: int | None = None
    failed: list[End] = field(default_factory=list)  # by themselves, not because we ended them
    failed_at: float | None = None
    asked: bool = False  # the others to end
    stopped_at: float | None = None  # when the first worker had ended with 75
    hung: str | None = None
    awake: float = field(default_factory=time.monotonic)  # when this loop ran last

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
            template = self._prepared({**common, "RANK": "0", "LOCAL_RANK": "0"}, logs / "rank-0.log")
            for rank in range(self.world):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                named = {LISTENER: listener.fileno()} if rank == 0 else {}
                self.workers.append(
                    self._start_one(command, rank, logs / f"rank-{rank}.log", variables, named, template)
                )

    def _prepared(self, environ: dict[str, str], log: Path) -> Template | None:
        if self.template is None:
            return None
        seconds = None if self.timeouts is None else self.timeouts.setup
        return self.template if self.template.prepare(environ, log, self.signals, seconds) else None

    def _start_one(
        self, command: Sequence[str], rank: int, log: Path, environ: dict[str, str], named: dict[str, int],
        template: Template | None,
    ) -> Worker:  # fmt: skip
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        stacks = os.memfd_create(f"stacks-{rank}")
        named = {**named, REPORT: writing, STACKS: stacks}
        with ExitStack() as ours, open(log, "ab") as file:
            ours.callback(os.close, writing)
            start, out, err = file.tell(), file.fileno(), file.fileno()
            if rank == 0 and os.isatty(1):
                out = 1
            elif rank == 0:
                out, err = (self._copied(terminal, log, ours) for terminal in (1, 2))
            process = start_process(
                command, environ, f"ithaca rank {rank}", named=named, files=[out, err, *self.inherit], template=template,
                listening=self.listening,
            )  # fmt: skip
        return Worker(rank, process, reading, log, start, stacks)

    def _copied(self, terminal: int, log: Path, ours: ExitStack) -> int:
        """The end to write to of a pipe that is copied to the terminal and to the log. It is closed here with `ours`."""
        reading, writing = os.pipe()
        ours.callback(os.close, writing)
        os.set_blocking(reading, False)
        copy = Copy(os.fdopen(reading, "rb", 0), terminal, os.open(log, os.O_WRONLY | os.O_APPEND))
        self.streams.register(copy.source, selectors.EVENT_READ, copy)
        return writing

    def watch(self) -> Outcome:
        while not all(worker.end for worker in self.workers):
            self._wait(0.05)
            for worker in self.workers:
                if worker.look():
                    self._judge(worker)
                elif worker.end is None:
                    worker.listen()
                else:
                    reap(worker.process.pid)
            if self._pass_on_signals():
                return Outcome(128 + self.signals[-1], f"{signal_name(self.signals[-1])} came again: stopped at once")
            self._ask_others_to_stop()
            self._end_others()
            self._look_for_hangs()
        self._drain()
        return self._outcome()

    def _wait(self, seconds: float) -> None:
        """Pass on what rank 0 says meanwhile."""
        if not self.streams.get_map():
            time.sleep(seconds)
            return
        for key, _ in self.streams.select(seconds):
            if not key.data.once():
                self.streams.unregister(key.fileobj).data.close()

    def _judge(self, worker: Worker) -> None:
        assert worker.end is not None
        if worker.end.status == exits.STOPPED:
            self.stopped_at = self.stopped_at or time.monotonic()
            if not worker.end.step:  # it left before its first step; without it the others have none either
                self.failed_at = self.failed_at or time.monotonic()
        if worker.end.status in (exits.DONE, exits.STOPPED) or self.asked:
            return
        self.failed.append(worker.end)
        self.failed_at = self.failed_at or time.monotonic()

    def _ask_others_to_stop(self) -> None:
        """Ranks that stop do so together; one that has not come along by then never will."""
        if self.stopped_at is None or self.asked:
            return
        since = time.monotonic() - self.stopped_at
        if since > TOGETHER_SECONDS and self.passed_on is None:
            self.passed_on = signal.SIGTERM
            for worker in self.workers:
                worker.process.send(signal.SIGTERM)
        if since > STRAGGLING_SECONDS:
            self.asked = True
            for worker in self.workers:
                worker.process.send(signal.SIGKILL, children=True)

    def _look_for_hangs(self) -> None:
        now, before = time.monotonic(), self.awake
        self.awake = now
        if self.timeouts is None or self.asked or self.failed:
            return
        running = [worker for worker in self.workers if worker.end is None]
        if now - before > 5.0:  # we were stopped ourselves, or the machine slept: give everybody time to be heard again
            for worker in running:
                worker.heard += now - before
            return
        signs = [worker.sign(self.timeouts.setup) for worker in running]
        silent = [sign for sign in signs if sign.silent(now, self.timeouts.silence)]
        if not silent and not any(sign.late(now) for sign in signs):
            return
        hanging = silent or hanging_ranks(signs, now)
        self.asked = True
        self.hung = describe_hang(hanging, now, self.world, bool(silent))
        if self.stacks is not None:
            self.hung += f"\n  stacks of all ranks: {self.stacks}"
            self._write_stacks(self.stacks, running)
        for worker in running:
            worker.process.send(signal.SIGKILL, children=True)

    def _write_stacks(self, folder: Path, running: list[Worker]) -> None:
        """Of every rank that can still say where it is: those that are stopped wake up for it."""
        for worker in running:
            if worker.beat is not None:  # before its first sign of life the signal would kill it
                worker.process.send(DUMP)
                worker.process.send(signal.SIGCONT)
        until = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < until and not all(os.fstat(worker.stacks).st_size for worker in running):
            self._wait(0.05)
        self._wait(0.2)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for worker in running:
                size = os.fstat(worker.stacks).st_size
                about = f"rank {worker.rank}, pid {worker.process.pid}: {worker.beat}\n\n"
                text = os.pread(worker.stacks, size, 0) or b"no answer: its Python stack is not known\n"
                (folder / f"rank-{worker.rank}.txt").write_bytes(about.encode() + text)

    def _pass_on_signals(self) -> bool:
        """True: a second one has come."""
        if not self.signals:
            return False
        if self.passed_on is None:
            self.passed_on = self.signals[0]
            do = "save and stop" if self.resumes else "stop"
            say(f"{signal_name(self.passed_on)}: {self.world} workers {do}; once more stops them at once")
            for worker in self.workers:
                worker.process.send(signal.SIGTERM if self.passed_on == signal.SIGHUP else self.passed_on)
        return len(self.signals) > 1

    def _end_others(self) -> None:
        if self.failed_at is None:
            return
        since = time.monotonic() - self.failed_at
        if since > SETTLE_SECONDS and not self.asked:
            self.asked = True
            for worker in self.workers:
                worker.process.send(signal.SIGTERM)
        if since > SETTLE_SECONDS + self.grace:
            for worker in self.workers:
                worker.process.send(signal.SIGKILL, children=True)

    def _outcome(self) -> Outcome:
        step = max((worker.beat.step for worker in self.workers if worker.beat), default=0)
        if self.hung is not None:
            return Outcome(exits.HANG, self.hung, True, step)
        codes = {worker.end.status for worker in self.workers if worker.end}
        if not self.failed:
            return Outcome(exits.STOPPED if exits.STOPPED in codes else exits.DONE, step=step)
        first = root(self.failed)
        if exits.STOPPED in codes and first.failure is not None and first.failure.from_peers:
            return Outcome(exits.STOPPED, step=step)  # they missed the one that had left
        for worker in self.workers:
            if worker.end is first:
                first.last_line = last_line(worker.log, worker.log_start)
        if self.passed_on is not None and first.status in (-self.passed_on, 128 + self.passed_on, -signal.SIGTERM):
            return Outcome(
                128 + self.passed_on, f"{signal_name(self.passed_on)} ended the run before it could save", step=step
            )
        return Outcome(first.code, describe(self.failed, self.world), first.again, step)

    def _drain(self) -> None:
        """What rank 0 said last; without waiting for an end of file, which a process it left behind may hold off."""
        for key in list(self.streams.get_map().values()):
            while key.data.once(only_if_there=True):
                pass

    def kill(self) -> None:
        for worker in self.workers:
            worker.process.send(signal.SIGKILL, children=True)
        for worker in self.workers:
            worker.process.wait()
            reap(worker.process.pid, 1.0)
            os.close(worker.report)
            os.close(worker.stacks)
        self._drain()
        for key in list(self.streams.get_map().values()):
            key.data.close()
        self.streams.close()
