"""The parts of the local launcher that deal with the operating system: processes, pipes, signals, cores."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from .blame import Sign
from .cause import End, Failure
from .memory import oom_kills
from .pulse import Beat


class Process(Protocol):
    """A worker's: of `subprocess`, or forked from a template."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int: ...


@dataclass
class Worker:
    rank: int
    process: Process
    report: int
    log: Path
    log_start: int
    stacks: int  # a file without a name, for its Python stacks
    end: End | None = None
    beat: Beat | None = None  # its last one
    failure: Failure | None = None
    heard: float = field(default_factory=time.monotonic)
    kills: int = field(default_factory=oom_kills)  # by the system, for want of memory, before it started
    _unread: bytes = b""

    def listen(self) -> None:
        """Read what it has said since."""
        with suppress(BlockingIOError):
            while data := os.read(self.report, 65536):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self.heard = time.monotonic()
            with suppress(ValueError, TypeError):  # whatever else writes there is not for us
                message = json.loads(line)
                if "beat" in message:
                    self.beat = Beat(**message["beat"])
                elif "failure" in message:
                    self.failure = Failure(**message["failure"])

    def sign(self, setup: float | None) -> Sign:
        state = b""
        with suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        who = f"rank {self.rank} (pid {self.process.pid})"
        return Sign(self.rank, who, self.heard, self.beat, state in (b"T", b"t"), setup)

    def look(self) -> bool:
        """Has it ended just now? If so, end what it left behind."""
        pid = self.process.pid
        if self.end or not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # before it is reaped: until then nobody else can have its number
        status = self.process.wait()
        self.listen()
        step = self.beat.step if self.beat else 0
        starved = status == -signal.SIGKILL and oom_kills() > self.kills
        self.end = End(self.rank, pid, status, self.log, "", self.failure, step, starved)
        return True

    def send(self, number: int, children: bool = False) -> None:
        if self.end is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if children else os.kill)(self.process.pid, number)


@dataclass
class Copy:
    """From a pipe of rank 0 to the terminal and to its log."""

    source: IO[bytes]
    terminal: int | None
    log: int

    def once(self, only_if_there: bool = False) -> bool:
        """Copy what is there. False at the end of the pipe, or when there is nothing and only_if_there."""
        try:
            data = os.read(self.source.fileno(), 65536)
        except BlockingIOError:
            return not only_if_there
        except OSError:
            data = b""
        if not data:
            return False
        with suppress(OSError):  # a full disk: the run will meet it where it matters
            os.write(self.log, data)
        while data and self.terminal is not None:
            try:
                data = data[os.write(self.terminal, data) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # `| head` has gone home; training goes on
                self.terminal = None
        return True

    def close(self) -> None:
        self.source.close()
        os.close(self.log)
