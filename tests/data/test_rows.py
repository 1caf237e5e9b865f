"""The row plan and reading rows: against a plain construction of every row, and by the bytes that are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ithaca.data.batch import batch_from_rows
from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.plan import Counts, make_plan, open_plan
from ithaca.data.recall import Recall
from ithaca.data.report import plan_words
from ithaca.data.rows import IGNORE, Rows, Stream, open_rows
from ithaca.data.source import Source
from ithaca.engine.objective import cross_entropy as loss
from ithaca.engine.sequence import Layout, read_documents
from ithaca.stack import Stack

from .make import mesh_of, pack_ids, pack_random


def plain_row(rows: Rows, row: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Ids, labels (shifted) and document lengths of a whole row, the slow way."""
    packed, ids, labels, lengths = rows.packed, [], [], []
    for document, start, stop in rows.segments(row):
        first = int(packed.offsets[document])
        tokens = packed.read(first + start, first + stop).astype(np.int64)
        seen = packed.mask(first + start, first + stop)
        targets = tokens if seen is None else np.where(seen, tokens, IGNORE)
        ids.append(tokens)
        labels.append(np.append(targets[1:], IGNORE))
        lengths.append(stop - start)
    padding = rows.context - sum(lengths)
    if padding:
        ids.append(np.zeros(padding, np.int64))
        labels.append(np.full(padding, IGNORE))
        lengths.append(padding)
    return np.concatenate(ids), np.concatenate(labels), lengths


def test_ignored_labels_are_what_the_loss_ignores():
    assert IGNORE == loss.IGNORE


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("context", "longest"), [(64, 40), (64, 300), (50, 50)])
def test_every_slice_of_every_row(tmp_path: Path, masked: bool, context: int, longest: int):
    packed = pack_random(tmp_path / "p", 60, longest, masked=masked)
    rows = Rows(packed, make_plan(packed, context))
    assert len(rows) > 3
    cuts = [0, 1, 2, 17, context // 2, context - 1, context]
    slices = 0
    for row in range(len(rows)):
        ids, labels, lengths = plain_row(rows, row)
        assert rows.documents(row) == lengths and read_documents([lengths], 1, context) == [lengths]
        assert rows.supervised(row) == int((labels != IGNORE).sum()) > 0
        where = np.concatenate([np.arange(n) for n in lengths])
        for start in cuts:
            for stop in cuts:
                if start < stop:
                    part = rows.read(row, start, stop)
                    assert np.array_equal(part.ids, ids[start:stop])
                    assert np.array_equal(part.labels, labels[start:stop])
                    assert np.array_equal(part.positions, where[start:stop])
                    slices += 1
    assert slices == len(rows) * 21


@pytest.mark.parametrize("policy", ["split", "drop"])
def test_every_token_is_in_a_row_or_counted(tmp_path: Path, policy: str):
    packed = pack_random(tmp_path / "p", 200, 150, masked=True)
    plan = make_plan(packed, 64, long_documents=policy)
    lengths, counts = packed.lengths(), plan.counts
    seen = np.zeros(int(packed.offsets[-1]), np.int64)
    for document, start, stop in plan.pieces.tolist():
        first = int(packed.offsets[document])
        seen[first + start : first + stop] += 1
    assert seen.max() == 1  # nothing twice
    lost = int((seen == 0).sum())
    assert lost == counts.dropped_tokens + counts.unlearnable_tokens
    assert counts.tokens == len(seen) and counts.documents == len(lengths) and counts.longest == lengths.max()
    assert counts.long_documents == int((lengths > 64).sum()) > 10
    assert counts.rows * 64 == len(seen) - lost + counts.padding
    if policy == "split":
        assert counts.dropped_tokens == 0
        assert counts.split_pieces == int(np.ceil(lengths[lengths > 64] / 64).sum())
        assert counts.unpredicted == counts.split_pieces - counts.long_documents
    else:
        assert counts.dropped_documents == counts.long_documents
        assert counts.dropped_tokens == int(lengths[lengths > 64].sum())
        assert plan.pieces[:, 1].max() == 0


def test_pieces_without_anything_to_learn_are_left_out_and_counted(tmp_path: Path):
    ids = np.arange(100)
    packed = pack_ids(tmp_path / "p", [ids, ids[:30]], [np.where(ids < 50, -100, ids), None])
    plan = make_plan(packed, 20)
    # pieces 0-20, 20-40 have no label; 40-60 has some; the other document is cut in two
    assert plan.counts.unlearnable_pieces == 2 and plan.counts.unlearnable_tokens == 40
    assert sorted(map(tuple, plan.pieces.tolist())) == [
        (0, 40, 60), (0, 60, 80), (0, 80, 100), (1, 0, 20), (1, 20, 30),
    ]  # fmt: skip
    assert sorted(plan.supervised.tolist()) == [9, 10, 19, 19, 19]


def test_a_piece_whose_only_supervised_token_is_its_first_teaches_nothing(tmp_path: Path):
    ids = np.arange(40)
    packed = pack_ids(tmp_path / "p", [ids, ids], [np.where(ids == 20, ids, -100), None])
    plan = make_plan(packed, 20)
    assert plan.counts.unlearnable_pieces == 2 and all(plan.pieces[:, 0] == 1)


@pytest.mark.parametrize("tokens", [4096, 4095, 4097, 3 * 4096, 10_000])
def test_counts_of_any_range_from_the_index_of_the_mask(tmp_path: Path, tokens: int):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 1000, tokens)
    seen = rng.random(tokens) < 0.3
    packed = pack_ids(tmp_path / "p", [ids[:7], ids], [None, np.where(seen, ids, -100)])
    before = packed.bytes_read
    for start, stop in [
        (0, tokens),
        (1, tokens),
        (0, 0),
        (tokens, tokens),
        *np.sort(rng.integers(0, tokens + 1, (20, 2))),
    ]:
        assert packed.count(7 + start, 7 + stop) == int(seen[start:stop].sum())
    assert packed.bytes_read - before <= 24 * 2 * 513  # two blocks of 4,096 bits each time


