"""Text to token ids, in bounded memory and exactly as the tokenizer does it in one go.

A short text is one call. A long one, a book or a repository of many megabytes, would need about a hundred bytes of
working memory per character, so it is encoded window by window. Tokenizers look around only a little, but how far is
nowhere written down, so every cut is tested: the tokens around it must come out the same with less text before and
after it. If not, another place is tried, then a larger window; in the worst case the text is encoded whole. So the
result never depends on the window.

A text may hold the text of a special token: `</s>` in a page about tokenizers. That is no end of the document, so it is encoded
letter by letter, unless `parse` asks for special tokens. Some tokenizers (Unigram) know no other way to write it than the special
token itself; then the document is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .tokenizer import TokenizerParts

WINDOW = 1 << 18  # characters
_AROUND = 2048  # characters of context on both sides of a cut
_TRIES = 8


class Encoder:
    """The Rust tokenizer of some `TokenizerParts`. parse: the text of a special token becomes that token."""

    def __init__(self, parts: TokenizerParts, window: int = WINDOW, *, parse: bool = False):
        from tokenizers import Tokenizer

        self.parts = parts
        self.window = window
        self._backend = Tokenizer.from_str(parts.backend)
        self._backend.encode_special_tokens = not parse
        self._refused = {} if parse else _never_meant(parts)

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, none longer than the window. No special tokens are added. They are still to be checked."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def check(self, ids: Iterable[int]) -> None:
        """ValueError if plain text has become a special token all the same."""
        if special := self._refused.keys() & set(ids):
            raise ValueError(
                f"the text holds {self._refused[min(special)]!r}, of which this tokenizer makes the special token even as plain "
                "text; take it out, or allow it with special_tokens: parse"
            )

    def stream(self, pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids, and the characters that each token starts at and ends before [tokens, 2], of a text that comes in pieces."""
        for ids, places in self._stream(pieces):
            self.check(ids.tolist())
            yield ids, places

    def _stream(self, pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        text = ""
        base = done = 0  # characters before `text`; characters of `text` whose tokens are out
        window = self.window
        for piece in pieces:
            text += piece
            if len(text) <= window:
                continue
            ids, places = self._encode(text)
            starts = places[:, 0]
            cut = self._cut(text, ids, starts, done)
            if cut is None:
                window = 2 * len(text)
                continue
            out = (starts >= done) & (starts < cut)
            yield ids[out], places[out] + base
            keep = max(0, cut - _AROUND)
            text, base, done, window = text[keep:], base + keep, cut - keep, self.window
        ids, places = self._encode(text)
        out = places[:, 0] >= done
        yield ids[out], places[out] + base

    def pieces(self, text: str) -> Iterator[str]:
        """A text for `stream`, in windows."""
        for start in range(0, max(len(text), 1), self.window):
            yield text[start : start + self.window]

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _cut(self, text: str, ids: np.ndarray, starts: np.ndarray, done: int) -> int | None:
        """A character near the end of the text before which all tokens are final; None = not found."""
        if len(starts) < 2 or (np.diff(starts) < 0).any():
            return None
        # places where one token ends and another begins; several tokens of one character belong together
        places = starts[1:][np.diff(starts) > 0]
        last = len(text) - _AROUND
        candidates = places[(places > max(done, 0)) & (places <= last)]
        step = 7  # tokens between tries: a run of equal letters is left soon
        for place in candidates[::-step][:_TRIES].tolist():
            begin, end = max(0, place - _AROUND), place + _AROUND // 2
            few, where = self._encode(text[begin:end])
            where = where[:, 0] + begin
            # with less text on both sides: the same tokens around the cut?
            low, high = place - _AROUND // 2 if begin else 0, place + _AROUND // 4
            here, there = (starts >= low) & (starts < high), (where >= low) & (where < high)
            if np.array_equal(ids[here], few[there]) and np.array_equal(starts[here], where[there]):
                return place
        return None


def _never_meant(parts: TokenizerParts) -> dict[int, str]:
    """Special tokens that no plain text has: all but those for what the tokenizer does not know."""
    model = json.loads(parts.backend)["model"]
    unknown = model.get("unk_token")
    if unknown is None and model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    return {
        number: text
        for text, number in parts.special.items()
        if text != unknown and not (model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text))
    }
