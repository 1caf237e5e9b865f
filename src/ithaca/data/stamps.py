"""A source that changes while it is packed would be recorded as packed, and never be looked at again.

So every file has a stamp, taken before anything is read of it. Whoever opens the file compares the stamp of what was opened, in
every worker, and once all is packed the files are looked for again: none may be new, gone or changed. The time of the last change
of the inode (ctime) is part of a stamp, since no program can set it back.
"""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from ..base.files import open_regular


class Stamp(NamedTuple):
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def stamp(path: Path) -> Stamp:
    return _of(os.stat(path))


def _of(about: os.stat_result) -> Stamp:
    return Stamp(about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_dev)


def open_steady(path: str | Path, before: Stamp | None) -> BufferedReader:
    """A file of a source, which must be as it was found. before: None where nothing is known of it."""
    try:
        file = open_regular(Path(path))
    except FileNotFoundError:
        raise changed(path, "it is gone") from None
    now = _of(os.fstat(file.fileno()))
    if before is not None and now != before:
        file.close()
        raise changed(path, difference(before, now))
    return file


def difference(before: Stamp, after: Stamp) -> str:
    if after.bytes != before.bytes:
        return f"it had {before.bytes:,} bytes, now {after.bytes:,}"
    if (after.inode, after.device) != (before.inode, before.device):
        return "another file is in its place"
    return "it was written to"


def changed(path: str | Path, how: str) -> ValueError:
    return ValueError(
        f"{path} changed while it was packed: {how}; nothing was kept. Pack again once nobody writes there"
    )