def test_a_plan_is_kept_and_is_the_same_again(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 100, 60, masked=False)
    made, kept = make_plan(packed, 64), open_plan(packed, 64)
    again = open_plan(packed, 64)
    assert isinstance(again.pieces, np.memmap) and len(list((tmp_path / "p" / "rows").iterdir())) == 1
    for name in ("pieces", "bounds", "supervised"):
        assert np.array_equal(getattr(made, name), getattr(kept, name))
        assert np.array_equal(getattr(kept, name), getattr(again, name))
    assert again.counts == made.counts and isinstance(again.counts, Counts)
    open_plan(packed, 64, seed=1)
    open_plan(packed, 128)
    open_plan(packed, 128, long_documents="drop")
    assert len(list((tmp_path / "p" / "rows").iterdir())) == 4
    Packed(tmp_path / "p").verify()  # plans are not part of the data


def test_a_plan_that_cannot_be_kept_lives_in_memory(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 50, 60, masked=False)
    (tmp_path / "p" / "rows").write_text("in the way")
    assert len(open_plan(packed, 64)) == len(make_plan(packed, 64))


def test_a_damaged_plan_is_named(tmp_path: Path):
    packed = pack_random(tmp_path / "p", 50, 60, masked=False)
    open_plan(packed, 64)
    (folder,) = (tmp_path / "p" / "rows").iterdir()
    (folder / "bounds.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is damaged .*; remove that folder, it is made again"):
        open_plan(packed, 64)


def test_streams_mix_sources_by_weight(tmp_path: Path):
    first = Rows(packed := pack_random(tmp_path / "a", 60, 60, masked=False), make_plan(packed, 64))
    second = Recall(64, 1000)
    stream = Stream([first, second], [0.75, 0.25], seed=3)
    assert stream.context == 64 and stream.largest_token == max(first.largest_token, second.largest_token)
    counts = {first.name: 0, second.name: 0}
    for index in range(40):
        source, row = stream.where(index)
        counts[source.name] += 1
        assert stream.documents(index) == source.documents(row) and stream.segments(index) == source.segments(row)
        assert stream.supervised(index) == source.supervised(row)
        assert np.array_equal(stream.read(index, 3, 50).labels, source.read(row, 3, 50).labels)
    assert list(counts.values()) == [30, 10]


