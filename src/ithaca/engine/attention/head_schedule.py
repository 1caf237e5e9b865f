"""Which heads each Ulysses rank attends, stage by stage. Pure integers, no torch.

The problem. Inside attention every rank sees the whole sequence for a few heads. Untied Ulysses goes further and walks
those heads in stages, so that only the buffers of one stage exist. Someone has to say which head is where, and when.
The answer must hold for any head counts (28 heads on 8 ranks, 2 KV heads on 4 ranks, 1 rank) and must respect the order
of a pretrained checkpoint: query head h uses KV head ``h // g`` with ``g = heads // kv_heads``. A schedule that pairs
them differently trains happily from random weights and silently ruins a pretrained model.

Words. A *group* is the g query heads of one KV head. A *piece* is the part of a group that one rank holds; it costs one
delivery of that KV head to the rank.

Cutting heads into ranks. Ranks hold contiguous runs of heads. The largest run has ``L = ceil(heads / ranks)`` heads,
the least possible. A cut between two ranks that falls inside a group costs one more delivery; a cut between groups is
free. So we want as many free cuts as possible. Between two free cuts lies a *block*: m ranks that serve c whole groups,
possible when ``c·g <= m·L``. The pairs (m, c) are the integer points of a cone, every way to cut is a way to write
(ranks, kv_heads) as a sum of them, and the cheapest is the sum with the most terms. In two dimensions that sum is easy:
it uses only the two neighbouring generators of the cone (its Hilbert basis) that enclose (ranks, kv_heads), because
two generators further apart add up to at least two of those between them. A walk down the Stern-Brocot tree finds them.
28 heads, 4 KV heads, 8 ranks: 4 blocks of 2 ranks, with 4 + 3 heads. 8 heads, 8 KV heads, 16 ranks: 8 blocks of one
rank with one head, then 8 blocks of one idle rank.

Cutting ranks into stages. One attention kernel call serves a stage, and it wants the same number of query heads for
each KV head. So a stage is either up to n query heads of one KV head, or several complete pieces of equal size. The
stages of a KV head follow each other on a rank: its K and V arrive in the first (``fresh``), stay, and their gradient
leaves after the last (``done``). The rank that needs most stages sets their number. The others spread their heads over
as many of them as they can, and every rank puts its larger stages first, because a stage lasts as long as its largest
rank.

Paper: Untied Ulysses (UPipe), for stages of heads. Not here: moving the data (stages.py does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class Stage:
    """One stage on all ranks. Every field has one tuple of head numbers per rank; an idle rank has empty tuples."""

    queries: tuple[tuple[int, ...], ...]
    """Query heads the rank attends, ascending, hence grouped by KV head."""
    kv: tuple[tuple[int, ...], ...]
    """KV heads those query heads use, ascending."""
    fresh: tuple[tuple[int, ...], ...]
    """KV heads of `kv` that must be sent to the rank now, not held from the stage before."""
    done: tuple[tuple[int, ...], ...]
    """KV heads of `kv` that the rank uses for the last time; their gradient goes home after this stage."""


class _Unit(NamedTuple):
    """Pieces of equal size that share one stage (parts = 1), or one piece spread over `parts` stages."""

    pieces: tuple[int, ...]  # numbers of the pieces, counted from 0 on their rank
    size: int  # query heads of each piece
    parts: int

    @property
    def load(self) -> int:
        """Query heads in the unit's largest stage."""
        return -(-len(self.pieces) * self.size // self.parts)


@lru_cache(1024)  # a plan asks for the same few hundreds of times
def head_schedule(heads: int, kv_heads: int, ranks: int, heads_per_stage: int | None) -> tuple[Stage, ...]:
    """Assign every query head to one (stage, rank).

    Args:
        heads: query heads of the model.
        kv_heads: KV heads of the model; must divide `heads`.
        ranks: Ulysses degree; may exceed either head count.
        heads_per_stage: most query heads a rank attends in one stage. None: one stage with everything, where the
            pieces of a rank may differ in size.

    Returns:
        The stages in the order they run. Ranks with less work are idle in the last stages.
    """
    _check(heads, kv_heads, ranks, heads_per_stage)
    group = heads // kv_heads
    bounds = _rank_bounds(heads, kv_heads, ranks)
    kinds = {(start % group, end - start) for start, end in pairwise(bounds)}  # few: most ranks look alike
    stages = max(_stage_count(offset, length, group, heads_per_stage) for offset, length in kinds)
    columns = [_column(start, end, group, heads_per_stage, stages) for start, end in pairwise(bounds)]
    return tuple([Stage(*zip(*row, strict=True)) for row in zip(*columns, strict=True)])


def _check(heads: int, kv_heads: int, ranks: int, heads_per_stage: int | None) -> None:
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name} is {value}; give a positive number")
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}; take both from the model's config "
            "(num_attention_heads, num_key_value_heads), where every KV head serves the same number of query heads"
        )
    if heads_per_stage is not None and heads_per_stage < 1:
        raise ValueError(f"heads_per_stage is {heads_per_stage}; give at least 1, or None for all heads in one stage")


