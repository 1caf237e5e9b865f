"""Chats that quote special tokens: somebody writes `<|end|>` in a message, and it must not end the turn.

The text of a chat mixes both: the template's own markers have to become special tokens, what messages say must not. Which is which
is found by rendering twice. The second time every special token that is written in a message is replaced by a guard, a
code of characters that Unicode sets aside and no text has; a third time also what could be the beginning of one at the end of a
string, or the end of one at its beginning, as templates may join strings. With the originals put back the renderings must be the
same; then the special tokens that are left in the guarded ones are the template's. A template that looks at such a text itself, or
cuts through it, is refused.

To encode such a chat, each of the template's markers is replaced by an alias of the same length, again of such characters, that the
tokenizer gets as an added token with the properties of the original; nothing else is special for it. So it splits the text
where it would, places are the same, and the aliases' ids are replaced by the real ones.

A chat without quotes takes none of these ways: it is encoded as always.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from .encode import WINDOW, Encoder
from .tokenizer import TokenizerParts

_CODES = [chr(0xFDD0 + number) for number in range(32)]  # of guards: one to begin with, then three
_ALIASES = [chr((plane << 16) + 0xFFFE + last) for plane in range(17) for last in (0, 1)]
_GUARD = f"{_CODES[0]}[{''.join(_CODES[1:])}]{{3}}"
_SET_ASIDE = re.compile(f"[{''.join(_CODES + _ALIASES)}]")

Render = Callable[[Any, Any], tuple[str, Any]]  # messages, tools -> text, and the ranges that are supervised


class Quotes:
    """What in a chat is the text of one of these special tokens."""

    def __init__(self, special: Iterable[str]):
        longest_first = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._places = re.compile(f"{_GUARD}|{self.special.pattern}")
        self._begins = {text[:size] for text in longest_first for size in range(1, len(text))}
        self._ends = {text[size:] for text in longest_first for size in range(1, len(text))}
        self._longest = max((len(text) for text in longest_first), default=0) - 1

    def render(self, messages: Any, tools: Any, render: Render) -> tuple[str, Any, list[tuple[int, int]] | None]:
        """Text and supervised ranges of a chat. Third: the ranges of the template's special tokens, where others are only quoted;
        None where none is."""
        text, spans = render(messages, tools)
        for message in messages:
            if self.special.search(message["role"]):
                raise ValueError(f"the role {message['role']!r} holds a special token; a role is a plain word")
        own = every = [match.span() for match in self.special.finditer(text)]
        for edges in (False, True) if every else ():
            own = self._own(text, every, messages, tools, render, edges)
        return text, spans, None if own == every else own

    def _own(
        self, text: str, every: list[tuple[int, int]], messages: Any, tools: Any, render: Render, edges: bool
    ) -> list[tuple[int, int]]:
        """Of the special tokens in a rendered text, those that are the template's. edges: see to what strings join to as well."""
        codes: dict[str, str] = {}  # what is guarded -> its guard
        guarded = [
            {name: value if name == "role" else self._guarded(value, codes, edges) for name, value in message.items()}
            for message in messages
        ]
        guarded_tools = self._guarded(tools, codes, edges)
        if not codes:
            return every
        if _SET_ASIDE.search(text):
            raise ValueError(
                "the chat holds characters that are none (U+FDD0 and its like) beside a special token; take them out"
            )
        with suppress(ValueError):  # a template may refuse the guarded chat
            restored, own = self._restored(
                render(guarded, guarded_tools)[0], {code: original for original, code in codes.items()}
            )
            if restored == text:
                return own
        raise ValueError(
            f"a message holds {min(codes, key=len)!r}, a special token or a part of one, and the chat template renders it "
            "otherwise without it; take it out of the message, or allow it with special_tokens: parse"
        )

    def _guarded(self, value: Any, codes: dict[str, str], edges: bool) -> Any:
        if isinstance(value, str):
            return self._guard(value, codes, edges)
        if isinstance(value, list):
            return [self._guarded(item, codes, edges) for item in value]
        if isinstance(value, dict):
            return {
                # a type is what templates ask for, not what they write
                self._guarded(name, codes, False): self._guarded(item, codes, edges and name != "type")
                for name, item in value.items()
            }
        return value

    def _guard(self, text: str, codes: dict[str, str], edges: bool) -> str:
        text = self.special.sub(lambda match: _code(match.group(), codes), text)
        if edges and (end := self._edge(text, self._begins, -1)):
            text = text[: -len(end)] + _code(end, codes)
        if edges and (begin := self._edge(text, self._ends, 1)):
            text = _code(begin, codes) + text[len(begin) :]
        return text

    def _edge(self, text: str, known: set[str], side: int) -> str:
        """The longest part of a special token that a text ends (-1) or begins (1) with."""
        for size in range(min(self._longest, len(text)), 0, -1):
            part = text[:size] if side > 0 else text[-size:]
            if part in known:
                return part
        return ""

    def _restored(self, guarded: str, originals: dict[str, str]) -> tuple[str, list[tuple[int, int]]]:
        """The text with what was guarded put back, and where in it the template's special tokens are."""
        out, own, at, length = [], [], 0, 0
        for match in self._places.finditer(guarded):
            between = guarded[at : match.start()]
            part = match.group()
            length += len(between)
            if part in originals:
                part = originals[part]
            else:
                own.append((length, length + len(part)))
            out += [between, part]
            length, at = length + len(part), match.end()
        return "".join([*out, guarded[at:]]), own


