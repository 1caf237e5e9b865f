"""batch_from_rows equals shard_batch field by field, for every rank of many layouts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from ithaca.data.batch import batch_from_rows, held_ranges
from ithaca.data.plan import make_plan
from ithaca.data.recall import Recall
from ithaca.data.rows import Rows, Stream
from ithaca.engine.batch import Batch, shard_batch
from ithaca.engine.sequence import Layout
from ithaca.stack import Stack

from .make import mesh_of, pack_ids, pack_random

LAYOUTS = [  # ulysses, ring, data
    (1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (4, 2, 1), (2, 4, 1), (3, 1, 1), (1, 3, 2), (2, 2, 2),
    (1, 1, 4), (3, 2, 2),
]  # fmt: skip


def whole(rows, indices) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """The global tensors that shard_batch takes. Its labels are unshifted: those of the token before, one later."""
    parts = [rows.read(index, 0, rows.context) for index in indices]
    ids = torch.stack([torch.from_numpy(part.ids) for part in parts])
    labels = torch.full_like(ids, -100)
    labels[:, 1:] = torch.stack([torch.from_numpy(part.labels) for part in parts])[:, :-1]
    return ids, labels, [rows.documents(index) for index in indices]


def assert_equal(ours: Batch, theirs: Batch) -> None:
    for name in ("input_ids", "labels", "positions"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype == torch.int64 and a.shape == b.shape and torch.equal(a, b), name
    assert (ours.valid is None) == (theirs.valid is None)
    if ours.valid is not None and theirs.valid is not None:
        assert ours.valid.dtype == torch.bool and torch.equal(ours.valid, theirs.valid)
    for name in ("layout", "documents", "longest", "supervised", "tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("context", [48, 50, 61])
def test_the_same_batch(tmp_path: Path, masked: bool, context: int):
    packed = pack_random(tmp_path / "p", 40, 110, masked=masked)
    rows = Rows(packed, make_plan(packed, context))
    indices = [len(rows) - 1, 0, 5, 3] * 3
    cases = 0
    for ulysses, ring, data in LAYOUTS:
        stack = Stack(ulysses=ulysses, ring=ring)
        used = indices[: 3 * data]
        ids, labels, documents = whole(rows, used)
        assert any(len(lengths) > 1 for lengths in documents)
        for rank in range(ulysses * ring * data):
            mesh = mesh_of(ulysses, ring, data, rank)
            theirs = shard_batch(ids, labels, documents, mesh=mesh, stack=stack, vocabulary=1000)
            assert_equal(batch_from_rows(rows, used, mesh, stack, 1000), theirs)
            cases += 1
    assert cases == 70


@pytest.mark.parametrize("context", [64, 67])
def test_rows_of_one_document_have_no_bounds(context: int):
    rows = Recall(context, 100)
    ids, labels, _ = whole(rows, [4, 9])
    for (ulysses, ring), rank in product([(2, 2), (4, 1), (1, 4)], range(4)):
        mesh, stack = mesh_of(ulysses, ring, 1, rank), Stack(ulysses=ulysses, ring=ring)
        ours = batch_from_rows(rows, [4, 9], mesh, stack, 100)
        assert ours.documents is None
        assert_equal(ours, shard_batch(ids, labels, None, mesh=mesh, stack=stack, vocabulary=100))


def test_a_stream_is_addressed_by_sample(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 40, 110, masked=True)
    stream = Stream([Rows(packed, make_plan(packed, 48)), Recall(48, 900)], [1, 1], seed=2)
    ids, labels, documents = whole(stream, range(100, 104))
    for rank in range(4):
        mesh, stack = mesh_of(2, 1, 2, rank), Stack(ulysses=2)
        ours = batch_from_rows(stream, range(100, 104), mesh, stack, 1000)
        assert_equal(ours, shard_batch(ids, labels, documents, mesh=mesh, stack=stack, vocabulary=1000))


@pytest.mark.parametrize("length", [1, 7, 48, 50, 61])
def test_held_ranges_are_the_tokens_of_the_layout(length: int):
    for ulysses, ring in product(range(1, 6), range(1, 6)):
        layout = Layout(length, ulysses, ring)
        for r, u in product(range(ring), range(ulysses)):
            ranges = list(held_ranges(layout, r, u))
            assert [i for a, b in ranges for i in range(a, b)] == layout.tokens(r, u).tolist() and len(ranges) <= 2


def test_refused(tmp_path: Path):
    packed = pack_ids(tmp_path / "p", [[5, 6, 7, 990], [1, 2, 3, 4]])
    rows, mesh = Rows(packed, make_plan(packed, 4)), mesh_of(1, 1, 2, 0)
    with pytest.raises(
        ValueError, match=r"a batch of 3 rows cannot be split over 2 data-parallel groups; use a multiple of 2"
    ):
        batch_from_rows(rows, [0, 1, 1], mesh, Stack(), 1000)
    with pytest.raises(
        ValueError, match=r"row 0 of .* has token 990, outside the model's vocabulary of 500 tokens \(0 to 499\)"
    ):
        batch_from_rows(rows, [0, 1], mesh, Stack(), 500)
    with pytest.raises(ValueError, match=r"holds token 990, outside the model's vocabulary of 990 tokens"):
        packed.check_vocabulary(990)
    packed.check_vocabulary(991)
