"""manifest.json of a packed folder: read within limits and checked field by field, as somebody else may have written it.

Every number in it is used as a place, a count or a size later on. So it has to be what the packer would have written: names that
stay in the folder, each file once, sizes that follow from the counts, sources that lie side by side. What the files really hold is
checked where they are opened (folder.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import inside, read_json
from .source import KINDS, USES, VALUES

FORMAT, VERSION = "ithaca packed", 1
BLOCK = 4096  # tokens between two entries of sums-*.bin
INDEX = np.dtype("<i8")
PART = np.dtype([("length", "<i8"), ("supervised", "<i8"), ("value", "<f8")])  # of a unit; value: NaN where it has none
WRITTEN = np.dtype([*PART.descr, ("shared", "<i8")])  # as a worker leaves it: parts.bin and shared.bin
OLD = np.dtype("<f4")  # log-probabilities of whoever sampled a completion
LIMIT = 256 << 20  # bytes of a manifest
DROPPED = {
    "empty": "empty",
    "too_short": "of fewer than 2 tokens",
    "unsupervised": "without a supervised token",
    "same": "pairs without a difference",
    "no_answer": "with an empty answer or completion",
}
FIRST = 3  # places that are named of units that teach nothing
SPECIAL = ("text", "parse")  # what the text of a special token is in a document
_MOST = 1 << 62


def token_dtype(vocabulary: int) -> np.dtype:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def content_of(files: dict[str, str]) -> str:
    """What changes with the content and nothing else, from names and SHA-256 of the files that hold it."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a packed folder; 'ithaca data pack' makes one")
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not there; make it with 'ithaca data pack FILES --tokenizer FOLDER --out {folder}'"
        )
    try:
        manifest = read_json(inside(folder, path.name), LIMIT)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is not a packed folder: it has no manifest.json; 'ithaca data pack' makes one"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a packed folder (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {str(manifest.get('version'))[:50]}, this ithaca reads {VERSION}; pack the data again"
        )
    _fill_in(manifest)
    wrong = next(_wrong(manifest, folder), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong}; copy it again or pack the data again")
    return manifest


def _fill_in(manifest: dict[str, Any]) -> None:
    """What folders did not say before it was asked."""
    settings, sources = manifest.get("settings"), manifest.get("sources")
    if isinstance(settings, dict):
        settings.setdefault("special_tokens", None if manifest.get("tokenizer") is None else "parse")
    for source in sources if isinstance(sources, list) else ():
        if not isinstance(source, dict):
            continue
        if "left_out" not in source:
            ignored = source.pop("ignored", [])
            source["left_out"] = {"of no known format": ignored} if ignored else {}
        if "chats" not in source:
            chats, template = source.get("kind") == "chat", isinstance(settings, dict) and settings.get("chat_template")
            source["chats"] = source.get("documents", 0) if chats else 0
            source["chat_template"] = template or None if chats else None
        source.setdefault("use", None)
        source.setdefault("marked_by", None)
        for name, default in (("units", False), ("values", None), ("equal", 0), ("first", {})):
            source.setdefault(name, default)
    manifest.setdefault("parts", None)
    shards = manifest.get("shards")
    for shard in shards if isinstance(shards, list) else ():
        if isinstance(shard, dict):
            shard.setdefault("old", None)


# What a value must be, each in words and as a test.


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(character in "0123456789abcdef" for character in value)