def test_streams_need_rows_of_one_length(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rows of different lengths \(synthetic recall: 64, synthetic recall: 128\)"):
        Stream([Recall(64, 1000), Recall(128, 1000)])


def test_sources_of_one_folder_have_their_own_rows(tmp_path: Path):
    for name, value in (("a", 1), ("b", 2)):
        np.save(tmp_path / f"{name}.npy", np.full((20, 30), value))
    packed = pack(
        [Source(str(tmp_path / "a.npy")), Source(str(tmp_path / "b.npy"))], tmp_path / "p", vocabulary=5, quiet=True
    )
    one, two = open_rows(packed, 64)
    assert one.name.endswith("a.npy") and two.name.endswith("b.npy")
    for rows, value in ((one, 1), (two, 2)):
        assert all(set(rows.read(row, 0, 64).ids.tolist()) <= {0, value} for row in range(len(rows)))
        assert len(rows) == 10 and rows.documents(0) == [30, 30, 4]


@pytest.mark.parametrize(("ulysses", "ring"), [(8, 1), (1, 8), (4, 2), (2, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_rank_reads_an_eighth_of_a_row(tmp_path: Path, ulysses: int, ring: int, masked: bool):
    context = 1 << 16
    ids = np.random.default_rng(0).integers(0, 1000, context)
    packed = pack_ids(tmp_path / "p", [ids], [np.where(ids < 500, -100, ids)] if masked else None)
    rows = Rows(packed, make_plan(packed, context))
    size = context * 2 + (context // 8 if masked else 0)
    for rank in range(8):
        before = packed.bytes_read
        tokens = Layout(context, ulysses, ring).tokens(rank // ulysses, rank % ulysses).numpy()
        part = rows.read_slice(0, tokens)
        assert np.array_equal(part.ids, ids[tokens]) and np.array_equal(part.positions, tokens)
        assert (
            packed.bytes_read - before <= size // 8 + 16
        )  # one token more per range, and the rest of a byte of the mask


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
@pytest.mark.parametrize(("ulysses", "ring"), [(8, 1), (2, 4)])
def test_the_kernel_counts_no_more_than_an_eighth_of_five_million_tokens(tmp_path: Path, ulysses: int, ring: int):
    context = 5 << 20
    ids = np.random.default_rng(0).integers(0, 100_000, context, dtype=np.uint32)
    np.save(tmp_path / "a.npy", ids)
    packed = pack([Source(str(tmp_path / "a.npy"))], tmp_path / "p", vocabulary=100_000, workers=1, quiet=True)
    rows, stack = Rows(packed, open_plan(packed, context)), Stack(ulysses=ulysses, ring=ring)
    for rank in (0, 3, 7):
        mesh = mesh_of(ulysses, ring, 1, rank)
        before = characters_read()
        batch = batch_from_rows(rows, [0], mesh, stack, 100_000)
        assert characters_read() - before <= context * 4 // 8 + 4096
        where = batch.layout.tokens(mesh.ring.rank, mesh.ulysses.rank)
        assert np.array_equal(batch.input_ids[0].numpy(), ids[where.numpy()])


def characters_read() -> int:
    """Bytes that this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("context", [1, 0, -5, "64"])
def test_a_context_of_less_than_two_is_refused(tmp_path: Path, context):
    packed = pack_random(tmp_path / "p", 5, 60, masked=False)
    for plan in (make_plan, open_plan):
        with pytest.raises(ValueError, match=r"a row needs at least 2 tokens"):
            plan(packed, context)


def test_policies(tmp_path: Path):
    packed = pack_ids(tmp_path / "p", [range(10), range(90), range(30)])
    with pytest.raises(
        ValueError, match=r"1 documents are longer than the context of 40 tokens; document 1 is the longest with 90"
    ):
        make_plan(packed, 40, long_documents="error")
    with pytest.raises(ValueError, match="long_documents='cut' is unknown; choose one of 'split', 'drop', 'error'"):
        make_plan(packed, 40, long_documents="cut")
    assert len(make_plan(packed, 90, long_documents="error")) == 2


def test_less_than_one_row_is_padded_and_said(tmp_path: Path):
    packed = pack_ids(tmp_path / "p", [range(10), range(90), range(30)])
    plan = make_plan(packed, 200)
    assert (len(plan), plan.counts.padding) == (1, 70) and plan.supervised.tolist() == [127]
    rows = Rows(packed, plan)
    assert sorted(rows.documents(0)) == [10, 30, 70, 90] and rows.documents(0)[-1] == 70
    read = rows.read(0, 0, 200)
    assert (read.labels != IGNORE).sum() == 127 and (read.labels[130:] == IGNORE).all()
    words = "\n".join(plan_words("p", 200, plan.counts, "split"))
    assert "1 row of 200 tokens, 65.00% full" in words and "warning" in words and "context to 130" in words
    assert "warning" not in "\n".join(plan_words("p", 131, make_plan(packed, 131).counts, "split"))
    with pytest.raises(ValueError, match=r"nothing is left to learn from of 3 documents .* 3 are longer and dropped"):
        make_plan(packed, 5, long_documents="drop")
