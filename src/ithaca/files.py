"""Files that are there whole or not at all, and what is in them: for checkpoints, packed data and the run folder alike."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk. A rename is there once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename over. A crash leaves the old file or the new one."""
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(file, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fchmod(handle.fileno(), 0o644)  # mkstemp makes files that nobody else can read
            os.fsync(handle.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def remove_halves(path: Path) -> None:
    """Remove what `write_atomically` had beside `path` (its name may be a pattern) in processes that were killed.

    Only for whoever alone may write there: a write under way looks the same."""
    for half in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            half.unlink()
