"""The files behind a source: each is packed, or named with the reason why it is not.

A folder is read through. What is left out of it, and why, is known before anything is packed, is printed by whoever packs or
trains, and stays in the manifest. Nothing but regular files is ever opened: a named pipe would be waited for. A link to a folder is
not followed, since it may lead in a circle or to files that nobody meant to give; a link to a file is.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ..base.files import kind_of
from ..base.hub import Name, find_dataset, listing
from .source import Source, did_you_mean
from .stamps import Stamp, changed, difference, stamp

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "txt", ".npy": "tokens"}
PROSE = (".md", ".markdown", ".rst", ".text")  # text too; but beside records it is about them

LeftOut = dict[str, list[str]]  # reason -> names
HIDDEN = "the name begins with . or _"
LINKED = "a link to a folder (give it as a source of its own)"
UNKNOWN = "of no known format"
OTHER = "of another format"
BESIDE = "text beside records"
EMPTY = "empty (0 bytes)"
OTHER_SPLIT = "not of the split that is read"
FOLDER = "a folder, and the pattern is for files"


@dataclass(frozen=True)
class Files:
    """What a source turned out to be."""

    format: str
    paths: tuple[Path, ...]
    stamps: dict[Path, Stamp]  # of all files the documents depend on: the offsets beside an array too
    left_out: LeftOut = field(default_factory=dict)


def _as_meant(source: Source) -> Source:
    """A file or pattern that ends in .json means arrays of records. In a folder such files are about others, unless asked for."""
    json = source.format == "auto" and source.path.lower().endswith(".json")
    return replace(source, format="json") if json else source


def find_files(source: Source) -> Files:
    """The files of a source, sorted by name. Not for datasets."""
    source = _as_meant(source)
    path, named = Path(source.path).expanduser(), find_dataset(source.path)
    left_out: LeftOut = defaultdict(list)
    if named is not None:
        chosen, left_out = choose_files(source, named, listing(named))
        root = named.snapshot(named.commit or "")
        if gone := next((name for name in chosen if not (root / name).is_file()), None):
            raise ValueError(
                f"{source.path}: {gone} is not in {root} any more; fetch it again with the command that did"
            )
        paths = [root / name for name in chosen if not _is_empty(root / name, root, source.format, left_out)]
    elif path.is_dir():
        paths = [entry for entry in _walk(path, left_out) if _wanted(entry, path, source.format, left_out)]
    elif path.exists():
        if not path.is_file():
            raise ValueError(
                f"{source.path} is {kind_of(path)}, not a file; write what comes out of it to a file first"
            )
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty (0 bytes); remove it, or check that it was written to the end")
        paths = [path]
    elif glob.has_magic(source.path):
        paths = list(_matches(path, left_out))
    else:
        raise ValueError(
            f"{source.path} is not there{_neighbour(path)}; for a Hugging Face dataset write hf:OWNER/NAME"
        )
    paths = sorted(paths) if named else _without_prose(sorted(paths), path, source.format, left_out)
    if not paths:
        raise _nothing(source, path, left_out)
    form = _one_format(source, paths)
    every = [*paths, *(_offsets(paths) if form == "tokens" else ())]
    ordered = {reason: sorted(names) for reason, names in left_out.items() if names}
    return Files(form, tuple(paths), {entry: stamp(entry) for entry in every}, ordered)


_SPLITS = ("train", "validation", "valid", "dev", "val", "test", "eval")


def of_split(names: Iterable[str], split: str | None) -> list[str]:
    """Those of a repository's files that are of a split: some word of the path is its name, as in train/0.parquet and
    data/train-00000-of-00002.parquet. None: train where files are named after splits, else all of them."""
    words = {name: set(re.split(r"[/._ -]+", name.lower())) for name in names}
    if split is None and not any("train" in found for found in words.values()):
        return list(words)
    if split is None and not any(found & {*_SPLITS[1:]} for found in words.values()):
        return list(words)
    return [name for name, found in words.items() if (split or "train").lower() in found]


def choose_files(source: Source, named: Name, files: Iterable[str]) -> tuple[list[str], LeftOut]:
    """Those of a repository's files that a source means, and those that are left out."""
    source = _as_meant(source)
    pattern, magic = named.inner.split("/") if named.inner else [], glob.has_magic(named.inner)
    left_out: LeftOut = defaultdict(list)
    found = []
    for name in sorted(files):
        parts, path = name.split("/"), Path(name)
        if not (_glob(parts, pattern) if magic else parts[: len(pattern)] == pattern):
            continue
        form = _format(path, source.format)
        if _is_offsets(path):
            continue
        if any(part.startswith((".", "_")) for part in parts):
            left_out[HIDDEN].append(name)
        elif path.suffix.lower() in PROSE and source.format != "txt":
            left_out[BESIDE].append(name)
        elif form is None:
            left_out[UNKNOWN if _format(path, "auto") is None else OTHER].append(name)
        else:
            found.append(name)
    kept = of_split(found, source.split)
    left_out[OTHER_SPLIT] += [name for name in found if name not in kept]
    if not kept:
        why = "".join(f"; {line}" for line in left_out_words(left_out))
        raise ValueError(
            f"{source.path}: the repository has no file to read there ({', '.join(SUFFIXES)}){why}. Name the files, as in "
            f"hf:{named.repo}/data/*.parquet, or the split; try @refs/convert/parquet; or read it with format: datasets"
        )
    return kept, left_out