def _list(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _dict(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _record(fields: dict[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(name in value and test(value[name]) for name, test in fields.items())
    )


def _or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _dropped(value: Any) -> bool:
    return _dict(_count)(value) and set(value) <= set(DROPPED)


_COUNTS = {"documents": _count, "tokens": _count, "supervised": _count, "dropped": _dropped}
_SETTINGS = {
    "eos": lambda value: isinstance(value, bool),
    "vocabulary": _count,
    "special_tokens": _or_null(lambda value: value in SPECIAL),
}
_PARTS = ("vocabulary", "special_tokens", "chat_template", "all")
_TOKENIZER = {"name": _text, "tokenizers": _text, "sha256": _record(dict.fromkeys(_PARTS, _digest))}
_FILE = {"name": _text, "bytes": _count, "mtime_ns": lambda value: type(value) is int, "sha256": _digest}
_SOURCE = {
    **_COUNTS,
    "name": _text,
    "kind": lambda value: value in tuple(KINDS),
    "format": _text,
    "columns": _dict(_text),
    "use": _or_null(lambda value: value in USES),
    "chat_template": _or_null(_text),
    "marked_by": _or_null(_text),
    "units": lambda value: isinstance(value, bool),
    "values": _or_null(lambda value: value in VALUES),
    "equal": _count,
    "first": _dict(_list(_text)),
    "chats": _count,
    "dataset": _or_null(_text),
    "files": _list(_record(_FILE)),
    "left_out": _dict(_list(_text)),
    "range": lambda value: _list(_count)(value) and len(value) == 2,
}
_SHARD = {
    "file": _text,
    **dict.fromkeys(("mask", "sums", "old"), _or_null(_text)),
    "tokens": _count,
    "documents": _count,
}
_FIELDS = {
    **_COUNTS,
    "content": _digest,
    "dtype": _text,
    "vocabulary": lambda value: _count(value) and 2 <= value <= 1 << 32,
    "largest_token": _count,
    "settings": _record(_SETTINGS),
    "tokenizer": _or_null(_record(_TOKENIZER)),
    "parts": _or_null(_count),
    "sources": _list(_record(_SOURCE)),
    "shards": _list(_record(_SHARD)),
    "files": _dict(_record({"bytes": _count, "sha256": _digest})),
}


def _wrong(manifest: dict[str, Any], folder: Path) -> Iterator[str]:
    """What is wrong with a manifest, the first thing first."""
    for name, test in _FIELDS.items():
        if name not in manifest:
            yield f"{name!r} is missing"
        elif not test(manifest[name]):
            yield f"{name!r} is not what a packed folder has there"
    files, shards, sources = manifest["files"], manifest["shards"], manifest["sources"]
    named = (shard[name] for shard in shards for name in ("file", "mask", "sums", "old") if shard[name])
    for name in [*files, *named]:
        try:
            inside(folder, name)
        except ValueError as error:
            yield str(error)
    yield from _wrong_sizes(manifest)
    for name in ("documents", "tokens", "supervised"):
        if manifest[name] != sum(source[name] for source in sources):
            yield f"its sources do not add up to {manifest[name]:,} {name}"
    for name in ("documents", "tokens"):
        if manifest[name] != sum(shard[name] for shard in shards):
            yield f"its shards do not add up to {manifest[name]:,} {name}"
    at = 0
    for source in sources:
        if source["range"] != [at, at + source["documents"]] or not source["documents"]:
            yield f"the documents of source {source['name'][:100]!r} are not those behind the source before"
        at += source["documents"]
    if any(source["units"] for source in sources) != (manifest["parts"] is not None):
        yield "its parts belong to no unit, or its units have no parts"
    if manifest["dtype"] != token_dtype(manifest["vocabulary"]).str:
        yield f"tokens of a vocabulary of {manifest['vocabulary']:,} are not of type {manifest['dtype'][:50]!r}"
    if manifest["largest_token"] >= manifest["vocabulary"]:
        yield f"token {manifest['largest_token']:,} is outside its vocabulary of {manifest['vocabulary']:,}"
    if not manifest["supervised"] <= manifest["tokens"] - manifest["documents"]:
        yield f"{manifest['supervised']:,} tokens cannot be supervised"
    if manifest["content"] != content_of({n: a["sha256"] for n, a in files.items() if not n.startswith("tokenizer/")}):
        yield "the checksum of its content is not that of its files"


def _wrong_sizes(manifest: dict[str, Any]) -> Iterator[str]:
    """Files that are missing from the list, listed twice, of another size than their counts say, or of no use."""
    files, size = manifest["files"], np.dtype(token_dtype(manifest["vocabulary"])).itemsize
    sizes = {"documents.bin": (manifest["documents"] + 1) * INDEX.itemsize}
    if "hashes.bin" in files:  # older folders have none
        sizes["hashes.bin"] = manifest["documents"] * INDEX.itemsize
    if manifest["parts"] is not None:
        sizes["units.bin"] = (manifest["documents"] + 1) * INDEX.itemsize
        sizes["parts.bin"] = manifest["parts"] * PART.itemsize
        if "shared.bin" in files:  # older folders have none
            sizes["shared.bin"] = manifest["parts"] * INDEX.itemsize
    for shard in manifest["shards"]:
        tokens = shard["tokens"]
        wanted = [(shard["file"], tokens * size)]
        if (shard["mask"] is None) != (shard["sums"] is None):
            yield f"shard {shard['file'][:100]!r} has a mask without its sums, or sums without a mask"
        if shard["mask"] and shard["sums"]:
            wanted += [(shard["mask"], -(-tokens // 8)), (shard["sums"], (tokens // BLOCK + 1) * INDEX.itemsize)]
            sizes["supervised.bin"] = manifest["documents"] * INDEX.itemsize
        if shard["old"]:
            wanted.append((shard["old"], tokens * OLD.itemsize))
        for name, least in wanted:
            if name in sizes:
                yield f"the file {name[:100]!r} is named twice"
            sizes[name] = least
    for name, least in sizes.items():
        if name not in files:
            yield f"the file {name[:100]!r} is not in its list of files"
        elif files[name]["bytes"] != least:
            yield f"the file {name[:100]!r} should have {least:,} bytes by its counts, not {files[name]['bytes']:,}"
    for name in files:
        if name not in sizes and not name.startswith("tokenizer/"):
            yield f"the file {name[:100]!r} belongs to nothing"
