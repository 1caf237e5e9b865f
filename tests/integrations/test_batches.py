"""What collators make, as every rank of a run needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ithaca.integrations.batches import Collate, WholeBatch, join, read, read_pairs

from .runs import padded, rows


def batch(**changes: Any) -> dict[str, Any]:
    ids = torch.arange(1, 9).reshape(2, 4)
    made = {"input_ids": ids, "labels": ids.clone(), **changes}
    return {name: value for name, value in made.items() if value is not None}


def test_padding_is_a_document_without_labels():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, -100, -100]])
    whole = read(batch(attention_mask=mask, labels=labels))
    assert whole.documents() == [[4], [2, 2]] and whole.supervised == 4 and whole.padded
    assert whole["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert read(whole) is whole
    plain = read(batch(attention_mask=torch.ones(2, 4)))
    assert plain.documents() is None and plain.supervised == 6 and not plain.padded


def test_positions_that_begin_again_are_documents():
    labels = torch.tensor([[-100, 2, -100, 4], [5, 6, 7, 8]])
    whole = read(batch(position_ids=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]), labels=labels, max_length_q=2))
    assert whole.documents() == [[2, 2], [4]] and whole.supervised == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(labels=None), "the data collator made input_ids \\[2, 4\\]; a stack needs tensors input_ids and labels"),
        (dict(pixel_values=torch.ones(2)), "pixel_values, which would be left out"),
        (dict(attention_mask=torch.tensor([[1] * 4, [0, 1, 1, 1]])), "pad on the right"),
        (dict(attention_mask=torch.ones(2, 1, 4, 4)), "one of 0 and 1 for each"),
        (dict(attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 0]])), r"labels\[1, 2\] is 7, but that token is padding"),
        (dict(position_ids=torch.tensor([[0, 1, 0, 1]] * 2)), r"labels\[0, 2\] is 3, .* begins a document"),
        (dict(position_ids=torch.tensor([[1, 2, 3, 4]] * 2)), "do not count 0, 1, 2"),
        (dict(position_ids=torch.tensor([[0, 1, 3, 4]] * 2)), "do not count 0, 1, 2"),
        (dict(position_ids=torch.ones(3, 2, 4)), "give one a token"),
        (dict(position_ids=torch.tensor([[0, 1, 0, 1]] * 2), attention_mask=torch.ones(2, 4)), "lets them see each other"),
    ],
)  # fmt: skip
def test_what_documents_cannot_say_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        read(batch(**changes))
    with pytest.raises(ValueError, match="the data collator made a list"):
        read([])  # pyright: ignore[reportArgumentType]


def test_groups_get_rows_of_one_length_and_number():
    """Three examples for two groups of two: the second has one, and a row of padding."""
    examples = rows(3)
    lengths = [len(example["input_ids"]) for example in examples]
    longest = max(lengths)
    whole = Collate(padded, 2, read)(examples)
    assert whole["input_ids"].shape == (4, longest)
    assert whole["attention_mask"].sum(1).tolist() == [*lengths, 0]
    assert whole.documents() == [[n, longest - n] if n < longest else [n] for n in lengths] + [[longest]]
    assert whole.supervised == read(padded(examples)).supervised
    for row, example in enumerate(examples):
        assert whole["input_ids"][row, : lengths[row]].tolist() == example["input_ids"]
    assert (
        whole.digest()
        == Collate(padded, 2, read)(examples).digest()
        != Collate(padded, 2, read)(examples[::-1]).digest()
    )


def test_a_group_without_any_example_gets_padding():
    whole = join([read(batch())], groups=3)
    assert isinstance(whole, WholeBatch) and whole["input_ids"].shape == (6, 4) and whole.supervised == 6
    assert whole["labels"][2:].eq(-100).all() and whole["attention_mask"][2:].eq(0).all()


def preferences(**changes: Any) -> dict[str, Any]:
    """As TRL's collator makes them: chosen rows, then rejected ones."""
    return {
        "input_ids": torch.arange(1, 17).reshape(4, 4),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]),
    } | changes


def test_pairs_stand_together():
    known = {"ref_chosen_logps": torch.tensor([-1.0, -2.0]), "ref_rejected_logps": torch.tensor([-3.0, -4.0])}
    whole = read_pairs(preferences(**known))
    assert whole["input_ids"][:, 0].tolist() == [1, 9, 5, 13] and read_pairs(whole) is whole
    assert whole["labels"].tolist() == [
        [-100, -100, 3, 4],
        [-100, 10, -100, -100],
        [-100, 6, 7, -100],
        [-100, -100, -100, 16],
    ]
    assert whole.documents() == [[4], [2, 2], [3, 1], [4]] and whole["reference"].tolist() == [-1.0, -3.0, -2.0, -4.0]
    joined = join([whole, read_pairs(preferences(**known))], groups=3)
    assert joined["reference"].tolist() == [-1.0, -3.0, -2.0, -4.0] * 2 + [0.0] * 4
    assert "reference" not in read_pairs(preferences())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(completion_mask=None), "a stack needs tensors input_ids, attention_mask and completion_mask"),
        (dict(input_ids=torch.ones(4, 5)), "of one shape"),
        ({name: value[:3] for name, value in preferences().items()}, "the chosen rows and then the rejected ones"),
        (dict(pixel_values=torch.ones(4)), "pixel_values, which would be left out"),
    ],
    ids=str,
)
def test_other_pairs_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        read_pairs(preferences(**changes))
