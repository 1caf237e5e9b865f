"""Where checkpoints lie. Everything else in storage/ reads, lists, writes and removes through a `Place`.

A checkpoint has an address, a `Path`: `FOLDER/step-N` once it is published, `FOLDER/.step-N.SAVE.tmp` while it is written, with its
files below. For `LocalPlace` the address is the folder on disk. Another place may keep the bytes anywhere, under any layout, if it
keeps these promises:

    whole or absent   what `create` writes is durable once `finish` returns; `publish` makes a draft a checkpoint at once, and
                      only then is it listed as one; a line (`RUN`, `LATEST`, `BEST`) is the old one or the new one
    gone at once      `remove` makes a checkpoint vanish as one before any of its bytes go, so a reader that stumbles can ask `has`
    regular           `open` gives what was written, never waits for a pipe, and says so if something else is there

`place_of` chooses by the form of a folder. A store of your own is a module with a `Place` and a row in `PLACES`;
tests/storage/test_place.py has one that is neither folders nor renames. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ..base.files import kind_of, naming, open_regular, remove_halves, sync, write_atomically
from .digest import BLOCK

log = logging.getLogger("ithaca")

# lines: which checkpoint is the newest, which the best (eval.keep_best), whose checkpoints these are
LATEST, BEST, RUN = "LATEST", "BEST", "RUN"
_PUBLISHED = re.compile(r"step-(\d{1,18})$")
_ADDRESS = re.compile(r"step-\d{1,18}$|\.step-\d+\..*\.tmp$")
_EARLY = 8  # blocks between two flushes where writing is not direct
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Stored:
    """A file of a checkpoint, as it lies there."""

    size: int
    modified: int | None  # nanoseconds; another than when it was written: somebody was at it
    kind: str = ""  # what it is, in words, if it is not a regular file


class Sink(Protocol):
    """A file that is being written, in blocks (digest.py)."""

    def write(self, block: memoryview, number: int) -> None:
        """Block `number` of the file; the last may be shorter. From any thread, in any order."""
        ...

    def finish(self) -> int:
        """All blocks have come: make them durable. -> the time of the file, as `Stored.modified` will have it"""
        ...

    def close(self) -> None: ...


class Place(Protocol):
    """The checkpoints of one run. Paths are addresses below `folder`. What fails raises OSError."""

    folder: Path

    def __init__(self, folder: Path) -> None: ...

    @classmethod
    def takes(cls, folder: Path) -> bool:
        """Whether a folder is of this kind, by its form: its name, or what lies in it."""
        ...

    # -- look

    def has(self, path: Path) -> bool:
        """Whether the folder itself, or a checkpoint in it, is there, as this process sees it."""
        ...

    def entries(self) -> list[Path]:
        """Checkpoints and drafts, whole or not, in any order; none if there is no folder."""
        ...

    def files(self, path: Path) -> dict[str, Stored]:
        """What a checkpoint or draft holds, by name."""
        ...

    def open(self, file: Path) -> BinaryIO:
        """For reading, seekable. FileNotFoundError if it is not there, ValueError if it is not a regular file."""
        ...

    # -- write: one process begins, writes lines and publishes, all ranks create

    def room(self) -> int:
        """Bytes that may still be written; OSError if none may. The folder need not be there yet."""
        ...

    def begin(self, draft: Path) -> None:
        """Make room for the files of a draft, and the folder if it is not there."""
        ...

    def create(self, file: Path) -> Sink: ...

    def write_line(self, file: Path, text: str) -> None:
        """A file of the folder itself, replaced as a whole."""
        ...

    def publish(self, draft: Path, target: Path) -> None:
        """A draft becomes the checkpoint `target`, at once and durably; a damaged one of that name goes."""
        ...

    # -- remove: only for whoever holds the run folder

    def remove(self, path: Path) -> None:
        """A checkpoint, which is none from the first moment on; or a draft."""
        ...

    def sweep(self) -> None:
        """Remove what lines have left that were being replaced when a process was killed."""
        ...


class LocalPlace:
    """Folders on a file system that all ranks see. Publishing and removing are renames; their folder is flushed to disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def takes(cls, folder: Path) -> bool:
        return True

    def has(self, path: Path) -> bool:
        return path.is_dir()

    def entries(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if is_address(path) and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def files(self, path: Path) -> dict[str, Stored]:
        return {file.name: _stored(file) for file in path.iterdir()}

    def open(self, file: Path) -> BinaryIO:
        return open_regular(file)

    def room(self) -> int:
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
        return shutil.disk_usage(there).free

    def begin(self, draft: Path) -> None:
        draft.mkdir(parents=True)

    def create(self, file: Path) -> Sink:
        return DirectFile(file)

    def write_line(self, file: Path, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text + "\n")
        sync(self.folder)

    def publish(self, draft: Path, target: Path) -> None:
        sync(draft)  # the names of its files; their bytes are on disk
        aside = None
        if target.exists():  # damaged, or the save had been refused
            aside = draft.with_name(f"{draft.name.removesuffix('.tmp')}-damaged.tmp")
            log.warning("replacing damaged checkpoint %s", target)
            target.rename(aside)
        draft.rename(target)
        sync(self.folder)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self, path: Path) -> None:
        if step_of(path) is not None:
            hidden = path.with_name(f".{path.name}.pruned.tmp")
            path.rename(hidden)  # at once: a half-deleted folder must not look like a checkpoint
            path = hidden
        shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        for name in (LATEST, BEST, RUN):
            remove_halves(self.folder / name)


