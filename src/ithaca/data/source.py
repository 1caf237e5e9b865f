"""Sources: what a user points at, and the parts of it that workers read.

A source is a file, a folder, a glob, the same of a repository on the Hub (hf:OWNER/NAME, fetch.py), or a saved Hugging Face
dataset. Its format is told by file names, what its records are by their columns:

    text                                 plain text
    messages [, tools]                   a chat, rendered with a chat template; only assistant turns are supervised
    conversations [, system, tools]      the same, as ShareGPT writes it
    instruction, output [, input, ...]   the same, as Alpaca writes it
    prompt, completion                   texts or lists of messages; only the completion is supervised
    chosen, rejected [, prompt]          two answers, a unit; with `use: chosen` only the chosen one is read, and supervised
    prompt, completions [, rewards, ...] completions that were sampled and judged, a unit
    nodes [, tools]                      a conversation or text with branches, a unit (nodes.py)
    input_ids [, labels]                 token ids; labels of -100 are not supervised

formats.py reads them. A *unit* is several documents that stay together in one row, because what is learned is in how they differ
(objectives dpo and policy are made of them), or because they share what they begin with.

`columns` maps these names to those of the data: {"text": "body"}. A text file is one document. A .npy file is token
ids: an array of one dimension is one document, or as many as NAME.offsets.npy beside it says; of two dimensions, a
document per row.

Nothing is guessed twice: formats or columns that allow two readings are refused with the question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .stamps import Stamp

FORMATS = ("auto", "jsonl", "json", "parquet", "txt", "tokens", "datasets")
KINDS = {
    "text": ("text",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "rollout": ("prompt", "completions"),
    "tree": ("nodes",),
    "tokens": ("input_ids",),
}
OPTIONAL = {
    "chat": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
    "completion": ("tools",),
    "preference": ("prompt", "tools"),
    "rollout": ("rewards", "advantages", "logprobs", "tools"),
    "tree": ("tools",),
    "tokens": ("labels", "attention_mask"),
}
TEMPLATED = (
    "chat",
    "sharegpt",
    "alpaca",
    "completion",
    "preference",
    "rollout",
    "tree",
)  # what a chat template may render
USES = ("chosen",)
VALUES = ("rewards", "advantages")  # what completions of a rollout are judged by
_NAMES = sorted({name for names in (*KINDS.values(), *OPTIONAL.values()) for name in names})


@dataclass(frozen=True)
class Source:
    """What the user asked for."""

    path: str
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    kind: str | None = None  # one of KINDS; None = told by the columns
    split: str | None = None  # of a dataset; None = train, or the only one
    use: str | None = None  # of preferences: what is learned from, one of USES
    chat_template: str | None = None  # one of ours by name, a file, or the text itself; None = the tokenizer's

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(
                f"source {self.path}: format {self.format!r} is unknown; choose one of {', '.join(FORMATS)}"
            )
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"source {self.path}: kind {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if self.use is not None and self.use not in USES:
            raise ValueError(f"source {self.path}: use {self.use!r} is unknown; choose one of {', '.join(USES)}")
        for name in self.columns:
            if name not in _NAMES:
                raise ValueError(
                    f"source {self.path}: columns maps {name!r}, which is not a name known here{did_you_mean(name, _NAMES)}; "
                    f"known are {', '.join(_NAMES)}"
                )

    def column(self, name: str) -> str:
        """What a column is called in the data."""
        return self.columns.get(name, name)


@dataclass(frozen=True)
class Piece:
    """A file of a source, or a range of it."""

    path: str
    start: int  # jsonl: bytes. parquet: row groups. datasets: rows. json, txt, tokens: 0
    stop: int
    size: int  # bytes, for the progress bar
    stamp: Stamp | None = None  # of the file when it was found; None: a dataset


@dataclass(frozen=True)
class Part:
    """As much of a source as goes into one shard; one worker reads it."""

    source: int
    format: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def did_you_mean(name: str, among: Iterable[str]) -> str:
    close = get_close_matches(name, list(among), 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_dataset(source: Source) -> bool:
    path = Path(source.path).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json", "state.json"))
    return source.format == "datasets" or (source.format == "auto" and saved)


def tell_kind(source: Source, columns: Iterable[str], where: str) -> str:
    """What the records are, by the columns of the first one."""
    present = list(columns)
    candidates = {kind: names for kind, names in KINDS.items() if source.kind in (None, kind)}
    fitting = [kind for kind, names in candidates.items() if all(source.column(name) in present for name in names)]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(map(repr, present)) or "none"
    if not fitting:
        wanted = [source.column(name) for names in candidates.values() for name in names]
        near = next((hint for name in wanted if (hint := did_you_mean(name, present))), "")
        options = " or ".join(
            " and ".join(repr(source.column(name)) for name in names) for names in candidates.values()
        )
        raise ValueError(
            f"{where}: none of the columns {options} is there{near}; present are {shown}. Map them, as in columns: {{text: body}}"
        )
    raise ValueError(
        f"{where}: the columns {shown} can be read as {' or as '.join(fitting)}; choose with kind: {' | '.join(fitting)}"
    )


def has_units(kind: str, use: str | None) -> bool:
    """Whether a record is several documents that stay together."""
    return kind in ("rollout", "tree") or (kind == "preference" and use is None)


def check_use(source: Source, kind: str) -> None:
    """ValueError where it is said which of two answers is learned, and there is but one."""
    if kind != "preference" and source.use is not None:
        raise ValueError(f"source {source.path}: use is for preferences, and this is {kind}; leave it out")


def sources_of(configured: Iterable[Any]) -> list[Source]:
    """Sources as the `data.sources` of a config lists them. Synthetic ones are not packed and left to the caller."""
    sources = []
    for entry in configured:
        if entry.path is None:
            continue
        columns = {name: column for name, column in vars(entry.columns).items() if column != name}
        kind = entry.kind or ("chat" if entry.chat else None)
        sources.append(Source(entry.path, entry.format, columns, kind, entry.split, entry.use, entry.chat_template))
    return sources
