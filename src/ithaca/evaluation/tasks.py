"""Questions about a long text whose answers are known: needles, and the tasks around them that RULER made common.

    needle              one fact at a chosen depth, asked for at the end (a grid of length × depth is made of these)
    multi_key           eight facts about eight keys, one of them asked for: the others distract
    multi_value         four facts about one key; all values are asked for, in the order in which they were told
    variable_tracking   x1 = 17, x2 = x1, … x4 = x3, in this order somewhere in the text; the value of x4 is asked for
    common_words        a long list of words, three of which come often; those are asked for, the most frequent first

Hsieh et al., "RULER", 2024 (arXiv 2404.06654), in a form that is scored by teacher forcing: the answer stands in the row
behind the question, only its tokens are supervised, and a forward says how likely each was and whether it would have been
chosen. That is one forward for a whole answer, it is the same on any layout, and it needs no generation.

A task is a source of rows: row i is a function of (seed, task, length, depth, i), read by slices, so a row of millions of
tokens is never whole anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..data.mixing import below, mix
from ..data.order import shuffled
from ..data.rows import IGNORE, OneDocument, Slice
from .languages import EVERY_TASK, Language, cannot_ask

DISTRACTORS, VALUES, HOPS = 8, 4, 4
COMMON = (12, 10, 8)  # how often each common word comes for once that any other does


@dataclass(frozen=True)
class Sample:
    """One text: hay without end, pieces laid over it, and the answer at its end."""

    hay: np.ndarray
    pieces: list[tuple[int, np.ndarray]]  # where, and what; none overlaps another
    answer: tuple[int, int]


@dataclass(frozen=True)
class Task(OneDocument):
    """A source of rows (data.rows.RowSource) of one task at one length."""

    kind: str
    language: Language
    context: int
    depth: float | None = None  # needle: 0 = at the beginning, 1 = right before the question
    seed: int = 0
    rows: int = 1 << 20
    _made: dict[int, Sample] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.kind in EVERY_TASK, self.kind
        if self.kind not in self.language.tasks:
            raise cannot_ask(self.language, self.kind)
        self.sample(0)  # a text that does not fit says so now

    @property
    def name(self) -> str:
        depth = "" if self.depth is None else f" at depth {self.depth:.2f}"
        return f"{self.kind}{depth}, {self.context:,} tokens"

    @property
    def largest_token(self) -> int:
        return self.language.largest_token

    def supervised(self, row: int) -> int:
        start, stop = self.sample(row).answer
        return stop - start

    def sample(self, row: int) -> Sample:
        if row not in self._made:
            self._made.clear()  # the ranges of a row are read one after the other
            depth = 0 if self.depth is None else round(self.depth * 1000) + 1
            key = mix(self.seed, EVERY_TASK.index(self.kind), self.context, depth, row)
            self._made[row] = getattr(self, f"_{self.kind}")(key)
        return self._made[row]

    def read(self, row: int, start: int, stop: int) -> Slice:
        sample = self.sample(row)
        place = np.arange(start, stop)
        ids = sample.hay[place % len(sample.hay)]
        for at, piece in sample.pieces:
            begin, end = max(start, at), min(stop, at + len(piece))
            if begin < end:
                ids[begin - start : end - start] = piece[begin - at : end - at]
        labels = np.full(stop - start, IGNORE, np.int64)
        at, answer = sample.pieces[-1]
        assert at == sample.answer[0]
        begin, end = max(start, at - 1), min(stop, at - 1 + len(answer))  # the token before an answer predicts it
        if begin < end:
            labels[begin - start : end - start] = answer[begin - at + 1 : end - at + 1]
        return Slice(ids, labels, place)

    # -- one function per task: the texts -----------------------------------------------------------------------------

    def _needle(self, key: int) -> Sample:
        subject, value = self._keys(key, 1)[0], self._values(key, 1)[0]
        fact = self.language.fact(subject, value)
        return self._text(key, [fact], self.language.question(subject), self.language.answer([value]), self.depth)

    def _multi_key(self, key: int) -> Sample:
        count = min(DISTRACTORS, self.language.keys)
        subjects, values = self._keys(key, count), self._values(key, count)
        facts = [self.language.fact(*pair) for pair in zip(subjects, values, strict=True)]
        asked = _below(mix(key, 3), count)
        question, answer = self.language.question(subjects[asked]), self.language.answer([values[asked]])
        return self._text(key, facts, question, answer)

    def _multi_value(self, key: int) -> Sample:
        subject, values = self._keys(key, 1)[0], self._values(key, VALUES)
        facts = [self.language.fact(subject, value) for value in values]
        return self._text(key, facts, self.language.question(subject, VALUES), self.language.answer(values))

    def _variable_tracking(self, key: int) -> Sample:
        subjects, value = self._keys(key, HOPS), self._values(key, 1)[0]
        facts = [self.language.fact(subjects[0], value)]
        facts += [self.language.link(later, earlier) for earlier, later in pairwise(subjects)]
        return self._text(key, facts, self.language.question(subjects[-1]), self.language.answer([value]))

    def _common_words(self, key: int) -> Sample:
        """The list is hay that repeats: three of its words come 12, 10 and 8 times as often as any other."""
        words = self._keys(key, min(36, self.language.keys))
        times = [*COMMON, *[1] * (len(words) - len(COMMON))]
        listed = [word for word, count in zip(words, times, strict=True) for _ in range(count)]
        listed = [listed[shuffled(place, len(listed), mix(key, 4))] for place in range(len(listed))]
        hay = np.concatenate([self.language.word(word) for word in listed])
        question, answer = self.language.count_question(len(COMMON)), self.language.count_answer(words[: len(COMMON)])
        return self._text(key, [], question, answer, hay=hay, least=len(hay))

    # -- what they share ----------------------------------------------------------------------------------------------

    def _keys(self, key: int, count: int) -> list[int]:
        return [shuffled(number, self.language.keys, mix(key, 1)) for number in range(count)]

    def _values(self, key: int, count: int) -> list[int]:
        return [shuffled(number, self.language.values, mix(key, 2)) for number in range(count)]

    def _text(
        self,
        key: int,
        facts: list[np.ndarray],
        question: np.ndarray,
        answer: np.ndarray,
        depth: float | None = None,
        hay: np.ndarray | None = None,
        least: int = 0,
    ) -> Sample:
        """Facts in their order, at `depth` or by chance, and the question with its answer at the end."""
        begin = self.language.begin
        asked = self.context - len(question) - len(answer)
        width = max((len(fact) for fact in facts), default=0)
        room, need = asked - len(begin), max(sum(len(fact) for fact in facts), len(facts) * width, least)
        if need > room:
            fixed = len(begin) + len(question) + len(answer)
            raise ValueError(
                f"the task {self.kind} does not fit into eval length {self.context:,}: question and answer take {fixed} tokens "
                f"and what is hidden {need}, in the language {self.language.name}; use lengths of at least {fixed + need:,}, "
                f"or leave {self.kind} out of eval.tasks"
            )
        if depth is not None:
            places = [round(depth * (room - width))]
        else:  # distinct slots, each as wide as the longest fact
            slots = sorted(shuffled(number, room // width, mix(key, 5)) for number in range(len(facts)))
            places = [slot * width for slot in slots]
        pieces = [(0, begin)] if len(begin) else []
        pieces += [(len(begin) + place, fact) for place, fact in zip(places, facts, strict=True)]
        pieces += [(asked, question), (asked + len(question), answer)]
        return Sample(self.language.hay(key) if hay is None else hay, pieces, (asked + len(question), self.context))


def _below(key: int, limit: int) -> int:
    return int(below(key, np.zeros(1, np.int64), limit)[0])
