"""What synthetic questions are asked in: words where there is a tokenizer, token ids where there is none.

A task (tasks.py) says "hide the fact that key 3 has value 5, ask for key 3". A language says which tokens that is:

- `Words`, with the model's tokenizer: English sentences, as RULER (arXiv 2404.06654) asks them. For pretrained models.
- `Ids`, with nothing but the size of the vocabulary: keys, values and hay are token ids drawn from it, a fact is "k v" and a
  question is "k". A model that copies what followed last time (an induction head) can answer.
- `Pairs`, the tokens of our own synthetic sources (data/pairs.py): one token per fact. For models trained on those.

Everything is an array of token ids and a function of its arguments, so every rank makes the same text.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ..config.schema import TASKS as EVERY_TASK
from ..data.mixing import below, mix
from ..data.needles import Needles
from ..data.order import shuffled
from ..data.pairs import PairTokens

NAMES = ("auto", "words", "ids", "pairs")


class Language(Protocol):
    """Keys and values are numbers from 0 on; the language says which tokens they are."""

    name: str
    tasks: tuple[str, ...]  # what can be asked in it
    keys: int
    values: int
    begin: np.ndarray  # what every text begins with

    @property
    def largest_token(self) -> int: ...
    def hay(self, key: int) -> np.ndarray:
        """Tokens without meaning, to be repeated as often as needed."""
        ...

    def fact(self, key: int, value: int) -> np.ndarray: ...
    def link(self, key: int, other: int) -> np.ndarray:
        """The value of `key` is that of `other`."""
        ...

    def question(self, key: int, answers: int = 1) -> np.ndarray: ...
    def answer(self, values: list[int]) -> np.ndarray: ...
    def word(self, number: int) -> np.ndarray:
        """One word of a list whose words are counted."""
        ...

    def count_question(self, words: int) -> np.ndarray: ...
    def count_answer(self, words: list[int]) -> np.ndarray: ...


class Pairs:
    name = "pairs"
    tasks: tuple[str, ...] = ("needle", "multi_key")
    begin = np.zeros(0, np.int64)

    def __init__(self, vocabulary: int) -> None:
        self.tokens = PairTokens(Needles.keys, Needles.values)
        problems = self.tokens.violations(vocabulary)
        if problems:
            raise ValueError(f"questions in the language pairs cannot be asked: {problems[0]}")
        self.keys, self.values = self.tokens.keys, self.tokens.values

    @property
    def largest_token(self) -> int:
        return self.tokens.largest

    def hay(self, key: int) -> np.ndarray:
        return _ids(self.tokens.filler)

    def fact(self, key: int, value: int) -> np.ndarray:
        return _ids(self.tokens.fact(key, value))

    def question(self, key: int, answers: int = 1) -> np.ndarray:
        return _ids(self.tokens.key(key))

    def answer(self, values: list[int]) -> np.ndarray:
        return _ids(*(self.tokens.value(value) for value in values))

    def link(self, key: int, other: int) -> np.ndarray:
        raise cannot_ask(self, "variable_tracking")

    def word(self, number: int) -> np.ndarray:
        raise cannot_ask(self, "common_words")

    def count_question(self, words: int) -> np.ndarray:
        raise cannot_ask(self, "common_words")

    def count_answer(self, words: list[int]) -> np.ndarray:
        raise cannot_ask(self, "common_words")


class Ids:
    name = "ids"
    tasks: tuple[str, ...] = EVERY_TASK
    begin = np.zeros(0, np.int64)

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        if vocabulary < 32:
            raise ValueError(
                f"a vocabulary of {vocabulary} tokens is too small to draw keys, values and hay from; it takes 32"
            )
        self.vocabulary, self.key = vocabulary, mix(seed, 0x1D5)
        self.filler, self.keys, self.values = (min(most, vocabulary // 4) for most in (256, 1024, 1024))

    @property
    def largest_token(self) -> int:
        return self.vocabulary - 1

    def _token(self, number: int) -> int:
        """Different numbers are different tokens, from all over the vocabulary."""
        return shuffled(number, self.vocabulary, self.key)

    @cached_property
    def _fillers(self) -> np.ndarray:
        return _ids(*(self._token(1 + self.keys + self.values + number) for number in range(self.filler)))

    def hay(self, key: int) -> np.ndarray:
        return self._fillers[below(mix(key, 1), np.arange(4096), self.filler)]

    def word(self, number: int) -> np.ndarray:
        return _ids(self._token(1 + number))

    def fact(self, key: int, value: int) -> np.ndarray:
        return _ids(self._token(1 + key), self._token(1 + self.keys + value))

    def link(self, key: int, other: int) -> np.ndarray:
        return _ids(self._token(1 + key), self._token(1 + other))

    def question(self, key: int, answers: int = 1) -> np.ndarray:
        return self.word(key)

    def answer(self, values: list[int]) -> np.ndarray:
        return _ids(*(self._token(1 + self.keys + value) for value in values))

    def count_question(self, words: int) -> np.ndarray:
        return _ids(self._token(0))

    def count_answer(self, words: list[int]) -> np.ndarray:
        return np.concatenate([self.word(number) for number in words])


_KINDS = (
    "quiet", "yellow", "narrow", "early", "hollow", "silver", "distant", "gentle", "broken", "northern", "frozen", "crooked",
    "wooden", "bright", "salty", "heavy",
)  # fmt: skip
_THINGS = (
    "harbor", "garden", "ladder", "window", "bridge", "candle", "forest", "engine", "island", "letter", "market", "mirror",
    "needle", "orchard", "pencil", "ribbon", "river", "saddle", "stable", "tower", "tunnel", "valley", "village", "violin",
    "wagon", "whistle", "blanket", "bottle", "button", "kettle", "lantern", "hammer",
)  # fmt: skip
_HAY = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The road goes on along the water, "
    "past the mill and over the hill. Somebody sings, and nobody listens. In the evening it rains a little. "
)


class Words:
    """Sentences through a tokenizer. Values are numbers of seven digits."""

    name = "words"
    tasks: tuple[str, ...] = EVERY_TASK
    keys, values = len(_KINDS) * len(_THINGS), 9_000_000

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bare = self._encode("a")
        full = np.asarray(tokenizer("a")["input_ids"], np.int64)
        self.begin = full[: max(0, len(full) - len(bare))] if list(full[-len(bare) :]) == list(bare) else full[:0]

    @property
    def largest_token(self) -> int:
        return max(self.tokenizer.get_vocab().values())

    def _encode(self, text: str) -> np.ndarray:
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        if not len(ids):
            raise ValueError(f"the tokenizer makes no token of {text!r}; ask with eval.language=ids instead")
        return ids

    def _subject(self, key: int) -> str:
        return f"{_KINDS[key % len(_KINDS)]} {_THINGS[key // len(_KINDS)]}"

    def _number(self, value: int) -> str:
        return str(1_000_000 + value)

    def hay(self, key: int) -> np.ndarray:
        return self._encode(_HAY)

    def fact(self, key: int, value: int) -> np.ndarray:
        return self._encode(f" The secret number of the {self._subject(key)} is {self._number(value)}.")

    def link(self, key: int, other: int) -> np.ndarray:
        return self._encode(
            f" The secret number of the {self._subject(key)} is the same as that of the {self._subject(other)}."
        )

    def question(self, key: int, answers: int = 1) -> np.ndarray:
        of = f"of the {self._subject(key)}"
        if answers == 1:
            return self._encode(f" What is the secret number {of}? The secret number {of} is")
        return self._encode(
            f" What are the {answers} secret numbers {of}? In the order in which they were told they are"
        )

    def answer(self, values: list[int]) -> np.ndarray:
        return self._encode(" " + ", ".join(self._number(value) for value in values))

    def word(self, number: int) -> np.ndarray:
        return self._encode(f" {self._subject(number)},")

    def count_question(self, words: int) -> np.ndarray:
        return self._encode(f" The {words} things that are named most often above, the most frequent first, are")

    def count_answer(self, words: list[int]) -> np.ndarray:
        return self._encode(" " + ", ".join(self._subject(number) for number in words))


def _ids(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int64)


def cannot_ask(language: Any, task: str) -> ValueError:
    return ValueError(
        f"eval.tasks: {task} cannot be asked in the language {language.name}, which knows {', '.join(language.tasks)}; leave "
        "it out, or choose eval.language=ids or words"
    )
