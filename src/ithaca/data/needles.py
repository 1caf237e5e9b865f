"""Needles everywhere: rows that teach a model to look back at any distance, and show whether it does.

    . . . k1? . k3=v5 . k0? . . . k3? k1=v2 . . k3? . . . k1? …

Every fourth token is a question, a key by chance; its label is the token of the key's value, and nothing else is
supervised. Each key's fact stands once, at a random place, the earlier places likelier (the square of a uniform number): so
most answers have to be fetched from far away, at every distance there is, and a third of the questions come before their
fact and cannot be answered. A model that uses its context has a loss that falls with the position, from the entropy of a
guess to nothing: the curve of loss by position that long-context training is about.

Recall (recall.py) asks in one place for facts in another, which proves context parallelism; this one has every distance,
which is what a grid of needles (evaluation/tasks.py) then measures. Rows are functions of (seed, row number), read by slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..stack import require
from .mixing import below, mix, mix_array
from .pairs import PairTokens
from .rows import IGNORE, OneDocument, Slice

EVERY = 4  # a question at every so many tokens


@dataclass(frozen=True)
class Needles(OneDocument):
    """A source of rows (rows.RowSource), see above."""

    context: int
    vocabulary: int
    seed: int = 0
    rows: int = 1 << 20  # different rows: one epoch
    keys: int = 4
    values: int = 8

    def __post_init__(self) -> None:
        violations = self.tokens.violations(self.vocabulary)
        if self.context < EVERY * 2 * self.keys:
            violations.append(
                f"context={self.context} is too short for {self.keys} facts and questions between them; use at least "
                f"{EVERY * 2 * self.keys} tokens"
            )
        require(violations, "these needles cannot be made")

    @property
    def tokens(self) -> PairTokens:
        return PairTokens(self.keys, self.values)

    @property
    def name(self) -> str:
        return "synthetic needles"

    @property
    def largest_token(self) -> int:
        return self.tokens.largest

    def supervised(self, row: int) -> int:
        return self.context // EVERY

    def facts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the fact of each key stands, and the value of each key."""
        key = mix(self.seed, row)
        uniform = mix_array(mix(key, 1), np.arange(self.keys)) / 2.0**64
        slots: list[int] = []
        for slot in (uniform**2 * (self.context // EVERY)).astype(np.int64).tolist():
            while slot in slots:
                slot = (slot + 1) % (self.context // EVERY)
            slots.append(slot)
        return np.array(slots) * EVERY, below(mix(key, 0), np.arange(self.keys), self.values)

    def read(self, row: int, start: int, stop: int) -> Slice:
        at, values = self.facts(row)
        place = np.arange(start, stop)
        ids = np.full(stop - start, self.tokens.filler, np.int64)
        labels = np.full(stop - start, IGNORE, np.int64)
        asked = place % EVERY == EVERY - 1
        subject = below(mix(self.seed, row, 2), place[asked], self.keys)
        ids[asked] = self.tokens.key(subject)
        labels[asked] = self.tokens.value(values[subject])
        inside = (at >= start) & (at < stop)
        ids[at[inside] - start] = self.tokens.fact(np.flatnonzero(inside), values[inside])
        return Slice(ids, labels, place)
