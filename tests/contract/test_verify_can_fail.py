"""A check that cannot fail proves nothing: each classic mistake is made on purpose, and `verify` must see it.

Every sabotage lives inside a worker for one case. The last test proves the others: without sabotage nothing misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import ithaca.engine.assemble
import ithaca.engine.batch
import ithaca.engine.run
from ithaca.base.processes.pool import Workers
from ithaca.engine.batch import Batch
from ithaca.engine.run import Run
from ithaca.stack import Stack
from ithaca.verify.case import Case, run_case

CHECKS = ("logits", "plain", "packed", "leak", "window")


@contextmanager
def wrong_gqa_pairing() -> Iterator[None]:
    """Query heads meet the KV head after their own, as a contiguous split of a pretrained wq would do."""
    plain = ithaca.engine.assemble.head_schedule

    def rotated(heads: int, kv_heads: int, ranks: int, heads_per_stage: int | None):
        turn = lambda lists: tuple(tuple((head + 1) % kv_heads for head in each) for each in lists)  # noqa: E731
        return tuple(
            replace(stage, fresh=turn(stage.fresh)) for stage in plain(heads, kv_heads, ranks, heads_per_stage)
        )

    with patch.object(ithaca.engine.assemble, "head_schedule", rotated):
        yield


@contextmanager
def gradients_times_ranks() -> Iterator[None]:
    """The loss is right, the gradients are scaled by the parallel degree."""
    plain = ithaca.engine.run.Leaving.backward

    def scaled(ctx, *grads):
        return plain(ctx, *(grad * 2 for grad in grads))

    with patch.object(ithaca.engine.run.Leaving, "backward", staticmethod(scaled)):
        yield


@contextmanager
def mask_without(documents: bool, window: bool) -> Iterator[None]:
    """A causal flag that silently replaces what else the mask should say."""
    plain = ithaca.engine.batch.plan_segments

    def causal(q_chunks, k_chunks, bounds, reach, device, *chunk):
        return plain(q_chunks, k_chunks, None if documents else bounds, None if window else reach, device, *chunk)

    with patch.object(ithaca.engine.batch, "plan_segments", causal):
        yield


@contextmanager
def labels_shifted_after_sharding() -> Iterator[None]:
    """Each rank shifts its own slice: the last token of every rank loses its label."""
    plain = Run.shard

    def shard(self, *args, **kwargs):
        batch = plain(self, *args, **kwargs)
        late = torch.full_like(batch.labels, -100)
        late[:, :-1] = batch.labels[:, 1:]
        return replace(batch, labels=late)

    with (
        patch.object(ithaca.engine.batch, "shift_labels", lambda labels, *_: labels),
        patch.object(Run, "shard", shard),
    ):
        yield


@contextmanager
def positions_from_zero_on_every_rank() -> Iterator[None]:
    plain = Run.shard

    def shard(self, *args, **kwargs):
        batch = plain(self, *args, **kwargs)
        return replace(batch, positions=batch.positions - batch.positions[:, :1])

    with patch.object(Run, "shard", shard):
        yield


@contextmanager
def mean_of_the_means_of_ranks() -> Iterator[None]:
    """Every rank divides by its own count: ranks with few supervised tokens weigh too much."""
    plain = Run._local_loss

    def local(self, batch, count, *rest):
        mine = max(int((batch.labels != -100).sum()), 1) * self.mesh.world.size
        return plain(self, batch, mine, *rest)

    with patch.object(Run, "_local_loss", local):
        yield


@contextmanager
def one_step_of_the_ring_missing() -> Iterator[None]:
    plain = Batch.plans_for

    def first_only(self, window, mesh):
        plans = plain(self, window, mesh)
        return [plans[0], *(replace(plan, segments=[]) for plan in plans[1:])]

    with patch.object(Batch, "plans_for", first_only):
        yield


@contextmanager
def nothing_wrong() -> Iterator[None]:
    yield


Sabotage = Callable[[], "contextmanager"]
# sabotage -> (model, stack, items that must miss, items that must not)
SABOTAGES: dict[str, tuple[str, Stack, set[str], set[str]]] = {
    "wrong_gqa_pairing": ("llama3", Stack(ulysses=2, heads_per_stage=1), {"logits", "loss", "gradients"}, set()),
    "gradients_times_ranks": (
        "llama3",
        Stack(ulysses=2),
        {"gradients", "packed gradients"},
        {"logits", "loss", "packed loss"},
    ),
    "documents dropped": (
        "llama3",
        Stack(ulysses=2),
        {"packed loss", "packed gradients", "document leak"},
        {"loss", "gradients"},
    ),
    "window dropped": (
        "mistral",
        Stack(ulysses=2),
        {"logits", "loss", "gradients", "sliding window"},
        {"document leak"},
    ),
    "labels_shifted_after_sharding": ("llama3", Stack(ulysses=2), {"loss", "gradients"}, {"logits", "document leak"}),
    "positions_from_zero_on_every_rank": (
        "llama3",
        Stack(ulysses=2),
        {"logits", "loss", "gradients"},
        {"document leak"},
    ),
    "mean_of_the_means_of_ranks": ("llama3", Stack(ulysses=2), {"loss", "gradients"}, {"logits"}),
    "one_step_of_the_ring_missing": ("llama3", Stack(ring=2), {"logits", "loss", "gradients"}, set()),
    "nothing_wrong": ("mistral", Stack(ulysses=2, heads_per_stage=1), set(), {"logits", "loss", "sliding window"}),
}


def sabotaged(name: str) -> dict[str, bool]:
    """Items of a case under a sabotage: name -> within its limit."""
    model, stack, _, _ = SABOTAGES[name]
    if name in ("documents dropped", "window dropped"):
        spoil = mask_without(documents=name == "documents dropped", window=name == "window dropped")
    else:
        spoil = globals()[name]()
    # long enough to reach beyond two layers of a window of 96
    with spoil:
        items = run_case(Case(model, stack, world=2, length=230), CHECKS)
    return {item.name.split(" (")[0]: item.ok for item in items}


@pytest.mark.parametrize("name", SABOTAGES)
def test_verify_sees_it(workers: Workers, name: str):
    found, nothing = workers.run(sabotaged, name, world=2)
    assert nothing == {}, "rank 0 alone reports"
    missed = {item for item, ok in found.items() if not ok}
    _, _, must_miss, must_hold = SABOTAGES[name]
    assert must_miss <= missed, f"not noticed: {must_miss - missed} of {found}"
    assert must_hold <= found.keys() - missed, f"blamed without cause: {must_hold & missed}"
    assert must_miss or not missed
