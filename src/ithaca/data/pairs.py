"""Tokens of synthetic look-ups: a filler, keys, values, and one token for every fact "the value of key k is v".

One token per fact, because then a single look back is enough. With "k v" as two tokens a model must first learn to tell each
value which key came before it (an induction head, Olsson et al., 2022): in trials that took several times as many steps, a
plateau at chance and a sudden jump. This one moves at once.

    0        filler
    1 …      keys
    1+K …    values
    1+K+V …  facts, K × V of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", int, np.ndarray)


@dataclass(frozen=True)
class PairTokens:
    keys: int
    values: int

    filler = 0

    @property
    def largest(self) -> int:
        return self.keys + self.values + self.keys * self.values

    def key(self, key: Number) -> Number:
        return 1 + key

    def value(self, value: Number) -> Number:
        return 1 + self.keys + value

    def fact(self, key: Number, value: Number) -> Number:
        return 1 + self.keys + self.values + key * self.values + value

    def violations(self, vocabulary: int) -> list[str]:
        if self.keys < 2 or self.values < 2:
            return [f"keys={self.keys}, values={self.values}: with fewer than two there is nothing to tell apart"]
        if self.largest >= vocabulary:
            return [
                f"{self.keys} keys and {self.values} values need 1 + {self.keys} + {self.values} + {self.keys} × "
                f"{self.values} = {self.largest + 1} tokens, but the vocabulary has {vocabulary}; use fewer"
            ]
        return []