PLACES: list[type[Place]] = [LocalPlace]
"""Kinds of places; the first that takes a folder has it."""


def place_of(path: Path) -> Place:
    """Of a folder of checkpoints, or of a checkpoint or draft in one."""
    folder = path.parent if is_address(path) else path
    return next(kind(folder) for kind in PLACES if kind.takes(folder))


def is_address(path: Path) -> bool:
    """Whether this is the name of a checkpoint or a draft."""
    return _ADDRESS.match(path.name) is not None


def step_of(path: Path) -> int | None:
    """The step in the name of a published checkpoint; None for any other name."""
    match = _PUBLISHED.match(path.name)
    return int(match.group(1)) if match else None


def _stored(file: Path) -> Stored:
    try:
        status = file.stat()
    except OSError:  # the kind says why
        return Stored(0, None, kind_of(file))
    kind = "" if stat.S_ISREG(status.st_mode) else kind_of(file)
    return Stored(status.st_size, status.st_mtime_ns, kind)


class DirectFile:
    """A new file, written past the page cache (O_DIRECT) where the file system can: the kernel then copies nothing, which costs a
    third of a core's time otherwise (measured: docs/developer/log.md), and a checkpoint pushes nothing else out of the page cache.
    Direct writes need aligned memory, places and sizes; blocks are, and the last, odd piece goes the usual way. Where a file
    system has no direct writes, all of it goes the usual way, flushed early instead of leaving everything to the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file, self._direct = os.open(path, flags | _DIRECT, 0o666), bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what file systems without direct writes say
                raise
            self._file, self._direct = os.open(path, flags, 0o666), False

    def write(self, block: memoryview, number: int) -> None:
        offset = number * BLOCK
        if block.nbytes != BLOCK and self._direct:
            self._leave_direct()
        with naming(self.path):
            while block:
                direct = self._direct  # before the call: another thread may change it meanwhile
                try:
                    count = os.pwrite(self._file, block, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    self._leave_direct()  # open allowed it, the write does not; or a short write has left an odd rest
                    continue
                block, offset = block[count:], offset + count
            if not self._direct and number % _EARLY == _EARLY - 1:
                os.fdatasync(self._file)

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)
        self._direct = False  # second: whoever reads it must be able to rely on it

    def finish(self) -> int:
        with naming(self.path):
            os.fsync(self._file)
            return os.fstat(self._file).st_mtime_ns

    def close(self) -> None:
        os.close(self._file)
