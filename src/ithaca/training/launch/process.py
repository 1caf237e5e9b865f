"""A rank as its launcher sees it: its process, what it says, how it ended; and rank 0's output on its way to the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...base.processes.process import Process
from .cause import End, Failure
from .hang import Sign
from .heartbeat import Beat

GROUPS = Path("/sys/fs/cgroup")


def oom_kills(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> int:
    """How often the system has killed a process of our control group (a container, a Slurm job, a login session) because memory ran
    out. It leaves no message behind, only SIGKILL, but it counts. 0 where the count cannot be read."""
    for path in _counters(own, groups):
        with suppress(OSError, UnicodeDecodeError):
            if count := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(count[1])
    return 0


def _counters(own: Path, groups: Path) -> list[Path]:
    """Files that may hold the count: of this process's group, version 2 or 1; else of the root, as a container sees its own."""
    files = []
    with suppress(OSError, UnicodeDecodeError):
        for line in own.read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                files.append(groups / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    return [*files, groups / "memory.events", groups / "memory" / "memory.oom_control"]


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
        """Has it ended just now? If so, what it left behind is ended too."""
        if self.end or not self.process.ended():
            return False
        assert self.process.status is not None
        status = self.process.status
        self.listen()
        step = self.beat.step if self.beat else 0
        starved = status == -signal.SIGKILL and oom_kills() > self.kills
        self.end = End(self.rank, self.process.pid, status, self.log, "", self.failure, step, starved)
        return True


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
