"""Long-range recall, made to order: rows that only a model that sees the whole sequence can learn.

    k3=v5 k1=v2 k2=v5 …   . . . . . . .   k1? k3? k3? k2? …   . . . . . . .
    | facts             | filler        | questions         | filler      |
    0                  C/8             9C/16               3C/4           C

The first eighth of a row is facts: one token each that says "the value of key k is v", every key at least once, values
by chance. Behind the middle come questions: one token each, a key. The label of a question is the token of its value;
nothing else is supervised. So every answer has to be fetched from at least 7/16 of the context away, and guessing is
right once in `values` tries. Answers are labels only, they do not stand in the row: no question can be answered by an
earlier one.

A fact is one token (pairs.py says why); two small layers learn the task in a few hundred steps.

Where the parts lie is chosen for context parallelism: whatever the Ulysses and ring degrees, no rank holds a question
and a fact (a zigzag ring gives its first rank the beginning and the end, which is why nothing is asked in the last
quarter; the padding of odd lengths moves the middle, which is why nothing is asked right behind it).

Rows are functions of (seed, row number), made piece by piece: no rank ever holds a whole row, no tokenizer is needed.
Tokens: 0 is the filler, then come the keys, the values, and a token for every pair of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..stack import require
from .mixing import below, mix, mix_array
from .pairs import PairTokens
from .rows import IGNORE, OneDocument, Slice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recall(OneDocument):
    """A source of rows, see above. Few keys and values are learned fast, above all with few rows a step."""

    context: int
    vocabulary: int
    seed: int = 0
    rows: int = 1 << 20  # different rows: one epoch
    keys: int = 4
    values: int = 8

    def __post_init__(self) -> None:
        violations = []
        if self.rows < 1:
            violations.append(f"rows={self.rows} must be at least 1")
        violations += self.tokens.violations(self.vocabulary)
        if self.context < 8 * max(self.keys, 2):
            violations.append(
                f"context={self.context} is too short: the first eighth states {self.keys} facts; use at least "
                f"{8 * max(self.keys, 2)} tokens"
            )
        require(violations, "this recall task cannot be made")

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.values

    # What a source of rows is (rows.RowSource).

    @property
    def name(self) -> str:
        return "synthetic recall"

    @property
    def tokens(self) -> PairTokens:
        return PairTokens(self.keys, self.values)

    @property
    def largest_token(self) -> int:
        return self.tokens.largest

    def supervised(self, row: int) -> int:
        begin, end = self.asked
        return end - begin

    def read(self, row: int, start: int, stop: int) -> Slice:
        key = mix(self.seed, row)
        ids = np.full(stop - start, self.tokens.filler, np.int64)
        labels = np.full(stop - start, IGNORE, np.int64)
        values = below(mix(key, 0), np.arange(self.keys), self.values)
        facts = np.arange(start, min(stop, self.context // 8))
        subject = below(mix(key, 1), facts, self.keys)
        first = facts < self.keys  # at the very beginning every key has its turn
        subject[first] = np.argsort(mix_array(mix(key, 2), np.arange(self.keys)), kind="stable")[facts[first]]
        ids[: len(facts)] = self.tokens.fact(subject, values[subject])
        begin, end = max(start, self.asked[0]), min(stop, self.asked[1])
        if begin < end:
            subject = below(mix(key, 3), np.arange(begin, end), self.keys)
            ids[begin - start : end - start] = self.tokens.key(subject)
            labels[begin - start : end - start] = self.tokens.value(values[subject])
        return Slice(ids, labels, np.arange(start, stop))

    # For measuring.

    @property
    def asked(self) -> tuple[int, int]:
        """The range of positions that hold questions; the labels there are the answers."""
        return self.context // 2 + self.context // 16, self.context * 3 // 4


def recall_score(predictions: Tensor, labels: Tensor) -> tuple[int, int]:
    """Right answers and answers asked for. predictions: the likeliest next token of every position; labels: as a `Batch`
    holds them. Add both over batches and ranks, then divide."""
    asked = labels != IGNORE
    return int(((predictions == labels) & asked).sum()), int(asked.sum())
