"""Tiles cover a sequence once, and gradients of tiles add up in float32."""

from __future__ import annotations

import pytest
import torch

from ithaca.engine.model.linear import Leaf
from ithaca.engine.tiling import Gradients, differentiate, tiles


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("tile", [None, 1, 2, 3, 7, 64, 100])
def test_tiles_cover_every_token_once_in_order(length: int, tile: int | None):
    cut = tiles(length, tile)
    assert [i for piece in cut for i in range(length)[piece]] == list(range(length))
    assert all(piece.stop - piece.start <= (tile or length) for piece in cut)
    assert len(cut) == (1 if tile is None else -(-length // tile))


def test_one_contribution_is_kept_as_it_is():
    weight, grad = torch.zeros(3, 2), torch.ones(3, 2)
    gradients = Gradients()
    gradients.add([weight], [grad])
    assert gradients.take(weight) is grad
    assert gradients.take(weight) is None, "taken once"


def test_many_small_contributions_are_not_lost_in_half_precision():
    """1 + 1000 × 1/1024 in bf16 stays 1: every addition rounds back."""
    weight = torch.zeros(4, dtype=torch.bfloat16)
    gradients = Gradients()
    gradients.add([weight], [torch.ones(4, dtype=torch.bfloat16)])
    for _ in range(1024):
        gradients.add([weight], [torch.full((4,), 2**-10, dtype=torch.bfloat16)])
    total = gradients.take(weight)
    assert total is not None and total.dtype == torch.bfloat16 and total.tolist() == [2.0] * 4


def test_a_part_without_a_gradient_adds_nothing():
    first, second = torch.zeros(2), torch.zeros(2)
    gradients = Gradients()
    gradients.add([first, second], [None, torch.ones(2)])
    gradients.add([first, second], [None, torch.ones(2)])
    assert gradients.take(first) is None and torch.equal(gradients.take(second), torch.full((2,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_find_their_place(dtype: torch.dtype):
    weight = torch.zeros(5, 2, dtype=dtype)
    gradients = Gradients()
    for rows, value in (([4, 0], 1.0), ([0, 2], 2.0)):
        at = torch.tensor(rows)
        leaf = Leaf(weight, weight[at], at)
        gradients.add_leaves([leaf], [torch.full((2, 2), value, dtype=dtype)])
    gradients.add_leaves([Leaf(weight, weight)], [torch.ones(5, 2, dtype=dtype)])  # the whole matrix on top
    total = gradients.take(weight)
    assert total is not None and total.dtype == dtype
    assert total[:, 0].tolist() == [4.0, 1.0, 3.0, 1.0, 2.0]


def test_rows_after_a_whole_contribution_do_not_write_into_it():
    weight, grad = torch.zeros(3, 1), torch.ones(3, 1)
    gradients = Gradients()
    gradients.add([weight], [grad.clone().bfloat16()])
    gradients.add_leaves([Leaf(weight, weight[:1], torch.tensor([0]))], [torch.ones(1, 1)])
    assert gradients.take(weight).flatten().tolist() == [2.0, 1.0, 1.0]


def test_differentiate_skips_what_needs_no_gradient_or_took_no_part():
    x = torch.tensor(3.0, requires_grad=True)
    constant, unused = torch.tensor(2.0), torch.tensor(1.0, requires_grad=True)
    found = differentiate([x * x * constant], [torch.tensor(1.0)], [constant, x, unused])
    assert found[0] is None and found[2] is None and found[1] is not None and found[1].item() == 12.0
    assert differentiate([constant * 1], [torch.tensor(1.0)], [constant]) == (None,)
