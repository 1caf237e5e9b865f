"""What run.shard and run.loss refuse: the value, the limit and the remedy in words, and the same error on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ithaca.base.processes.pool import WorkerError, Workers
from ithaca.engine.run import Run

from .tiny import prepared, tiny, tokens

IDS = tokens(2, 12)


@pytest.fixture(scope="module")
def run() -> Run:
    return prepared(shard_parameters=False)


def change(ids: torch.Tensor, row: int, at: int, value: int) -> torch.Tensor:
    ids = ids.clone()
    ids[row, at] = value
    return ids


BAD = {
    "one row without the batch": (dict(input_ids=IDS[0]), ["input_ids has shape (12,)", "[rows, tokens]"]),
    "three dims": (dict(input_ids=IDS[None]), ["input_ids has shape (1, 2, 12)", "[rows, tokens]"]),
    "no tokens": (dict(input_ids=IDS[:, :0]), ["(2, 0)", "both at least 1"]),
    "no rows": (dict(input_ids=IDS[:0]), ["(0, 12)", "both at least 1"]),
    "a list": (dict(input_ids=IDS.tolist()), ["input_ids is a list", "torch.Tensor"]),
    "float ids": (dict(input_ids=IDS.float()), ["input_ids has dtype torch.float32", "whole numbers (torch.int64)"]),
    "float labels": (dict(input_ids=IDS, labels=IDS.double()), ["labels has dtype torch.float64", "whole numbers"]),
    "labels of another shape": (
        dict(input_ids=IDS, labels=IDS[:, 1:]),
        ["labels has shape (2, 11)", "input_ids (2, 12)", "same shape, unshifted", "-100"],
    ),
    "id beyond the vocabulary": (
        dict(input_ids=change(IDS, 1, 3, 257)),
        ["input_ids[1, 3] is 257", "vocabulary of 257 tokens (0 to 256)", "tokenizer and model belong together"],
    ),
    "negative id": (dict(input_ids=change(IDS, 0, 11, -1)), ["input_ids[0, 11] is -1", "0 to 256"]),
    "ignored label as an id": (dict(input_ids=change(IDS, 0, 0, -100)), ["input_ids[0, 0] is -100"]),
    "label beyond the vocabulary": (
        dict(input_ids=IDS, labels=change(IDS, 0, 2, 300)),
        ["labels[0, 2] is 300", "vocabulary of 257"],
    ),
    "negative label that is not -100": (dict(input_ids=IDS, labels=change(IDS, 0, 2, -1)), ["labels[0, 2] is -1"]),
    "no label": (
        dict(input_ids=IDS, labels=torch.full_like(IDS, -100)),
        ["no token of this batch is supervised", "every label is -100", "supervise at least one"],
    ),
    "only the first label, which no token predicts": (
        dict(input_ids=IDS, labels=torch.where(torch.arange(12) == 0, IDS, -100)),
        ["no token of this batch is supervised", "after the shift"],
    ),
    "documents of one token each": (dict(input_ids=IDS, documents=[[1] * 12] * 2), ["no token of this batch"]),
    "documents that do not add up": (
        dict(input_ids=IDS, documents=[[6, 6], [5, 6]]),
        ["documents[1] adds up to 11 tokens", "the sequence has 12", "padding included"],
    ),
    "documents of too few rows": (
        dict(input_ids=IDS, documents=[[12]]),
        ["documents has 1 entries for a batch of 2 rows", "one list of document lengths per row"],
    ),
    "documents without rows": (dict(input_ids=IDS, documents=[6, 6]), ["2 entries of type int", "batch of 2 rows"]),
    "an empty document": (
        dict(input_ids=IDS, documents=[[12], [12, 0]]),
        ["documents[1] has the length 0", "a whole number above 0"],
    ),
    "half a token": (dict(input_ids=IDS, documents=[[12], [6.5, 5.5]]), ["documents[1] has the length 6.5"]),
    "True as a length": (dict(input_ids=IDS, documents=[[11, True], [12]]), ["documents[0] has the length True"]),
    "no document": (dict(input_ids=IDS, documents=[[], [12]]), ["documents[0] adds up to 0 tokens"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_in_words(run: Run, name: str):
    batch, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        run.shard(**batch)
    for word in words:
        assert word in str(caught.value)


def test_several_mistakes_of_a_batch_are_one_error(run: Run):
    with pytest.raises(ValueError) as caught:
        run.shard(change(IDS, 0, 0, 999), labels=change(IDS, 1, 1, -7)[:, :11])
    text = str(caught.value)
    assert text.startswith("this batch cannot be used: 3 problems\n")
    assert "labels has shape (2, 11)" in text and "input_ids[0, 0] is 999" in text and "labels[1, 1] is -7" in text


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_integers_are_the_same_batch(run: Run, dtype: torch.dtype):
    """Tokenizers and memory-mapped files give int32; cross-entropy takes int64 only."""
    labels = torch.where(torch.arange(12) < 4, -100, IDS)
    with torch.no_grad():
        wide = run.loss(run.shard(IDS, labels=labels))
        assert run.loss(run.shard(IDS.to(dtype), labels=labels.to(dtype))).equal(wide)


@pytest.mark.parametrize(
    "documents",
    [[[5, 7], [12]], ((5, 7), (12,)), [torch.tensor([5, 7]), torch.tensor([12])]],
    ids=["list", "tuple", "tensors"],
)
def test_documents_may_come_as_lists_tuples_or_tensors(run: Run, documents: Any):
    batch = run.shard(IDS, documents=documents)
    assert batch.documents == [[5, 7], [12]] and batch.longest == 12
    assert batch.positions[0].tolist() == [*range(5), *range(7)]


def test_the_documents_of_a_single_row_need_no_outer_list(run: Run):
    for documents in ([5, 7], torch.tensor([5, 7]), torch.tensor([[5, 7]])):
        assert run.shard(IDS[:1], documents=documents).documents == [[5, 7]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(supervised=0), ["supervised=0", "at least 1", "sum of batch.supervised"]),
        (dict(label_smoothing=1.5), ["label_smoothing=1.5", "between 0 and 1"]),
        (dict(label_smoothing=-0.1, z_loss=-1.0), ["2 problems", "label_smoothing=-0.1", "z_loss=-1.0", "negative"]),
        (dict(z_loss=float("nan")), ["z_loss=nan"]),
    ],
)
def test_a_loss_with_impossible_terms_is_refused(run: Run, options: dict[str, Any], words: list[str]):
    batch = run.shard(IDS)
    with pytest.raises(ValueError) as caught:
        run.loss(batch, **options)
    for word in words:
        assert word in str(caught.value)


def shard_them(stack: dict[str, Any], batches: list[dict[str, Any]]) -> list[str]:
    """Each bad batch in turn on one prepared model, then a good one: what was raised."""
    run, raised = prepared(**stack), []
    for batch in batches:
        try:
            run.shard(**batch)
            raised.append("nothing")
        except ValueError as error:
            raised.append(str(error))
    run.loss(run.shard(tokens(4, 12))).backward()
    return raised


@pytest.mark.parametrize("stack", [dict(ulysses=2), dict(ulysses=2, ring=2)], ids=["2 data groups", "ring"])
def test_every_rank_raises_the_same_and_the_run_goes_on(workers: Workers, stack: dict[str, Any]):
    batches = [batch for batch, _ in BAD.values()]
    raised = workers.run(shard_them, stack, batches, world=4)
    assert all(each == raised[0] for each in raised)
    for text, (_, words) in zip(raised[0], BAD.values(), strict=True):
        assert all(word in text for word in words)


def shard_rows(rows: int) -> None:
    prepared(ulysses=2).shard(tokens(rows, 12))


def test_rows_that_data_groups_cannot_share_are_refused_on_every_rank(workers: Workers):
    with pytest.raises(WorkerError) as caught:
        workers.run(shard_rows, 3, world=4)
    assert caught.value.kind == "ValueError" and caught.value.ranks == [0, 1, 2, 3]
    first = str(caught.value).splitlines()[0]
    assert "a batch of 3 rows cannot be split over 2 data-parallel groups" in first
    assert "pass a multiple of 2 rows, or raise ulysses or ring" in first


def prepare_only(stack: dict[str, Any]) -> None:
    prepared(**stack)


def test_a_world_that_does_not_fit_is_refused_on_every_rank(workers: Workers):
    with pytest.raises(WorkerError) as caught:
        workers.run(prepare_only, dict(ulysses=4, ring=2), world=4)
    assert caught.value.kind == "ValueError" and len(caught.value.ranks) == 4
    first = str(caught.value).splitlines()[0]
    assert "world size 4 is not a multiple of ulysses × ring × replicate = 4 × 2 × 1 = 8" in first


def test_several_mistakes_of_a_stack_reach_the_user_as_one_error():
    with pytest.raises(ValueError, match="this stack cannot run: 2 problems") as caught:
        prepared(ulysses=0, store="tape")
    assert "ulysses=0" in str(caught.value) and "store='tape'" in str(caught.value)


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Eight processes that each train alone would look like a run that works."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(
        ValueError, match=r"a launcher started 8 processes .* call torch.distributed.init_process_group"
    ):
        prepared()


def test_another_number_for_tokens_without_loss_is_refused_with_the_right_one():
    labels = IDS.clone()
    labels[0, 3] = -1
    with pytest.raises(ValueError, match=r"labels\[0, 3\] is -1, .* has the label -100: labels\[labels == -1\] = -100"):
        prepared().shard(IDS, labels=labels)


def test_lengths_may_be_numbers_of_numpy():
    run, length = prepared(), IDS.shape[1]
    lengths = [[length - 3, 3]] * IDS.shape[0]
    wanted = run.loss(run.shard(IDS, documents=lengths))
    for given in (
        np.array(lengths),
        [np.array(row) for row in lengths],
        [[np.int64(n) for n in row] for row in lengths],
    ):
        assert run.loss(run.shard(IDS, documents=given)).equal(wanted)


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
def test_a_loss_of_a_frozen_model_says_that_it_is(fsdp: bool):
    model = tiny().requires_grad_(False)
    run = prepared(model, shard_parameters=fsdp)
    loss = run.loss(run.shard(IDS))
    assert loss.item() > 0
    with pytest.raises(
        RuntimeError, match=r"every parameter of the model is frozen .* before prepare, or add adapters"
    ):
        loss.backward()
    assert run.loss(run.shard(IDS)).item() == loss.item()


def test_a_z_loss_without_end_is_refused():
    run = prepared()
    with pytest.raises(ValueError, match="z_loss=inf must be finite"):
        run.loss(run.shard(IDS), z_loss=float("inf"))
