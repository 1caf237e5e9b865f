"""What is to be packed, found and understood; whether it stayed the same meanwhile; and whether a folder was made from it.

Files are compared with a folder by name, size and time, and by SHA-256 where only the time differs: a copy is the same data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.files import sha256_of
from .find import Files, check_steady, find_files
from .manifest import read_manifest
from .readers import dataset_parts, first_columns, split_parts
from .source import TEMPLATED, Part, Source, check_use, has_units, is_dataset, tell_kind
from .stamps import changed, stamp
from .templates import check_markers, template_text
from .tokenizer import differing, own_template


@dataclass(frozen=True)
class Input:
    """A source, found and understood."""

    source: Source
    kind: str
    format: str
    parts: list[Part]
    files: Files
    dataset: str | None  # its fingerprint, if it is one

    @property
    def units(self) -> bool:
        return has_units(self.kind, self.source.use)

    @property
    def recorded(self) -> list[tuple[str, Path]]:
        """Files to write down, by names that stay the same when the data is moved. Those that `datasets` makes of a download do
        not."""
        if (self.dataset is not None and self.source.path.startswith("hf:")) or not self.files.paths:
            return []
        root = os.path.commonpath([path.parent for path in self.files.paths])
        return [(os.path.relpath(path, root), path) for path in self.files.stamps]


def understand(number: int, source: Source) -> Input:
    """Find a source and see what it holds. ValueError if that cannot be learned from as it is asked for."""
    found = look_at(number, source)
    check_use(source, found.kind)
    if source.chat_template is not None and found.kind not in TEMPLATED:
        raise ValueError(f"source {source.path}: chat_template is for chats, and this is {found.kind}; leave it out")
    return found


def with_template(entry: Input, default: str | None, tokenizer: Any | None) -> Input:
    """The input with the text of its chat template; that of the tokenizer is not written down twice."""
    asked = default if entry.source.chat_template is None else entry.source.chat_template
    if asked is None:
        return entry
    text = template_text(asked)  # has to be there, even where there is nothing to render
    if entry.kind not in TEMPLATED:
        return entry
    if tokenizer is not None:
        check_markers(asked, tokenizer.get_vocab())
    return replace(entry, source=replace(entry.source, chat_template=text))


def look_at(number: int, source: Source) -> Input:
    if is_dataset(source):
        parts, mark, files = dataset_parts(number, source)
        columns, where = first_columns("datasets", parts[0].pieces[0], source)
        return Input(source, tell_kind(source, columns, where), "datasets", parts, files, mark)
    files = find_files(source)
    parts = split_parts(number, files)
    if files.format in ("txt", "tokens"):
        kind = "text" if files.format == "txt" else "tokens"
        if source.kind not in (None, kind):
            raise ValueError(f"source {source.path}: kind {source.kind!r} is not possible with {files.format} files")
    else:
        columns, where = first_columns(files.format, parts[0].pieces[0], source)
        kind = tell_kind(source, columns, where)
    return Input(source, kind, files.format, parts, files, None)


def check_unchanged(inputs: list[Input]) -> None:
    """ValueError if a file of a source is new, gone or changed since it was understood."""
    for entry in inputs:
        try:
            if entry.dataset is None:
                stamps = find_files(entry.source).stamps
            else:  # which files it has is written in one of them
                stamps = {path: stamp(path) for path in entry.files.stamps if path.exists()}
        except (ValueError, OSError) as error:
            raise changed(entry.source.path, str(error)) from None
        check_steady(entry.files.stamps, stamps)


def differences(folder: Path, inputs: list[Input], settings: dict[str, Any], about: dict[str, Any] | None) -> list[str]:
    """In words, what an existing folder was made from that is not asked for now. Empty: it is the same."""
    try:
        then = read_manifest(folder)
    except ValueError as error:
        raise ValueError(
            f"{error}. It exists already and is not replaced: choose another folder, or remove it"
        ) from None
    changes = [
        f"{name} was {then['settings'][name]!r}, is now {value!r}"
        for name, value in settings.items()
        if then["settings"][name] != value
    ]
    if (then["tokenizer"] is None) != (about is None):
        changes.append("it was packed " + ("without" if about else "with") + " a tokenizer")
    elif about is not None:
        parts = differing(then["tokenizer"]["sha256"], about["sha256"], chats=own_template(then))
        changes += [f"the tokenizer's {part} differ (it was {then['tokenizer']['name']})" for part in parts]
    if len(then["sources"]) != len(inputs):
        return changes + [f"it has {len(then['sources'])} sources, now there are {len(inputs)}"]
    for old, new in zip(then["sources"], inputs, strict=True):
        for name, before, now in (
            ("kind", old["kind"], new.kind),
            ("format", old["format"], new.format),
            ("columns", old["columns"], new.source.columns),
            ("use", old["use"], new.source.use),
        ):
            if before != now:
                changes.append(f"source {new.source.path}: {name} was {before!r}, is now {now!r}")
        if old["chat_template"] != new.source.chat_template:
            changes.append(f"source {new.source.path}: it was packed with another chat template")
        if old["dataset"] != new.dataset:
            changes.append(f"source {new.source.path}: the dataset has changed, or is another")
        changes += _changed_files(old["files"], new.recorded)
    return changes


def _changed_files(then: list[dict[str, Any]], now: list[tuple[str, Path]]) -> list[str]:
    before = {entry["name"]: entry for entry in then}
    after = dict(now)
    changes = [f"the file {name} is new" for name in after if name not in before]
    changes += [f"the file {name} is gone" for name in before if name not in after]
    for name, path in now:
        if name not in before:
            continue
        old, new = before[name], stamp(path)
        if old["bytes"] != new.bytes:
            changes.append(f"{path} had {old['bytes']:,} bytes, now {new.bytes:,}")
        elif old["mtime_ns"] != new.mtime_ns and sha256_of(path) != old["sha256"]:
            changes.append(f"{path} has changed (SHA-256 differs)")
    return changes[:8] + ([f"and {len(changes) - 8} more files"] if len(changes) > 8 else [])