def _glob(parts: list[str], pattern: list[str]) -> bool:
    """Whether a pattern of a path matches, as it does on a disk: * within a part, ** over several."""
    if not pattern:
        return not parts
    if pattern[0] == "**" and _glob(parts, pattern[1:]):
        return True
    if not parts:
        return False
    return (
        _glob(parts[1:], pattern)
        if pattern[0] == "**"
        else fnmatchcase(parts[0], pattern[0]) and _glob(parts[1:], pattern[1:])
    )


def check_steady(then: dict[Path, Stamp], now: dict[Path, Stamp]) -> None:
    """ValueError if a file is new, gone or changed since the first look."""
    for path in sorted(then.keys() | now.keys()):
        before, after = then.get(path), now.get(path)
        if before is None or after is None:
            raise changed(path, "it is new" if before is None else "it is gone")
        if before != after:
            raise changed(path, difference(before, after))


def count_left_out(left_out: LeftOut) -> int:
    return sum(map(len, left_out.values()))


def left_out_words(left_out: LeftOut) -> list[str]:
    """A line per reason, with the first names."""
    lines = []
    for reason, names in left_out.items():
        if not names:
            continue
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        lines.append(f"left out: {len(names):,} {'file' if len(names) == 1 else 'files'}, {reason}: {shown}")
    return lines


