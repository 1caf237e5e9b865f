"""One loss: the mean over all supervised tokens of all ranks and micro-batches, whoever holds them.

Reference numbers are made here, in one process, document by document, with the untouched model and cross_entropy alone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.base.processes.pool import Workers

from .tiny import gradients, prepared, tiny, tokens, worst

ROWS, LENGTH = 4, 30
DOCUMENTS = [[30], [7, 23], [1, 1, 14, 14], [29, 1]]


def labelled(ids: Tensor) -> Tensor:
    """A different number of supervised tokens in each row: none in the first, all in the last."""
    labels = ids.clone()
    for row in range(ids.shape[0]):
        labels[row, : ids.shape[1] * (ids.shape[0] - 1 - row) // (ids.shape[0] - 1)] = -100
    return labels


def reference(
    preset: str, micro: list[tuple], smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the untouched model: each document by itself."""
    model = tiny(preset)
    total, count = torch.zeros(()), 0
    for ids, labels, documents in micro:
        for row in range(ids.shape[0]):
            start = 0
            for length in documents[row] if documents else [ids.shape[1]]:
                part = slice(start, start + length)
                start += length
                logits = model(ids[row : row + 1, part], use_cache=False).logits[0, :-1]
                target = labels[row, part][1:]
                keep = target != -100
                count += int(keep.sum())
                if not bool(keep.any()):
                    continue
                loss = F.cross_entropy(logits[keep], target[keep], reduction="sum", label_smoothing=smoothing)
                total = total + loss + z_loss * (torch.logsumexp(logits[keep], -1) ** 2).sum()
    (total / count).backward()
    return (total / count).detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(preset: str, stack: dict[str, Any], micro: list[tuple], terms: dict[str, float]) -> tuple[Tensor, Any]:
    """One accumulated step. -> loss, and the gradients on rank 0"""
    run = prepared(preset, **stack)
    batches = [run.shard(ids, labels=labels, documents=documents) for ids, labels, documents in micro]
    count = sum(batch.supervised for batch in batches)
    value = torch.zeros(())
    for batch in batches:
        loss = run.loss(batch, supervised=count, **terms)
        loss.backward()
        value += loss.detach()
    found = gradients(run)
    return value, found if run.mesh.world.rank == 0 else None


def check(
    workers: Workers, world: int, preset: str, stack: dict[str, Any], micro: list[tuple], expected, **terms: float
):
    answers = workers.run(step, preset, stack, micro, terms, world=world)
    loss, theirs = expected
    values = [value for value, _ in answers]
    assert all(torch.equal(value, values[0]) for value in values), f"ranks disagree about the loss: {values}"
    assert abs(float(values[0] - loss)) <= 1e-5 * abs(float(loss))
    assert worst(answers[0][1], theirs) <= 1e-5


WORLDS = {
    "1": (1, dict()),
    "1, whole": (1, dict(shard_parameters=False, tile=None, recompute="none")),
    "2 data": (2, dict()),
    "2 ulysses": (2, dict(ulysses=2, heads_per_stage=1)),
    "2 ring": (2, dict(ring=2, tile=7)),
    "4 = 2 data × 2 ulysses": (4, dict(ulysses=2)),
    "4 = 2 replicas × 2 data": (4, dict(replicate=2)),
    "4 = 2 ring × 2 ulysses": (4, dict(ring=2, ulysses=2, tile=4)),
    "4 ulysses, whole": (4, dict(ulysses=4, shard_parameters=False)),
}
if os.environ.get("ITHACA_LOSSES") == "long":  # make losses
    WORLDS |= {
        "2 replicas": (2, dict(replicate=2)),
        "4 data": (4, dict()),
        "4 = 2 replicas × 2 ulysses": (4, dict(replicate=2, ulysses=2, recompute="layer")),
        "4 = 4 replicas": (4, dict(replicate=4)),
    }


@pytest.fixture(scope="module")
def one_batch():
    """Rows of different documents and different numbers of supervised tokens; the first row has none."""
    ids = tokens(ROWS, LENGTH)
    micro = [(ids, labelled(ids), DOCUMENTS)]
    return micro, reference("llama3", micro)


@pytest.mark.parametrize("name", sorted(WORLDS, key=lambda name: WORLDS[name][0]))
def test_loss_and_gradients_do_not_depend_on_who_holds_what(workers: Workers, name: str, one_batch):
    world, stack = WORLDS[name]
    check(workers, world, "llama3", stack, *one_batch)


def test_a_batch_of_which_one_token_is_supervised(workers: Workers):
    """All ranks but one have nothing to learn from, and take part all the same."""
    ids = tokens(2, LENGTH)
    labels = torch.full_like(ids, -100)
    labels[1, 3] = ids[1, 3]
    micro = [(ids, labels, None)]
    expected = reference("qwen3", micro)
    check(workers, 4, "qwen3", dict(ulysses=2), micro, expected)
    check(workers, 4, "qwen3", dict(), [(ids.repeat(2, 1), labels.repeat(2, 1), None)], expected)


@pytest.mark.parametrize(("world", "stack"), [(1, dict()), (4, dict(ulysses=2))], ids=["1", "4"])
def test_micro_batches_weigh_by_their_supervised_tokens(workers: Workers, world: int, stack: dict[str, Any]):
    """Other lengths, other documents, other counts: the sum is the mean over all of them."""
    one, two, three = tokens(2, LENGTH, 1), tokens(4, 11, 2), tokens(2, 5, 3)
    micro = [(one, labelled(one), None), (two, two, [[11], [4, 7], [10, 1], [5, 6]]), (three, labelled(three), None)]
    check(workers, world, "llama3", stack, micro, reference("llama3", micro))


@pytest.mark.parametrize(("world", "stack"), [(1, dict(tile=8)), (2, dict(ulysses=2))], ids=["1", "2"])
@pytest.mark.parametrize(
    "terms", [dict(label_smoothing=0.1), dict(z_loss=1e-2), dict(label_smoothing=0.2, z_loss=1e-3)]
)
def test_smoothing_and_z_loss_count_per_supervised_token(
    workers: Workers, world: int, stack: dict[str, Any], terms: dict[str, float]
):
    ids = tokens(2, LENGTH)
    micro = [(ids, labelled(ids), DOCUMENTS[:2])]
    expected = reference("llama3", micro, terms.get("label_smoothing", 0.0), terms.get("z_loss", 0.0))
    check(workers, world, "llama3", stack, micro, expected, **terms)


def test_without_labels_every_token_is_supervised_but_the_first_of_a_document():
    run = prepared(shard_parameters=False)
    ids = tokens(2, LENGTH)
    assert run.shard(ids).supervised == 2 * (LENGTH - 1) and run.shard(ids).tokens == 2 * LENGTH
    packed = run.shard(ids, documents=[[10, 20], [30]])
    assert packed.supervised == 2 * LENGTH - 3
    assert packed.labels[0, 9] == -100 and packed.labels[0, 8] == ids[0, 9] and packed.labels[1, 29] == -100


def test_the_caller_keeps_his_tensors():
    run, ids = prepared(shard_parameters=False), tokens(2, LENGTH)
    labels = labelled(ids)
    before = ids.clone(), labels.clone()
    run.loss(run.shard(ids, labels=labels)).backward()
    assert torch.equal(ids, before[0]) and torch.equal(labels, before[1])