def _rank_bounds(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """Rank r holds query heads bounds[r] to bounds[r + 1] (see the module docstring)."""
    group = heads // kv_heads
    largest = -(-heads // ranks)
    # (m, c) in the cone: m ranks can serve c groups. low is in it, high is not, and they span all integer points.
    low, high = (1, 0), (0, 1)
    while True:
        middle = (low[0] + high[0], low[1] + high[1])
        if middle[1] * group > middle[0] * largest:
            high = middle
        elif middle[1] * ranks < kv_heads * middle[0]:
            low = middle
        else:
            break
    # (ranks, kv_heads) = dense * middle + sparse * low; the determinant of the pair is 1.
    dense = low[0] * kv_heads - low[1] * ranks
    sparse = middle[1] * ranks - middle[0] * kv_heads

    bounds = [0]
    for count, (members, groups) in ((dense, middle), (sparse, low)):
        share, more = divmod(groups * group, members)
        for _ in range(count):
            for member in range(members):
                bounds.append(bounds[-1] + share + (member < more))
    assert bounds[-1] == heads and len(bounds) == ranks + 1
    return bounds


def _piece_sizes(offset: int, length: int, group: int) -> list[int]:
    """Cut a run of `length` heads that starts at head `offset` of a group where the KV head changes."""
    sizes = []
    while length:
        sizes.append(min(group - offset, length))
        length -= sizes[-1]
        offset = 0
    return sizes


def _units(sizes: list[int], heads_per_stage: int) -> list[_Unit]:
    """The fewest stages for pieces of these sizes."""
    units = []
    for size in sorted(set(sizes), reverse=True):
        same = [piece for piece, other in enumerate(sizes) if other == size]
        if size > heads_per_stage:
            units += [_Unit((piece,), size, -(-size // heads_per_stage)) for piece in same]
        else:
            batches = -(-len(same) // (heads_per_stage // size))
            units += [_Unit(tuple(batch), size, 1) for batch in _deal(same, batches)]
    return units


def _spread(units: list[_Unit], stages: int) -> list[_Unit]:
    """Split the largest stages until the rank is busy in all of them, as far as its heads allow; largest first."""
    units = list(units)
    for _ in range(stages - sum(unit.parts for unit in units)):
        largest = max(units, key=lambda unit: unit.load, default=None)
        if largest is None or largest.load == 1:
            break
        at = units.index(largest)
        if len(largest.pieces) > 1:
            units[at : at + 1] = [_Unit(tuple(half), largest.size, 1) for half in _deal(largest.pieces, 2)]
        else:
            units[at] = largest._replace(parts=largest.parts + 1)
    return sorted(units, key=lambda unit: -unit.load)  # stable: head order among equals


def _deal(items: Sequence[int], hands: int) -> list[Sequence[int]]:
    """Cut a sequence into `hands` runs whose lengths differ by at most one, the longer first."""
    share, more = divmod(len(items), hands)
    edges = [hand * share + min(hand, more) for hand in range(hands + 1)]
    return [items[start:end] for start, end in pairwise(edges)]


def _stage_count(offset: int, length: int, group: int, heads_per_stage: int | None) -> int:
    if heads_per_stage is None:
        return 1
    return sum(unit.parts for unit in _units(_piece_sizes(offset, length, group), heads_per_stage))


def _plan(offset: int, length: int, group: int, heads_per_stage: int | None, stages: int) -> list[tuple]:
    """Per unit its KV heads and the query heads of its stages, for a run that starts at `offset` in KV head 0."""
    sizes = _piece_sizes(offset, length, group)
    bounds = list(accumulate(sizes, initial=offset))
    if heads_per_stage is None:
        units = [_Unit(tuple(range(len(sizes))), 0, 1)]  # one stage for pieces of any size
    else:
        units = _spread(_units(sizes, heads_per_stage), stages)
    plan = []
    for pieces, _, parts in units:
        queries = [head for piece in pieces for head in range(bounds[piece], bounds[piece + 1])]
        plan.append((pieces, _deal(queries, parts)))  # piece 0 belongs to KV head 0, and so on
    return plan


def _column(start: int, end: int, group: int, heads_per_stage: int | None, stages: int) -> list[tuple]:
    """(queries, kv, fresh, done) in every stage, for the rank that holds query heads `start` to `end`."""
    # Which group a run starts in only shifts the numbers of its plan.
    kv_head = start // group
    column = []
    for pieces, parts in _plan(start % group, end - start, group, heads_per_stage, stages):
        kv = tuple([kv_head + piece for piece in pieces])
        for part, heads in enumerate(parts):
            queries = tuple([kv_head * group + head for head in heads])
            column.append((queries, kv, kv if part == 0 else (), kv if part == len(parts) - 1 else ()))
    return column + [((), (), (), ())] * (stages - len(column))
