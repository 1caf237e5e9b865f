"""Where FlashAttention-4 keeps what it compiled, so that the next process need not.

It compiles at first use, in every process anew: half a minute for the cases of a training run, and again after every restart. It
can keep the results on disk, from where they are loaded as code; its own default is a folder below /tmp, of a name that anybody can
guess. So it is given one that nobody else can write to, in the user's cache. Each kind of GPU has its own, because some of its
keys do not say which one they were compiled for.

Settings of the user's (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED, 0 or 1) win.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from ...base.files import cache_folder

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def keep_compiled(capability: tuple[int, int], environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Before flash_attn.cute is imported. Returns why it will compile every time, None if it need not or the user has decided."""
    if ENABLED in environ:
        return None
    try:
        own = cache_folder(environ)
        own.parent.mkdir(parents=True, exist_ok=True)
        folder = own / "flash-attention-4" / "sm{}{}".format(*capability)
        for part in (own, folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)  # with `parents` only the last would be closed to others
        folder = folder.resolve()
        problem = _open_to_others(folder) or _cannot_lock(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return str(error)
    if problem is None:
        environ[ENABLED], environ[FOLDER] = "1", str(folder)
    return problem


def _open_to_others(folder: Path) -> str | None:
    """Whoever can write to a folder on the way can put another one in its place."""
    for path in (folder, *folder.parents):
        about = path.lstat()
        others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if about.st_uid not in (os.geteuid(), 0) or (others and not about.st_mode & stat.S_ISVTX):
            return f"others can write to {path}"
    return None


def _cannot_lock(folder: Path) -> str | None:
    """It locks its files, and takes a file system without locks for a lock that is never released: an error after 15 s."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return f"{folder} has no locks ({error.strerror})"
    finally:
        os.close(lock)
    return None
