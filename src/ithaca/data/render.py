"""A record becomes a document: token ids, and which of them are supervised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .chat import Spans, render_chat
from .chat_template import render as render_template
from .encode import Encoder
from .quotes import Quotes, QuotingEncoder, Render
from .source import OPTIONAL, Source, did_you_mean
from .tokenizer import TokenizerParts

IGNORE = -100

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids; supervised or not, None = all


class Encoders:
    """The encoders of a job, made when they are needed: each holds a vocabulary.

    parse: the text of a special token becomes that token wherever it stands. Otherwise only what a chat template writes does."""

    def __init__(self, parts: TokenizerParts, *, parse: bool):
        self.parts, self.parse = parts, parse

    @cached_property
    def plain(self) -> Encoder:
        return Encoder(self.parts, parse=self.parse)

    @cached_property
    def chat(self) -> Encoder:
        return self.plain if self.parse else Encoder(self.parts, parse=True)

    @cached_property
    def quoting(self) -> QuotingEncoder:
        return QuotingEncoder(self.parts)

    @cached_property
    def quotes(self) -> Quotes:
        return Quotes(() if self.parse else self.parts.special)


class Rendered(NamedTuple):
    text: str  # empty: an empty document
    spans: Spans | None  # ranges of characters that are supervised; None = all
    encoder: Encoder


def render_text(record: dict[str, Any], kind: str, source: Source, encoders: Encoders) -> Rendered:
    """The text of a record, and how it is to be encoded."""
    if kind == "text":
        value = _get(record, source, "text")
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"the column {source.column('text')!r} is a {type(value).__name__}, not a text: {_short(value)}"
            )
        return Rendered(value or "", None, encoders.plain)
    if kind == "completion":
        prompt, completion = (_get(record, source, name) for name in ("prompt", "completion"))
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                hint = "; for lists of messages use the column messages" if isinstance(value, list) else ""
                raise ValueError(f"the column {source.column(name)!r} is a {type(value).__name__}, not a text{hint}")
        return Rendered(prompt + completion, [(len(prompt), len(prompt) + len(completion))], encoders.plain)
    assert kind == "chat"
    template = encoders.parts.chat_template
    if template is None:
        raise ValueError(
            "this is a chat, but the tokenizer has no chat template; use the tokenizer of the instruct model, or give a template "
            "(--chat-template)"
        )
    messages = _get(record, source, "messages")
    if not messages:
        return Rendered("", [], encoders.chat)

    def render(messages: Any, tools: Any) -> tuple[str, Spans]:
        return render_chat(messages, template, encoders.parts.special_tokens, tools)

    return _quoted(messages, record.get(source.column("tools")), render, encoders)


def _quoted(messages: Any, tools: Any, render: Render, encoders: Encoders) -> Rendered:
    """A chat in which only the template's own special tokens are meant."""
    text, spans, own = encoders.quotes.render(messages, tools, render)
    if own is None:
        return Rendered(text, spans, encoders.chat)
    return Rendered(encoders.quoting.with_aliases(text, own), spans, encoders.quoting)


def prompt_ids(asked: str, encoders: Encoders) -> list[int]:
    """A question as a model reads it: through the chat template up to where the answer begins; as it stands where there is none."""
    parts = encoders.parts
    template, before, after = parts.chat_template, list(parts.prefix), list(parts.suffix)
    rendered = Rendered(asked, None, encoders.plain)
    if template is not None:
        before, after = [], []

        def render(messages: Any, tools: Any) -> tuple[str, Spans]:
            return render_template(template, messages, tools, parts.special_tokens, prompt=True, mark=False)

        rendered = _quoted([{"role": "user", "content": asked}], None, render, encoders)
    pieces = rendered.encoder.stream(rendered.encoder.pieces(rendered.text))
    return [*before, *(int(token) for ids, _ in pieces for token in ids), *after]


def encode_text(text: str, spans: Spans | None, kind: str, encoder: Encoder, eos: bool) -> Iterator[Tokens]:
    """Ids of one text in pieces, with what the tokenizer puts around it and the end-of-sequence token. A chat's template has all
    that already."""
    before, after = around(encoder.parts, kind, eos)
    if before:
        yield np.array(before), None if spans is None else np.zeros(len(before), bool)
    for ids, starts in encoder.stream(encoder.pieces(text)):
        yield ids, None if spans is None else inside(starts, spans)
    if after:
        yield np.array(after), None  # learned: it ends what was to be learned


def around(parts: TokenizerParts, kind: str, eos: bool) -> tuple[list[int], list[int]]:
    """Tokens before and after the text of a document."""
    if kind == "chat":
        return [], []
    after = list(parts.suffix)
    if eos and parts.eos is not None and after[-1:] != [parts.eos]:
        after.append(parts.eos)
    return list(parts.prefix), after


def inside(starts: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens begin inside one of the spans, which are in order and do not overlap."""
    begins = np.array([begin for begin, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    which = np.searchsorted(begins, starts, side="right") - 1
    return (which >= 0) & (starts < ends[which]) if len(spans) else np.zeros(len(starts), bool)


def given_tokens(record: dict[str, Any], source: Source) -> Tokens:
    """Ids that are in the record already."""
    ids = _numbers(_get(record, source, "input_ids"), source.column("input_ids"))
    mask_name, label_name = source.column("attention_mask"), source.column("labels")
    mask = record.get(mask_name)
    if mask is not None and not all(mask):
        raise ValueError(f"{mask_name!r} has zeros, so the ids are padded; pack them without padding")
    if record.get(label_name) is None:
        return ids, None
    labels = _numbers(record[label_name], label_name)
    if len(labels) != len(ids):
        raise ValueError(f"{label_name!r} has {len(labels):,} numbers but there are {len(ids):,} ids")
    seen = labels != IGNORE
    wrong = np.flatnonzero(seen & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{label_name!r}[{at}] is {int(labels[at])} but the id there is {int(ids[at])}; labels must be the ids themselves, or "
            "-100 where not supervised. Do not shift them: that is done later"
        )
    return ids, seen


def columns_of(kind: str, names: tuple[str, ...], source: Source) -> list[str]:
    """The columns a kind of record uses, as the data calls them."""
    return [source.column(name) for name in (*names, *OPTIONAL.get(kind, ()))]


def _get(record: dict[str, Any], source: Source, name: str) -> Any:
    column = source.column(name)
    if column not in record:
        raise ValueError(
            f"the column {column!r} is missing{did_you_mean(column, record)}; present are "
            f"{', '.join(map(repr, record)) or 'none'}. Map it, as in columns: {{{name}: NAME}}"
        )
    return record[column]


def _numbers(value: Any, column: str) -> np.ndarray:
    if value is None:
        return np.zeros(0, np.int64)
    if not isinstance(value, (list, np.ndarray)):
        raise ValueError(f"the column {column!r} is a {type(value).__name__}, not a list of token ids: {_short(value)}")
    array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        odd = next((item for item in value if not isinstance(item, int) or isinstance(item, bool)), value)
        raise ValueError(f"the column {column!r} holds {_short(odd)}, which is no token id; ids are whole numbers")
    return array.astype(np.int64)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
