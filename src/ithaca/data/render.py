"""A record becomes a document: token ids, and which of them are supervised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .branches import shared_with
from .chat import Spans, is_marked, learned_spans, render_chat, up_to_end
from .chat_template import render as render_template
from .encode import Encoder
from .formats import (
    Answered,
    Chat,
    Ids,
    Pair,
    get,
    is_empty,
    read_example,
    read_preference,
    read_rollouts,
    short,
)
from .nodes import Said, read_ways
from .quotes import Quotes, QuotingEncoder, Render
from .source import OPTIONAL, Source
from .templates import shipped, twin_of
from .tokenizer import TokenizerParts

IGNORE = -100

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids; supervised or not, None = all


class Encoders:
    """The encoders of a job, made when they are needed: each holds a vocabulary.

    parse: the text of a special token becomes that token wherever it stands. Otherwise only what a chat template writes does."""

    def __init__(self, parts: TokenizerParts, *, parse: bool):
        self.parts, self.parse = parts, parse
        self._twins: dict[str, str | None] = {}  # template -> the name of ours that renders as it does

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

    @cached_property
    def special(self) -> re.Pattern[str]:
        longest_first = sorted(self.parts.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def twin(self, template: str) -> str | None:
        """The name of our template that marks the turns of this one, which does not."""
        if template not in self._twins:
            self._twins[template] = None if is_marked(template) else twin_of(template, self.parts.special_tokens)
        return self._twins[template]

    def marked_by(self, source: Source) -> str | None:
        """What was found to mark the turns of a source, if anything was looked for."""
        return self._twins.get(self.template(source) or "")

    def template(self, source: Source) -> str | None:
        """The template of a source, as text."""
        return self.parts.chat_template if source.chat_template is None else source.chat_template


class Rendered(NamedTuple):
    text: str  # empty: an empty document
    spans: Spans | None  # ranges of characters that are supervised; None = all
    encoder: Encoder
    chat: bool = False  # the template has written all there is


def render_text(record: dict[str, Any], kind: str, source: Source, encoders: Encoders) -> Rendered:
    """The text of a record, and how it is to be encoded."""
    example = read_example(record, kind, source, template=encoders.template(source) is not None)
    if isinstance(example, Ids):
        raise ValueError(
            "these are token ids; with use: chosen preferences are texts or messages. Give them as kind: tokens"
        )
    return render_example(example, source, encoders)


def render_example(example: str | Pair | Chat, source: Source, encoders: Encoders) -> Rendered:
    template = encoders.template(source)
    if isinstance(example, str):
        return Rendered(example, None, encoders.plain)
    if isinstance(example, Pair):
        begin = len(example.prompt)
        return Rendered(example.prompt + example.completion, [(begin, begin + len(example.completion))], encoders.plain)
    if template is None:
        raise ValueError(
            "this is a chat, but the tokenizer has no chat template; use the tokenizer of the instruct model, or give a template "
            "(--chat-template)"
        )
    return _render_chat(example, template, encoders)


def _render_chat(chat: Chat, template: str, encoders: Encoders) -> Rendered:
    if not chat.messages:
        return Rendered("", [], encoders.chat, chat=True)
    name = encoders.twin(template)
    twin = None if name is None else shipped(name)

    def render(messages: Any, tools: Any) -> tuple[str, Spans]:
        return render_chat(messages, template, encoders.parts.special_tokens, tools, twin)

    rendered = _quoted(chat.messages, chat.tools, render, encoders)
    if chat.all_learned:
        return rendered
    return rendered._replace(spans=learned_spans(rendered.spans or [], chat.messages, chat.learned))


def _quoted(messages: Any, tools: Any, render: Render, encoders: Encoders) -> Rendered:
    """A chat in which only the template's own special tokens are meant."""
    text, spans, own = encoders.quotes.render(messages, tools, render)
    ends = {end for _, end in own} if own is not None else {match.end() for match in encoders.special.finditer(text)}
    spans = up_to_end(text, spans, ends)
    if own is None:
        return Rendered(text, spans, encoders.chat, chat=True)
    return Rendered(encoders.quoting.with_aliases(text, own), spans, encoders.quoting, chat=True)


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


