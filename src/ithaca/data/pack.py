"""`pack`: documents to token ids on disk, once, before any rank starts.

Tokenising while ranks wait is how jobs die of timeouts, and doing it in every job is how they waste hours. So it is a
step of its own. Parts of the sources (readers.py) go to as many processes as there are cores; each writes a shard. What
a shard holds depends on the data only, not on the number of workers. At the end come the document index and the
manifest, and the folder gets its name: it is there whole or not at all.

Packing again with the same data, tokenizer and settings finds the folder and does nothing. With anything else it stops
and says what differs; `force` replaces the folder once the new one is complete. Data that changes while it is packed is an error:
nobody could say what was packed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import sha256_of
from ..base.hub import fetch
from ..base.processes.tasks import run_tasks
from .fetch import fetch_source
from .find import left_out_words
from .folder import Packed
from .inputs import Input, check_unchanged, differences, understand, with_template
from .manifest import FIRST, FORMAT, INDEX, LIMIT, PART, SPECIAL, VERSION, WRITTEN, content_of, token_dtype
from .progress import Progress
from .publish import publish
from .source import Source
from .tokenizer import TokenizerParts, fingerprint, load_tokenizer, tokenizer_parts
from .work import Job, start_worker


def pack(
    sources: Sequence[Source],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    eos: bool = True,
    chat_template: str | None = None,
    special_tokens: str = "text",
    workers: int | None = None,
    force: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Packed:
    """Tokenise sources into the folder `out`.

    tokenizer: a folder, or owner/name on the Hub; may be left out if all sources are token ids, then `vocabulary` must be given.
    eos: end texts and completions with the end-of-sequence token. chat_template: one of ours by name, a file or the text itself,
    instead of the tokenizer's, for sources that name none. special_tokens: what `</s>` in a document is: "text", or with "parse"
    the special token. workers: processes, None = one a core.
    """
    folder = Path(out).expanduser()
    if not sources:
        raise ValueError("there is no source; give at least one file, folder or glob")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1; leave it out for one per core")
    if special_tokens not in SPECIAL:
        raise ValueError(f"special_tokens={special_tokens!r} is unknown; choose one of {', '.join(SPECIAL)}")
    inputs = [understand(number, fetch_source(source)) for number, source in enumerate(sources)]
    _check_count(inputs)
    tokenizer = None if tokenizer is None else fetch(tokenizer, "tokenizer")
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    parts = None if loaded is None else tokenizer_parts(loaded)
    inputs = [with_template(entry, chat_template, loaded) for entry in inputs]
    vocabulary = _vocabulary(inputs, parts, vocabulary, eos)
    settings = {
        "eos": eos,
        "vocabulary": vocabulary,
        "special_tokens": None if parts is None else special_tokens,
    }
    about = None
    if parts is not None:
        import tokenizers

        about = {"name": str(tokenizer), "tokenizers": tokenizers.__version__, "sha256": fingerprint(parts)}
    if folder.exists() and not _is_empty(folder):
        changes = differences(folder, inputs, settings, about)
        if not changes:
            say(f"{folder} already holds this data, packed with the same tokenizer and settings: nothing to do")
            packed = Packed(folder)
            for entry, then in zip(inputs, packed.manifest["sources"], strict=True):
                new = {
                    reason: names
                    for reason, every in entry.files.left_out.items()
                    if (names := sorted(set(every) - set(then["left_out"].get(reason, ()))))
                }
                for line in left_out_words(new):
                    say(f"  {entry.source.path}: since then also {line}")
            return packed
        if not force:
            raise ValueError(
                f"{folder} exists and holds something else:\n" + "\n".join(f"  - {line}" for line in changes)
                + "\nChoose another folder, or pass --force to replace this one"
            )  # fmt: skip

    def fill(into: Path) -> None:
        job = Job(
            str(into),
            tuple(entry.source for entry in inputs),
            tuple(entry.kind for entry in inputs),
            parts,
            vocabulary,
            eos,
            special_tokens == "parse",
        )
        if loaded is not None:
            loaded.save_pretrained(into / "tokenizer")
        _write(into, inputs, job, settings, about, workers or len(os.sched_getaffinity(0)), quiet)

    publish(folder, fill, replace=force)
    packed = Packed(folder)
    packed.written = True
    return packed


def _check_count(inputs: list[Input]) -> None:
    """Before hours of work: a manifest that nobody would read again is not to be written."""
    names = [name for entry in inputs for name, _ in entry.recorded]
    names += [name for entry in inputs for every in entry.files.left_out.values() for name in every]
    if sum(len(name.encode("utf-8", "replace")) + 200 for name in names) > LIMIT:
        raise ValueError(
            f"the sources have {len(names):,} files, too many to list with their checksums; put them together into jsonl files"
        )


def _vocabulary(inputs: list[Input], parts: TokenizerParts | None, asked: int | None, eos: bool) -> int:
    if asked is not None and asked < 2:
        raise ValueError(f"vocabulary={asked} must be at least 2")
    if parts is None:
        text = [entry for entry in inputs if entry.kind != "tokens" and not entry.units]  # units may be ids: read_unit
        if text:
            raise ValueError(
                f"source {text[0].source.path} holds {text[0].kind}, so a tokenizer is needed; give its folder"
            )
        if asked is None:
            raise ValueError(
                "without a tokenizer the size of the vocabulary must be given (--vocabulary), to check the ids"
            )
        return asked
    if asked is not None and asked < parts.vocabulary:
        raise ValueError(f"vocabulary={asked:,} is smaller than the tokenizer's {parts.vocabulary:,}; leave it out")
    if eos and parts.eos is None and any(entry.kind in ("text", "completion") for entry in inputs):
        raise ValueError(
            "the tokenizer has no end-of-sequence token to end documents with; pass --no-eos to go without"
        )
    return asked or parts.vocabulary


def _write(
    into: Path,
    inputs: list[Input],
    job: Job,
    settings: dict[str, Any],
    about: dict[str, Any] | None,
    workers: int,
    quiet: bool,
) -> None:
    """Everything that is in a packed folder, the tokenizer aside."""
    parts = [part for entry in inputs for part in entry.parts]
    files = {str(path): entry.files.stamps[path] for entry in inputs for _, path in entry.recorded}
    # Large parts first would balance better, but then the first error would not be that of the first record.
    tasks: list[Any] = [*enumerate(parts), *files.items()]
    try:
        with Progress("packing", sum(part.size for part in parts), quiet=quiet) as progress:
            results = run_tasks(start_worker, job, tasks, workers, lambda report: progress.add(*report))
    except (ValueError, OSError):
        check_unchanged(inputs)  # half a line is no error of the data while somebody writes it
        raise
    check_unchanged(inputs)
    done, hashes = results[: len(parts)], dict(zip(files, results[len(parts) :], strict=True))
    index, count = _write_index(into, done)
    sources, first = [], 0
    for number, entry in enumerate(inputs):
        source_results = [result for part, result in zip(parts, done, strict=True) if part.source == number]
        described = _describe(entry, source_results, hashes)
        if described["documents"] == 0:
            why = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in described["dropped"].items())
            places = next(iter(described["first"].values()), None)
            raise ValueError(
                f"no document is left of source {entry.source.path}: {why or 'there is no record in it'}"
                + (f" (first: {', '.join(places)})" if places else "")
            )
        _check_judged(entry, described, source_results)
        described["range"] = [first, first + described["documents"]]
        first += described["documents"]
        sources.append(described)
    shards = [result for result in done if result["documents"]]
    for result in done:
        if not result["documents"]:
            (into / result["file"]).unlink()
    content = {name: digest for result in shards for name, digest in result["sha256"].items()} | index
    every = {**content}
    for path in sorted((into / "tokenizer").rglob("*")):
        if path.is_file():
            every[path.relative_to(into).as_posix()] = sha256_of(path)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "content": content_of(content),
        "dtype": token_dtype(job.vocabulary).str,
        "vocabulary": job.vocabulary,
        "largest_token": max(result["largest"] for result in shards),
        "documents": first,
        "tokens": sum(result["tokens"] for result in shards),
        "supervised": sum(result["supervised"] for result in shards),
        "dropped": dict(sum((Counter(source["dropped"]) for source in sources), Counter())),
        "settings": settings,
        "tokenizer": about,
        "sources": sources,
        "shards": [
            {name: result[name] for name in ("file", "mask", "sums", "old", "tokens", "documents")} for result in shards
        ],
        "parts": count,
        "files": {name: {"bytes": (into / name).stat().st_size, "sha256": digest} for name, digest in every.items()},
    }
    (into / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")


def _check_judged(entry: Input, described: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """ValueError if completions are judged in two ways, or in none that tells them apart."""
    filled = [result for result in results if result["documents"]]
    if len({result["values"] for result in filled}) > 1:
        raise ValueError(
            f"source {entry.source.path} has rewards in some records and advantages in others; give one of them"
        )
    if len({result["old"] is None for result in filled}) > 1:
        raise ValueError(
            f"source {entry.source.path} has log-probabilities in some records and none in others; give them in all or in none"
        )
    if described["values"] and described["equal"] == described["documents"]:
        what = "all rewards of each prompt are equal" if described["values"] == "rewards" else "all advantages are 0"
        raise ValueError(
            f"source {entry.source.path}: {what}, so there is nothing to learn (first: {', '.join(described['first']['equal'])}); "
            "judge its completions otherwise"
        )


def _write_index(into: Path, done: list[dict[str, Any]]) -> tuple[dict[str, str], int | None]:
    """documents.bin, hashes.bin, where some token is not supervised supervised.bin, and where there are units units.bin, parts.bin
    and shared.bin, from what the workers left. -> their SHA-256, and how many parts there are"""
    masked = any(result["mask"] for result in done)
    units = any(into.glob("units-*.part"))
    position = part = 0
    with (
        open(into / "documents.bin", "wb") as offsets,
        open(into / "supervised.bin", "wb") as counts,
        open(into / "hashes.bin", "wb") as hashes,
        open(into / "units.bin", "wb") as starts,
        open(into / "parts.bin", "wb") as parts,
        open(into / "shared.bin", "wb") as shared,
    ):
        offsets.write(np.zeros(1, INDEX).tobytes())
        starts.write(np.zeros(1, INDEX).tobytes())
        for path in sorted(into.glob("lengths-*.part")):
            lengths, learn, digests = np.fromfile(path, INDEX).reshape(-1, 3).T
            offsets.write((position + np.cumsum(lengths)).astype(INDEX).tobytes())
            counts.write(learn.tobytes() if masked else b"")
            hashes.write(digests.tobytes())
            position += int(lengths.sum())
            if units:
                found, each = _parts_of(path.with_name(path.name.replace("lengths", "units")), lengths, learn)
                starts.write((part + np.cumsum(each)).astype(INDEX).tobytes())
                parts.write(found[list(PART.fields or ())].astype(PART).tobytes())
                shared.write(found["shared"].tobytes())
                part += len(found)
            path.unlink()
    names = {
        "documents.bin": True, "hashes.bin": True, "supervised.bin": masked,
        **dict.fromkeys(("units.bin", "parts.bin", "shared.bin"), units),
    }  # fmt: skip
    for name in (name for name, kept in names.items() if not kept):
        (into / name).unlink()
    return {name: sha256_of(into / name) for name, kept in names.items() if kept}, part if units else None


def _parts_of(path: Path, lengths: np.ndarray, learn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of the documents of a shard, and how many each has; a document that is no unit is one part."""
    if not path.exists():
        parts = np.zeros(len(lengths), WRITTEN)
        parts["length"], parts["supervised"], parts["value"] = lengths, learn, np.nan
        return parts, np.ones(len(lengths), np.int64)
    raw, at, found, each = path.read_bytes(), 0, [], []
    while at < len(raw):  # of each document: how many parts, then these
        count = int(np.frombuffer(raw, INDEX, 1, at)[0])
        found.append(np.frombuffer(raw, WRITTEN, count, at + INDEX.itemsize))
        each.append(count)
        at += INDEX.itemsize + count * WRITTEN.itemsize
    path.unlink()
    return np.concatenate([np.zeros(0, WRITTEN), *found]), np.array(each, np.int64)


def _describe(entry: Input, results: list[dict[str, Any]], hashes: dict[str, str]) -> dict[str, Any]:
    described = {
        "name": entry.source.path,
        "kind": entry.kind,
        "format": entry.format,
        "columns": entry.source.columns,
        "use": entry.source.use,
        "chat_template": entry.source.chat_template,
        "marked_by": next((result["marked_by"] for result in results if result["marked_by"]), None),
        "units": entry.units,
        "values": next((result["values"] for result in results if result["values"]), None),
        **{
            name: sum(result[name] for result in results)
            for name in ("documents", "chats", "tokens", "supervised", "equal")
        },
        "dropped": dict(sum((Counter(result["dropped"]) for result in results), Counter())),
        "first": {
            why: [place for result in results for place in result["first"].get(why, ())][:FIRST]
            for why in sorted({why for result in results for why in result["first"]})
        },
    }
    stamps = {path: entry.files.stamps[path] for _, path in entry.recorded}
    files = [
        {"bytes": stamps[path].bytes, "mtime_ns": stamps[path].mtime_ns, "name": name, "sha256": hashes[str(path)]}
        for name, path in entry.recorded
    ]
    return {**described, "dataset": entry.dataset, "files": files, "left_out": entry.files.left_out}


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
