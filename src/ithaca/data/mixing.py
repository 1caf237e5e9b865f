"""Random-looking numbers that are functions of their inputs, the same on every machine and with every version of numpy.

numpy and torch may change what a seed gives from one release to the next; a run that resumes after an upgrade would
then see other samples. SplitMix64 (Steele, Lea, Flood, 2014) is three multiplications and never changes.
"""

from __future__ import annotations

import numpy as np

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*values: int) -> int:
    """64 bits that depend on every value and on their order."""
    state = 0
    for value in values:
        state = (state + _STEP + (value & _ALL)) & _ALL
        state = ((state ^ (state >> 30)) * _A) & _ALL
        state = ((state ^ (state >> 27)) * _B) & _ALL
        state ^= state >> 31
    return state


def mix_array(key: int, values: np.ndarray) -> np.ndarray:
    """64 bits for each value under a key, as uint64. `mix_array(mix(k), v)[i] == mix(k, v[i])`."""
    with np.errstate(over="ignore"):
        state = values.astype(np.uint64) + np.uint64((key + _STEP) & _ALL)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_A)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_B)
    return state ^ (state >> np.uint64(31))


def below(key: int, values: np.ndarray, limit: int) -> np.ndarray:
    """A number in [0, limit) for each value under a key, as int64. The bias is limit / 2⁶⁴."""
    return (mix_array(key, values) % np.uint64(limit)).astype(np.int64)