def _walk(root: Path, left_out: LeftOut) -> Iterator[Path]:
    """Regular files under a folder, in no order, whatever their names."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}); change its permissions or leave it out")

    for where, folders, names in os.walk(root, onerror=refuse):
        folder = Path(where)
        for name in folders:
            if (folder / name).is_symlink():
                left_out[LINKED].append(_name(folder / name, root) + "/")
        for name in sorted(names):
            yield from _regular(folder / name, root, left_out)


def _matches(pattern: Path, left_out: LeftOut) -> Iterator[Path]:
    """Files that a pattern matches. Those whose name begins with a dot have to be meant: * is not enough."""
    first = next(at for at, part in enumerate(pattern.parts) if glob.has_magic(part))
    root, rest = Path(*pattern.parts[:first]), pattern.parts[first:]
    if "**" in rest:  # glob.glob would follow links to folders, in circles too
        meant = every = {str(match) for match in root.glob(str(Path(*rest)))}
        if not any(part.startswith(".") for part in rest):
            meant = {name for name in every if not any(p.startswith(".") for p in Path(name).relative_to(root).parts)}
        for where, folders, _ in os.walk(root):
            left_out[LINKED] += [
                _name(Path(where, folder), root) + "/" for folder in folders if Path(where, folder).is_symlink()
            ]
    else:
        meant = set(glob.glob(str(pattern)))
        every = {*meant, *glob.glob(str(pattern), include_hidden=True)} if sys.version_info >= (3, 11) else meant
    for match in map(Path, sorted(every)):
        if match.is_dir():
            if "**" not in rest:  # which goes through folders by itself
                left_out[FOLDER].append(_name(match, root) + "/")
        elif str(match) not in meant:
            left_out[HIDDEN].append(_name(match, root))
        elif not _is_offsets(match):
            for path in _regular(match, root, left_out):
                if not _is_empty(path, root, _format(path, "auto"), left_out):
                    yield path


def _regular(path: Path, root: Path, left_out: LeftOut) -> Iterator[Path]:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        regular = False
    if regular:
        yield path
    else:
        left_out[kind_of(path)].append(_name(path, root))


def _wanted(path: Path, root: Path, asked: str, left_out: LeftOut) -> bool:
    """Is this file of a folder to be packed?"""
    form = _format(path, asked)
    if any(part.startswith((".", "_")) for part in path.relative_to(root).parts):
        left_out[HIDDEN].append(_name(path, root))
    elif _is_offsets(path):
        if not _array_of(path).is_file():
            left_out["offsets without their array"].append(_name(path, root))
    elif form is None:
        left_out[UNKNOWN if _format(path, "auto") is None else OTHER].append(_name(path, root))
    else:
        return not _is_empty(path, root, form, left_out)
    return False


def _is_empty(path: Path, root: Path, form: str | None, left_out: LeftOut) -> bool:
    """A file without a byte. Of a table or an array not even that is possible: it was cut short."""
    if path.stat().st_size or form is None:
        return False
    if form in ("parquet", "tokens"):
        raise ValueError(f"{path} is empty (0 bytes); remove it, or check that it was written to the end")
    left_out[EMPTY].append(_name(path, root))
    return True


def _without_prose(paths: list[Path], path: Path, asked: str, left_out: LeftOut) -> list[Path]:
    prose = [entry for entry in paths if entry.suffix.lower() in PROSE]
    rest = [entry for entry in paths if entry.suffix.lower() not in PROSE]
    if not prose or asked == "txt" or {_format(entry, asked) for entry in rest} <= {"txt"}:
        return paths
    root = path if path.is_dir() else Path(os.path.commonpath([entry.parent for entry in paths]))
    left_out[BESIDE] += [_name(entry, root) for entry in prose]
    return rest


def _one_format(source: Source, paths: Iterable[Path]) -> str:
    formats: dict[str, Path] = {}
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path} cannot be read (permission denied); change its permissions or leave it out")
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the name of {_name(path, path.parent)} is not UTF-8; rename the file") from None
        form = _format(path, source.format)
        if form is None:
            raise ValueError(
                f"{path}: the format cannot be told from the name; use one of {', '.join(SUFFIXES)} (decompress .gz and "
                ".zst first), or give the format"
            )
        formats.setdefault(form, path)
    if len(formats) > 1:
        examples = ", ".join(f"{form} ({path.name})" for form, path in formats.items())
        raise ValueError(f"{source.path} holds files of several formats: {examples}; make each a source of its own")
    return next(iter(formats))


def _nothing(source: Source, path: Path, left_out: LeftOut) -> ValueError:
    why = "".join(f"; {line}" for line in left_out_words(left_out))
    if not path.is_dir():
        return ValueError(f"no file matches {source.path}{why}; quote it in a shell, and check folder and suffix")
    known = ", ".join((*SUFFIXES, *PROSE)) if source.format == "auto" else f"format {source.format}"
    return ValueError(
        f"the folder {source.path} has no file to read ({known}) among {count_left_out(left_out)} files{why}. Give the files as a "
        "glob, or their format"
    )


def _format(path: Path, asked: str) -> str | None:
    if _is_offsets(path):
        return None
    suffix = path.suffix.lower()
    form = "txt" if suffix in PROSE else SUFFIXES.get(suffix)
    if asked == "auto" or form == asked:
        return form
    return asked if form is None else None  # asked for by name: other suffixes too, but not those of another format


def offsets_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".npy") + ".offsets.npy")


def _array_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".offsets.npy") + ".npy")


def _offsets(paths: Iterable[Path]) -> list[Path]:
    return [beside for beside in map(offsets_of, paths) if beside.exists()]


def _is_offsets(path: Path) -> bool:
    return path.name.endswith(".offsets.npy")


def _name(path: Path, root: Path | str) -> str:
    """A name that can be printed and written down, whatever bytes and control characters it has."""
    text = os.fsencode(os.path.relpath(path, root)).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]


def _neighbour(path: Path) -> str:
    """A file beside it with a similar name."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        beside = []
    return did_you_mean(path.name, beside)
