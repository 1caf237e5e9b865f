"""SHA-256 of files by blocks, so that one file can keep several cores busy.

SHA-256 of a stream is one long chain: about 1.2 GB/s on a core, and no second core can help. Disks are faster. So a file is cut
into blocks of 16 MiB, and its digest is

    up to one block    the SHA-256 of the file, as `sha256sum` prints it
    more               the SHA-256 of the SHA-256 digests (32 bytes each) of its blocks, in order

Blocks can be hashed in any order, by any thread, while they are written or read. The digest finds what one long chain finds: no
byte, no order, no length can change without it. Without ithaca it is checked by

    split -b 16M --filter='openssl dgst -sha256 -binary' FILE | sha256sum

No torch here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from ..base.files import open_regular

BLOCK = 16 << 20
Progress = Callable[[int], None]
"""Called with the bytes read since the last call, from any thread."""


def joined(blocks: Sequence[bytes]) -> str:
    """The digest of a file, from those of its blocks."""
    return blocks[0].hex() if len(blocks) == 1 else sha256(b"".join(blocks)).hexdigest()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digests(
    files: Mapping[str, Path], progress: Progress | None = None, open_file: Callable[[Path], BinaryIO] = open_regular
) -> dict[str, str | Exception]:
    """Name -> digest of each file, or why it cannot be read. Blocks of all files are hashed side by side."""
    buffers = threading.local()

    def block(path: Path, start: int) -> bytes:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(BLOCK))
        view = buffers.view
        with open_file(path) as file:
            file.seek(start)
            size = 0
            while size < BLOCK and (count := file.readinto(view[size:])):  # pyright: ignore[reportAttributeAccessIssue]
                size += count
        if progress is not None:
            progress(size)
        return sha256(view[:size]).digest()  # leaves Python's lock, as reading does

    def size_of(path: Path) -> int:
        with open_file(path) as file:
            return file.seek(0, os.SEEK_END)

    results: dict[str, str | Exception] = {}
    with ThreadPoolExecutor(min(16, 2 * cores())) as pool:  # twice: half of them wait for the disk
        pending = {}
        for name, path in files.items():
            try:
                pending[name] = [pool.submit(block, path, at) for at in range(0, size_of(path), BLOCK)]
            except (OSError, ValueError) as error:
                results[name] = error
        for name, blocks in pending.items():
            try:
                results[name] = joined([future.result() for future in blocks])
            except (OSError, ValueError) as error:
                results[name] = error
    return results
