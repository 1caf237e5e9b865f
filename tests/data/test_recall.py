"""The synthetic recall task: what a row holds, that no rank can answer alone, and that two layers learn it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from ithaca.data.batch import held_ranges
from ithaca.data.recall import Recall, recall_score
from ithaca.data.rows import IGNORE
from ithaca.engine.sequence import Layout


@pytest.mark.parametrize(("context", "keys", "values"), [(64, 4, 8), (100, 2, 2), (2048, 16, 10), (333, 5, 7)])
def test_every_answer_follows_from_a_fact(context: int, keys: int, values: int):
    source = Recall(context, 500, seed=3, keys=keys, values=values)
    for row in range(5):
        ids, labels, positions = source.read(row, 0, context)
        facts = {}
        for token in ids[: context // 8]:
            key, value = divmod(int(token) - 1 - keys - values, values)
            assert 0 <= key < keys and facts.setdefault(key, value) == value
        assert len(facts) == keys  # every key is stated
        begin, end = source.asked
        asked = ids[begin:end] - 1
        assert ((asked >= 0) & (asked < keys)).all()
        assert labels[begin:end].tolist() == [1 + keys + facts[key] for key in asked.tolist()]
        assert (labels[:begin] == IGNORE).all() and (labels[end:] == IGNORE).all()
        assert source.supervised(row) == int((labels != IGNORE).sum()) == end - begin
        assert (ids[context // 8 : begin] == 0).all() and (ids[end:] == 0).all()
        assert positions.tolist() == list(range(context)) and source.documents(row) == [context]
        assert ids.min() >= 0 and ids.max() <= source.largest_token < 500


def test_rows_differ_and_are_the_same_again():
    source = Recall(256, 100, seed=1)
    first = source.read(7, 0, 256)
    assert np.array_equal(first.ids, Recall(256, 100, seed=1).read(7, 0, 256).ids)
    assert not np.array_equal(first.ids, source.read(8, 0, 256).ids)
    assert not np.array_equal(first.ids, Recall(256, 100, seed=2).read(7, 0, 256).ids)
    values = [int(source.read(row, *source.asked).labels[0]) for row in range(400)]
    assert set(values) == set(range(5, 13)) and max(map(values.count, set(values))) < 80  # 50 each, ± 4 deviations


def test_slices_of_five_million_tokens_are_made_by_themselves():
    source = Recall(5 << 20, 1000, keys=8, values=16)
    whole = source.read(3, 0, 1000)
    assert np.array_equal(source.read(3, 100, 200).ids, whole.ids[100:200])
    begin, end = source.asked
    part = source.read(3, begin - 10, begin + 10)
    assert part.labels.tolist()[:10] == [IGNORE] * 10 and IGNORE not in part.labels.tolist()[10:]
    assert np.array_equal(source.read(3, begin, begin + 10).labels, part.labels[10:])
    assert source.read(3, end, end + 5).labels.tolist() == [IGNORE] * 5


@pytest.mark.parametrize("context", [512, 2048, 2049, 2055, 5000])
def test_no_rank_holds_a_fact_and_a_question(context: int):
    source = Recall(context, 100)
    begin, end = source.asked
    for ulysses, ring in product(range(1, 9), range(1, 9)):
        if ulysses * ring == 1:
            continue
        for r, u in product(range(ring), range(ulysses)):
            held = list(held_ranges(Layout(context, ulysses, ring), r, u))
            facts = any(a < context // 8 for a, _ in held)
            questions = any(a < end and b > begin for a, b in held)
            assert not (facts and questions), (ulysses, ring, r, u)


def test_score():
    labels = torch.tensor([[IGNORE, 5, 6, IGNORE, 7]])
    assert recall_score(torch.tensor([[5, 5, 5, 5, 7]]), labels) == (2, 3)
    assert Recall(64, 100).chance == 1 / 8


def test_two_small_layers_learn_it():
    """Sixteen short rows a step; nine of ten answers right within 300 steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.1,
    )  # fmt: skip
    model, source = LlamaForCausalLM(config), Recall(64, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    recent = []
    for step in range(300):
        rows = [source.read(16 * step + i, 0, 64) for i in range(16)]
        ids, labels = (torch.from_numpy(np.stack(each)) for each in list(zip(*rows, strict=True))[:2])
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-9:], recall_score(logits.argmax(-1), labels)]
        right, asked = (sum(each) for each in zip(*recent, strict=True))
        if len(recent) == 10 and right > 0.9 * asked:
            return
    raise AssertionError(f"{right / asked:.0%} after {step + 1} steps, chance is {source.chance:.0%}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(context=31, vocabulary=100),
            "context=31 is too short: the first eighth states 4 facts; use at least 32 tokens",
        ),
        (dict(context=64, vocabulary=44), r"4 keys and 8 values need .* = 45 tokens, but the vocabulary has 44"),
        (dict(context=64, vocabulary=100, keys=1), "with fewer than two there is nothing to tell apart"),
        (dict(context=64, vocabulary=100, rows=0), "rows=0 must be at least 1"),
    ],
)
def test_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Recall(**arguments)
