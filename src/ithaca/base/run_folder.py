"""The run folder: where a run keeps what it makes. docs/reference/run_folder.md is the contract; only here are the names.

Two things need care. Two runs in one folder would mix their checkpoints, so a run claims its folder with a lock that the
operating system drops when the process dies: no stale locks to delete by hand. And status.json is read by others
while it is written, so it is replaced as a whole: a reader sees the old one or the new one, never half of one.

`flock` also works between machines on NFS (Linux 2.6.12 and later) and on Lustre mounted with `flock`; on a file system without
locks the claim fails with the reason.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fields import COUNT, OBJECT, TEXT, OrNull, one_of, shown, wrong
from .files import read_json, remove_halves, write_atomically

CONTRACT = 1
"""Version of the layout; in every status.json."""

log = logging.getLogger("ithaca")

STATES = ("starting", "running", "saving", "restarting", "stopped", "finished", "failed")
_ENDED = ("restarting", "stopped", "finished", "failed")
_STATUS = {
    "state": one_of(*STATES),
    **{f"{name}?": OrNull(TEXT) for name in ("time", "host", "checkpoint", "cause", "resume")},
    **{f"{name}?": OrNull(COUNT) for name in ("pid", "step", "steps", "attempts", "exit_code")},
    "best?": OrNull(OBJECT),
}


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def config(self) -> Path:
        """The resolved config: every field written out."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checked(self) -> Path:
        """Packed files whose SHA-256 was right, with their sizes and times: a resume does not read them again."""
        return self.path / "checked.json"

    @property
    def hub(self) -> Path:
        """Which commits the run's names on the Hub stand for: a resume goes on with those."""
        return self.path / "hub.json"

    @property
    def reference(self) -> Path:
        """Scores of the weights that the run began with, for objectives that compare with them: a folder for each data."""
        return self.path / "reference"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """A JSON file for each evaluation, step-N.json."""
        return self.path / "eval"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def stacks(self) -> Path:
        """Where ranks stood when one of them hung: rank-R.txt."""
        return self.path / "stacks"

    @property
    def wish(self) -> Path:
        """Whoever makes this file wants a checkpoint now; it goes when the checkpoint is there."""
        return self.path / "SAVE"

    @property
    def bad_batch(self) -> Path:
        """What was trained on when the loss was not finite."""
        return self.path / "bad_batch.json"

    @property
    def plan(self) -> Path:
        """What was predicted of the run."""
        return self.path / "plan.json"

    @property
    def about(self) -> Path:
        """What the run was made of at its newest start: the machine and its software, and the data."""
        return self.path / "about.json"

    @property
    def status(self) -> Path:
        """What the run is doing, or how it ended."""
        return self.path / "status.json"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the folder and those in it. What is there stays."""
        for folder in (self.path, self.checkpoints, self.logs):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ValueError(
                    f"{folder} cannot be a folder: a file is in the way; choose another run.folder"
                ) from None
            except OSError as error:
                raise ValueError(f"{folder} cannot be made ({error.strerror}); choose another run.folder") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"{self.path} cannot be written; choose another run.folder, or change its permissions")

    def check(self) -> None:
        """ValueError for what `create` and `claim` would refuse; makes nothing."""
        near = next(path for path in (self.path, *self.path.absolute().parents) if os.path.lexists(path))
        if not near.is_dir():
            raise ValueError(f"{near} cannot be a folder: a file is in the way; choose another run.folder")
        for folder in (near, *([self.logs] if self.logs.exists() else [])):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(f"{folder} cannot be written; choose another run.folder, or change its permissions")
        holder = self.holder()
        if holder is not None:
            raise ValueError(_in_use(self.path, holder))
        self.read_status()

    @contextmanager
    def claim(self) -> Iterator[int]:
        """Hold the folder for one run. ValueError with host and pid if another run has it. -> the open lock: a process that
        inherits it holds the folder too"""
        self.create()
        file = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                _lock(file)
            except BlockingIOError:
                raise ValueError(_in_use(self.path, _read_holder(file))) from None
            except OSError as error:
                raise ValueError(
                    f"{self.path} cannot be locked ({error.strerror}); put run.folder on a file system with locks"
                ) from None
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
            self._sweep()
            yield file
            self._sweep()
            os.ftruncate(file, 0)  # the file itself stays: removing it would let two runs lock two files of one name
        finally:
            os.close(file)  # drops the lock

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they replaced a file. With the folder held, nobody is at it."""
        for path in (self.config, self.plan, self.status, self.checked, self.hub, self.evaluations / "step-*.json"):
            remove_halves(path)

    def holder(self) -> dict[str, Any] | None:
        """Who has the folder now, or None; {} if somebody has it but the name is not readable. Takes nothing."""
        try:
            file = os.open(self.lock, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return _read_holder(file)
        finally:
            os.close(file)

    def write_status(self, state: str, **about: Any) -> None:
        """Replace status.json. about: step, steps, cause, exit_code, checkpoint, resume, ... (docs/reference/run_folder.md).

        A disk that is full costs the line, not the run: what the run does about its disk is decided where it saves."""
        assert state in STATES, f"{state} is not one of {STATES}"
        status = {
            "contract": CONTRACT,
            "state": state,
            "time": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            write_atomically(self.status, json.dumps({**status, **about}, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("%s could not be written (%s); it should say %s", self.status, error, state)

    def read_status(self) -> dict[str, Any] | None:
        """The last status, or None if there is none yet."""
        try:
            status = read_json(self.status, 1 << 20)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}; it was not written by ithaca: move it away") from None
        if not isinstance(status, dict) or type(status.get("contract")) is not int or status["contract"] != CONTRACT:
            version = status.get("contract") if isinstance(status, dict) else None
            raise ValueError(
                f"{self.status} has contract version {shown(version)}, this ithaca knows {CONTRACT}; use the ithaca that made the "
                "folder, or another run.folder"
            )
        if problem := wrong(status, _STATUS):
            raise ValueError(f"{self.status}: {problem}; it was not written by ithaca: move it away")
        return status


def unclean(status: dict[str, Any] | None) -> bool:
    """Whether this is the last status of a run that nobody holds any more and that did not say how it ended: all was killed."""
    return status is not None and status.get("state") not in _ENDED


def _lock(file: int) -> None:
    """Take the lock, or raise BlockingIOError. `holder` holds it for an instant just to ask, so one refusal proves nothing."""
    for _ in range(10):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _in_use(path: Path, holder: dict[str, Any]) -> str:
    who = "another process"
    if holder:
        who = f"pid {holder.get('pid')} on {holder.get('host')} (started {holder.get('started')})"
    return f"{path} is in use by {who}; wait for that run, stop it, or choose another run.folder"


def _read_holder(file: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        holder = json.loads(os.pread(file, 4096, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
