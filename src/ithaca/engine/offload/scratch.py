"""The scratch file of the disk store, and which of its bytes are free.

The file has no name (O_TMPFILE, or unlinked as soon as it is open), so nothing is left behind by a crash. Space is
allocated before it is written, so a full disk shows in put and not in a thread. Freed extents are reused by later puts:
the file is as large as the most that was kept at once.

Reads and writes go past the page cache (O_DIRECT) where the file system allows: cached pages would compete with the
host memory the disk store is meant to spare. tmpfs is memory: a scratch folder on it saves nothing.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import os
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from .host import HostBuffer
from .store import human_bytes

BLOCK = 4096  # direct I/O wants addresses, offsets and lengths in multiples of this

REMEDY = "choose another folder with scratch=..., or use store='host'"


class ScratchFile:
    """One unnamed file that only grows."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise ValueError(f"scratch folder {folder} {what}: create it, {REMEDY}")
        self.filesystem = _filesystem(folder)
        try:
            self._fd = _open_unnamed(folder)
        except OSError as error:
            raise ValueError(
                f"no file can be made in scratch folder {folder} on {self.filesystem} ({error.strerror}): "
                f"make it writable, {REMEDY}"
            ) from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self.size = 0
        self.direct = self._try_direct()

    def __str__(self) -> str:
        return f"scratch folder {self.folder} on {self.filesystem}"

    def free_bytes(self) -> int:
        stats = os.statvfs(self.folder)
        return stats.f_bavail * stats.f_frsize

    def too_small(self, free: int, needed: int) -> str:
        more = " more" if self.size else ""
        return f"{self} has {human_bytes(free)} free, this step needs {human_bytes(needed)}{more}: free space, {REMEDY}"

    def grow(self, size: int) -> None:
        more = size - self.size
        if more <= 0:
            return
        free = self.free_bytes()
        if more > free:
            raise OSError(errno.ENOSPC, self.too_small(free, more))
        try:
            os.posix_fallocate(self._fd, self.size, more)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, self.too_small(free, more)) from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise OSError(
                    error.errno, f"growing {self} by {human_bytes(more)} failed ({error.strerror})"
                ) from error
            os.ftruncate(self._fd, size)  # a file system that cannot allocate ahead: a full disk shows in the write
        self.size = size

    def write(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwrite(self._fd, view, offset)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            view, offset = view[count:], offset + count

    def read(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ends too early")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        self._finalizer()

    def _try_direct(self) -> bool:
        """Switch to direct I/O and prove it with one block; switch back if either is refused."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        probe = memoryview(HostBuffer(BLOCK, torch.device("cpu")).memory)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.write(probe, 0)
            self.read(probe, 0)
            return True
        except OSError:
            with suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        finally:
            os.ftruncate(self._fd, 0)


@dataclass
class Extents:
    """Which bytes of the file are free: first fit, neighbours joined."""

    size: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)  # (start, stop), sorted, never touching

    @property
    def idle_bytes(self) -> int:
        return sum(stop - start for start, stop in self._free)

    def place(self, length: int) -> tuple[int, int]:
        """(start, file size needed) for `length` bytes. Changes nothing."""
        for start, stop in self._free:
            if stop - start >= length or stop == self.size:
                return start, max(self.size, start + length)
        return self.size, self.size + length

    def claim(self, start: int, length: int) -> None:
        """Take what `place` found, growing the file if it said so."""
        if start + length > self.size:
            grown, self.size = self.size, start + length
            self.release(grown, self.size - grown)
        if length == 0:
            return
        index = bisect.bisect_right(self._free, (start, self.size)) - 1
        first, stop = self._free.pop(index)
        assert first == start and start + length <= stop
        if start + length < stop:
            self._free.insert(index, (start + length, stop))

    def release(self, start: int, length: int) -> None:
        if length == 0:
            return
        stop = start + length
        index = bisect.bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


def round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _open_unnamed(folder: Path) -> int:
    """A file that vanishes with its last descriptor, whatever ends the process."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    fd, name = tempfile.mkstemp(prefix=".ithaca-", dir=folder)  # a file system without O_TMPFILE
    os.unlink(name)
    return fd


def _filesystem(folder: Path) -> str:
    """The kind of file system `folder` is on, such as "ext4"."""
    resolved = folder.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in (resolved, *resolved.parents) if place in mounts), "unknown file system")
