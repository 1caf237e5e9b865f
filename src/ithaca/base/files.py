"""Files that are there whole or not at all, and what is in them: for checkpoints, packed data and the run folder alike.

What somebody else wrote is believed only within limits: `read_json` bounds what a file may hold, `inside` where a name in it may
lead, `open_regular` what may be opened at all (a named pipe would be waited for, and /dev/zero never ends).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

_DEPTH = 64  # lists and objects inside each other, in JSON that is received


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Of this user and of ithaca. RuntimeError: there is no home. It need not exist."""
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(home) / "ithaca"


def open_regular(path: Path) -> BufferedReader:
    """A file for reading, if it is one: ValueError for a folder, a pipe, a socket or a device, which are not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if stat.S_ISSOCK(_mode(path)):
            raise ValueError(f"{path} is a socket, not a file") from None
        raise error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is {kind_of(path)}, not a file")
    return open(handle, "rb")


def kind_of(path: Path) -> str:
    """What is there that is not a regular file, in words."""
    mode = _mode(path)
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((words for is_kind, words in kinds.items() if is_kind(mode)), "a link that leads nowhere")


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """A text file of at most `limit` bytes, with line ends as Python has them; ValueError for anything else."""
    with open_regular(path) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, too many for what it should be")
    try:
        return raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def read_json(path: Path, limit: int = 64 << 20) -> Any:
    """What a JSON file of at most `limit` bytes holds. ValueError with the path and the cause for anything else that is there;
    OSError if it cannot be opened."""
    with open_regular(path) as file:
        return json_in(file, path, limit)


def json_in(file: BinaryIO, path: Path, limit: int) -> Any:
    """The same of an open file, which is called `path`."""
    raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, too many for what it should be")
    try:
        value = json.loads(raw.decode(), parse_constant=_no_number, parse_float=_finite)
        if b"\\ud" in raw.lower():  # half a character of UTF-16 could be neither printed nor be a file name
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from None
    if isinstance(value, (dict, list)) and _deeper(value, _DEPTH):
        raise ValueError(f"{path} is nested more than {_DEPTH} deep")
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    if (number := float(text)) in (math.inf, -math.inf):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def inside(folder: Path, name: Any, *, links: bool = False) -> Path:
    """The file of a folder that a received file names; ValueError if the name leads out of it.

    links: the folder's own links may lead elsewhere, as in the Hugging Face cache."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is not the name of a file of {folder}")
    parts = PurePosixPath(name).parts
    bad = name.startswith("/") or ".." in parts or not parts or "\0" in name or "\\" in name
    if not bad:
        path = folder / name
        # resolve() raises RuntimeError (before Python 3.13) where links lead in a circle
        try:
            bad = not links and not path.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError, UnicodeEncodeError):
            bad = True
        if not bad:
            return path
    raise ValueError(f"{name[:200]!r} leads out of {folder}; do not use what names it")


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk. A rename is there once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return sha256_in(file)


def sha256_in(file: BufferedReader) -> str:
    """Of what is left to read of an open file."""
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename over. A crash leaves the old file or the new one. For files of our own; of those that
    users name, `write_output` keeps what they are."""
    with _replacing(path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text.encode())


def write_output(path: Path, text: str) -> None:
    """Write what a user wants at a path of theirs.

    A new file has the mode that the user's umask gives. One that is there keeps mode, owner, access list, and is replaced whole or
    not at all where those can be kept so; a link stays a link. What is no file is written through, as a shell's `>` does."""
    data, about, file = text.encode(), None, descriptor(path)
    with suppress(FileNotFoundError):
        about = os.stat(path)
    if file is None and (about is None or _plain(path, about)):
        try:
            with _replacing(Path(os.path.realpath(path))) as beside:
                if about is not None:
                    os.fchown(beside.fileno(), about.st_uid, about.st_gid)
                    os.fchmod(beside.fileno(), stat.S_IMODE(about.st_mode))
                beside.write(data)
            return
        except PermissionError:  # of the folder, or to give a file to its owner: the file itself may be writable
            if about is None:
                raise
    if about is not None and not any(is_kind(about.st_mode) for is_kind in (stat.S_ISREG, stat.S_ISFIFO, stat.S_ISCHR)):
        raise ValueError(f"{path} is {kind_of(path)}; name a file to write")
    with naming(path), open(path if file is None else os.dup(file), "wb") as through:
        sys.stdout.flush()  # which may be the same: what was printed comes first
        through.write(data)


@contextmanager
def _replacing(path: Path) -> Iterator[BufferedWriter]:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with naming(path):
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name this path: a disk that is full does not say which file was being written."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _plain(path: Path, about: os.stat_result) -> bool:
    """Whether a file that takes its place can be the same in everything: no second name, no access list."""
    more: list[str] = []
    with suppress(OSError):  # a file system without them
        more = [name for name in os.listxattr(path) if not name.startswith("security.")]
    return stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and not more


def descriptor(path: Path) -> int | None:
    """Which open file of this process a path stands for: /dev/stdout, /dev/fd/63 (a shell's `>(cat)`), or a link to one."""
    for _ in range(40):
        if os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd" and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


def remove_halves(path: Path) -> None:
    """Remove what `write_atomically` had beside `path` (its name may be a pattern) in processes that were killed.

    Only for whoever alone may write there: a write under way looks the same."""
    for half in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            half.unlink()
