"""Folders that are there whole or not at all: written under another name, brought to the disk, renamed."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..base.files import sync


def publish(folder: Path, fill: Callable[[Path], None], *, replace: bool = False) -> None:
    """Let `fill` write into a new folder beside `folder`, then rename it. Nothing stays behind if that fails.

    replace: an old `folder` makes way once the new one is complete.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        temporary = folder.with_name(f".{folder.name}.{_mark()}")
        temporary.mkdir()
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be made: {error.strerror or error} ({error.filename}); choose a folder you can write to"
        ) from None
    old = temporary.with_name(temporary.name + ".old")
    try:
        fill(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        if replace and folder.exists():
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError as error:
            raise ValueError(
                f"{folder} appeared while it was being made ({error.strerror}); nothing was overwritten"
            ) from None
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already, if all went well
        if old.exists():
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, folder)


def _mark() -> str:
    return f"unfinished-{socket.gethostname()}-{os.getpid()}"


def _sweep(folder: Path) -> None:
    """Remove what a killed process of this machine left behind."""
    for path in folder.parent.glob(f".{folder.name}.unfinished-{socket.gethostname()}-*"):
        match = re.search(r"-(\d+)$", path.name)
        if match and int(match[1]) != os.getpid():
            with suppress(PermissionError):  # alive, somebody else's
                try:
                    os.kill(int(match[1]), 0)
                except ProcessLookupError:
                    shutil.rmtree(path, ignore_errors=True)
