"""Rotary settings against the lengths they are for: what contradicts them, with the number that would not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .schema import Config, Rope

NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}


def rope_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of model.rope at the longest context it is used for, and of each phase that has settings of its own."""
    plain = [phase.context for phase in config.phases if phase.rope is None] if config.phases else [config.data.context]
    if config.model.rope is not None:
        yield from _of("model.rope", config.model.rope, max(plain, default=config.data.context))
    for index, phase in enumerate(config.phases):
        if phase.rope is not None:
            yield from _of(f"phases[{index}].rope", phase.rope, phase.context)


def _of(path: str, rope: Rope, context: int) -> Iterator[tuple[tuple[str, ...], str]]:
    kind, factor, trained = rope.rope_type, rope.factor, rope.original_max_position_embeddings
    lacks = [name for name in NEEDS.get(kind or "", ()) if getattr(rope, name) is None]
    if lacks:
        names = " and ".join(f"{path}.{each}" for each in lacks)
        yield (f"{path}.rope_type",), f"{path}.rope_type={kind} also needs {names}"
    if factor is not None and 0 < factor < 1:  # at or below 0: the range of the field says so
        yield (
            (f"{path}.factor",),
            f"{path}.factor={factor} would squeeze positions instead of stretching them; use 1 or more",
        )
    elif (
        kind in ("yarn", "longrope")
        and factor is not None
        and factor > 0
        and trained is not None
        and context > factor * trained
    ):
        yield (
            (f"{path}.factor", f"{path}.original_max_position_embeddings"),
            f"{path}: {kind} with factor {factor:g} stretches {trained:,} positions to {round(factor * trained):,}, but "
            f"the context is {context:,}; use factor "
            f"{math.ceil(context / trained)}, or a context of at most {round(factor * trained):,}",
        )
    for low, high, words in (("beta_slow", "beta_fast", "yarn"), ("low_freq_factor", "high_freq_factor", "llama3")):
        small, large = getattr(rope, low), getattr(rope, high)
        if small is not None and large is not None and small >= large:
            yield (f"{path}.{low}", f"{path}.{high}"), f"{path}: {words} needs {low}={small:g} below {high}={large:g}"