def encode_text(text: str, spans: Spans | None, encoder: Encoder, eos: bool, *, chat: bool = False) -> Iterator[Tokens]:
    """Ids of one text in pieces, with what the tokenizer puts around it and the end-of-sequence token. A chat's template has all
    that already."""
    before, after = ([], []) if chat else around(encoder.parts, eos)
    if before:
        yield np.array(before), None if spans is None else np.zeros(len(before), bool)
    for ids, places in encoder.stream(encoder.pieces(text)):
        yield ids, None if spans is None else inside(places, spans)
    if after:
        yield np.array(after), None  # learned: it ends what was to be learned


def around(parts: TokenizerParts, eos: bool) -> tuple[list[int], list[int]]:
    """Tokens before and after the text of a document."""
    after = list(parts.suffix)
    if eos and parts.eos is not None and after[-1:] != [parts.eos]:
        after.append(parts.eos)
    return list(parts.prefix), after


def inside(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens [tokens, 2] have a character in one of the spans, which are in order and do not overlap: also one that the
    last blank of a header begins and the first word of the answer ends, or nobody would learn that word."""
    spans = [(begin, end) for begin, end in spans if begin < end]
    if not spans:
        return np.zeros(len(places), bool)
    begins, ends = np.array(spans, np.int64).T
    starts, stops = (
        places[:, 0],
        np.maximum(places[:, 1], places[:, 0] + 1),
    )  # some tokens have no character of their own
    which = np.searchsorted(ends, starts, side="right")  # the first span that ends behind the token's start
    return (which < len(ends)) & (stops > begins[np.minimum(which, len(ends) - 1)])


class Unit(NamedTuple):
    """Documents that stay together: ids and what is supervised of each, and what else is known of them."""

    parts: list[tuple[np.ndarray, np.ndarray]]
    chats: int  # of the parts, how many a chat template rendered
    left_out: str | None = None  # a key of manifest.DROPPED: why this teaches nothing
    what: str | None = None  # of source.VALUES
    values: list[float] | None = None
    logprobs: list[np.ndarray] | None = None
    learned: bool = False  # also of what is supervised, the parts share what they begin with
    idle: int = 0  # parts that were left out, as nothing of them is supervised

    @property
    def shared(self) -> list[int]:
        """Of each part, tokens that need not be computed again behind the part before it."""
        both = zip(self.parts, self.parts[1:], strict=False)
        return [0, *(shared_with(one, other, learned=self.learned) for one, other in both)]


def read_unit(record: dict[str, Any], kind: str, source: Source, encoders: Encoders | None, eos: bool) -> Unit:
    """A pair, completions of one prompt, or the ways through a tree, as tokens."""
    if kind == "tree":
        return _read_tree(record, source, encoders, eos)
    if kind == "preference":
        examples, rollouts = list(read_preference(record, source)), None
    else:
        rollouts = read_rollouts(record, source)
        examples = rollouts.examples
    if any(map(is_empty, examples)):
        return Unit([], 0, "no_answer")
    parts, chats = [], 0
    for at, example in enumerate(examples):
        ids, seen, chat = _tokens_of(example, source, encoders, eos)
        if seen[:1].any():
            raise ValueError(
                "the prompt has no token, so nothing predicts the first one of what follows; give it a prompt"
            )
        if not seen.any():
            return Unit([], 0, "unsupervised")
        chats += chat
        parts.append((ids, seen))
        if rollouts is not None and rollouts.logprobs is not None and int(seen.sum()) != len(rollouts.logprobs[at]):
            ends = (
                "" if isinstance(example, Ids) else ", the end token included (data.eos). Give completions as token ids"
            )
            raise ValueError(
                f"{source.column('logprobs')}[{at}] has {len(rollouts.logprobs[at])} numbers, and its completion has "
                f"{int(seen.sum())} tokens{ends}"
            )
    if rollouts is None:
        same = all(np.array_equal(one, other) for one, other in zip(*parts, strict=True))
        return Unit(parts, chats, "same" if same else None)
    old = rollouts.logprobs
    return Unit(parts, chats, None, rollouts.what, rollouts.values, None if old is None else list(map(np.array, old)))


def _read_tree(record: dict[str, Any], source: Source, encoders: Encoders | None, eos: bool) -> Unit:
    ways = read_ways(record, source)
    parts, values, chats, idle = [], [], 0, 0
    for at, example in enumerate(ways.examples):
        ids, seen, chat = _tokens_of(example, source, encoders, eos)
        seen = seen & (np.arange(len(seen)) > 0)  # nothing predicts the first token
        chats += chat
        if not seen.any():
            idle += 1
            continue
        parts.append((ids, seen))
        values += [] if ways.values is None else [ways.values[at]]
    if not parts:
        return Unit([], 0, "unsupervised")
    judged = ways.values is not None
    return Unit(
        parts, chats, None, "rewards" if judged else None, values if judged else None, learned=not judged, idle=idle
    )


def _tokens_of(
    example: Answered | Said, source: Source, encoders: Encoders | None, eos: bool
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Ids, which of them are supervised, and whether a chat template made them."""
    if isinstance(example, Ids):
        ids = np.array([*example.prompt, *example.completion], np.int64)
        return ids, np.arange(len(ids)) >= len(example.prompt), False
    if isinstance(example, Said) and not isinstance(example.pieces[0], str):
        ids = np.concatenate([np.array(piece, np.int64) for piece in example.pieces])
        return ids, np.repeat(example.learned, [len(piece) for piece in example.pieces]), False
    if encoders is None:
        raise ValueError("these are texts, so a tokenizer is needed; give its folder, or token ids")
    if isinstance(example, Said):
        return _tokens_of_texts(example, encoders, eos)
    text, spans, encoder, chat = render_example(example, source, encoders)
    check_characters(text)
    pieces = list(encode_text(text, spans, encoder, eos, chat=chat))
    ids = np.concatenate([ids for ids, _ in pieces])
    return ids, np.concatenate([np.ones(len(ids), bool) if seen is None else seen for ids, seen in pieces]), chat


def _tokens_of_texts(said: Said, encoders: Encoders, eos: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    text, ends = "".join(said.pieces), np.cumsum([len(piece) for piece in said.pieces]).tolist()
    check_characters(text)
    spans = [span for span, learned in zip(zip([0, *ends], ends, strict=False), said.learned, strict=True) if learned]
    pieces = list(encode_text(text, spans, encoders.plain, eos))
    ids = np.concatenate([ids for ids, _ in pieces])
    # what ends the document belongs to its last piece
    seen = np.concatenate([np.full(len(ids), said.learned[-1]) if seen is None else seen for ids, seen in pieces])
    return ids, seen, False


def check_characters(text: str) -> None:
    """JSON can write half a character of UTF-16; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start:,} is half a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character; "
            "write the text as UTF-8"
        ) from None


def given_tokens(record: dict[str, Any], source: Source) -> Tokens:
    """Ids that are in the record already."""
    ids = _numbers(get(record, source, "input_ids"), source.column("input_ids"))
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


def _numbers(value: Any, column: str) -> np.ndarray:
    if value is None:
        return np.zeros(0, np.int64)
    if not isinstance(value, (list, np.ndarray)):
        raise ValueError(f"the column {column!r} is a {type(value).__name__}, not a list of token ids: {short(value)}")
    array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        odd = next((item for item in value if not isinstance(item, int) or isinstance(item, bool)), value)
        raise ValueError(f"the column {column!r} holds {short(odd)}, which is no token id; ids are whole numbers")
    return array.astype(np.int64)
