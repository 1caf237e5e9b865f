"""The cases of a seed: from every source in turn, so that any number of them has some of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from .options import option_cases, override_cases
from .received import received_cases, yaml_cases
from .running import Case


def cases(world: Path, seed: int, count: int) -> Iterator[Case]:
    rng = random.Random(seed)
    sources = [
        option_cases(rng),
        received_cases(rng, world),
        override_cases(rng),
        received_cases(rng, world),
        yaml_cases(rng, world),
    ]
    for source in cycle(sources):
        case = next(source, None) or next(sources[1])
        yield case
        count -= 1
        if not count:
            return