def _code(text: str, codes: dict[str, str]) -> str:
    if text not in codes:
        number, base = len(codes), len(_CODES) - 1
        if number >= base**3:
            raise ValueError(f"the chat quotes more than {base**3:,} special tokens")
        digits = (number // base**2, number // base % base, number % base)
        codes[text] = _CODES[0] + "".join(_CODES[1 + digit] for digit in digits)
    return codes[text]


class QuotingEncoder(Encoder):
    """Encodes a text in which only some special tokens are meant."""

    def __init__(self, parts: TokenizerParts, window: int = WINDOW):
        from tokenizers import AddedToken

        super().__init__(parts, window)
        known = self._backend.get_added_tokens_decoder()
        self._alias = {text: _alias(number, len(text)) for number, text in enumerate(parts.special)}
        for text, number in parts.special.items():
            like = known[number]
            if like.single_word:
                raise ValueError(
                    f"the tokenizer takes {text!r} for a special token only as a word of its own; take it out"
                )
            token = AddedToken(
                self._alias[text], lstrip=like.lstrip, rstrip=like.rstrip, normalized=like.normalized, special=False
            )
            self._backend.add_tokens([token])
        self._first = self._backend.get_vocab_size() - len(self._alias)
        aliases = [self._backend.token_to_id(alias) for alias in self._alias.values()]
        assert aliases == list(range(self._first, self._first + len(aliases)))
        self._real = np.array(list(parts.special.values()), np.int64)

    def with_aliases(self, text: str, own: list[tuple[int, int]]) -> str:
        """The text with the special tokens at these places replaced by their aliases, of the same length."""
        out, at = [], 0
        for begin, end in own:
            out += [text[at:begin], self._alias[text[begin:end]]]
            at = end
        return "".join([*out, text[at:]])

    def without_aliases(self, text: str) -> str:
        for original, alias in self._alias.items():
            text = text.replace(alias, original)
        return text

    def stream(self, pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        wanted = seen = 0

        def counted() -> Iterator[str]:
            nonlocal wanted
            for piece in pieces:
                wanted += piece.count(_ALIASES[-1])
                yield piece

        for ids, places in super().stream(counted()):
            special = ids >= self._first
            seen += int(special.sum())
            ids = ids.copy()
            ids[special] = self._real[ids[special] - self._first]
            yield ids, places
        if wanted != seen:
            raise ValueError(
                "this tokenizer cannot keep the template's special tokens apart from quoted ones; take those out"
            )


def _alias(number: int, length: int) -> str:
    """Begins with the last character of all, which no alias goes on with, so none is the beginning of another and a bit."""
    base, digits = len(_ALIASES) - 1, []
    for _ in range(length - 1):
        number, digit = divmod(number, base)
        digits.append(_ALIASES[digit])
    if number:
        raise ValueError("the tokenizer has too many special tokens of one or two letters to tell quoted ones apart")
    return _ALIASES[-1] + "".join(digits)
