"""Validation: which documents of a source are held out, told by what they say.

Every document has a hash of its token ids (`hashes.bin`), and a share of all hashes is held out, which share the seed says. So a
document stays on its side when others are added, removed or put in another order, copies of a document are on one side, and
nothing has to be packed again to hold out more. Of few documents that is the share on average only: 0.1 of 12 may be 3, and is at
least 1. Of a number of documents it is those with the smallest hashes: documents that are added can take the place of a few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .mixing import mix, mix_array

_KEY = 0x76616C6964  # apart from everything else that is drawn with the seed


@dataclass(frozen=True)
class Split:
    """One side of the documents of a source."""

    validation: int | float  # how many are held out; below 1, which share
    seed: int
    held_out: bool  # those that are, or all others

    def __post_init__(self) -> None:
        whole = isinstance(self.validation, int)
        if isinstance(self.validation, bool) or not (self.validation >= 1 if whole else 0 < self.validation < 1):
            raise ValueError(
                f"validation={self.validation!r} must be a number of documents, such as 100, or a share below 1, such as 0.01"
            )

    def select(self, hashes: np.ndarray, name: object) -> np.ndarray:
        """Which of the documents with these hashes are on this side. ValueError if all are held out."""
        drawn = mix_array(mix(_KEY, self.seed), hashes)
        if isinstance(self.validation, int):
            last = min(self.validation, len(drawn)) - 1
            out = drawn <= np.partition(drawn, last)[last]
        else:
            out = drawn < np.uint64(int(self.validation * 2**64))
            out |= drawn == drawn.min() if not out.any() else False
        if out.all():
            raise ValueError(
                f"{name}: validation={self.validation} leaves none of {len(out):,} documents to train on; give a number of "
                "documents below that, such as 1, or another share"
            )
        return out if self.held_out else ~out
