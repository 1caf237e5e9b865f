"""Trees of documents: what is read, how a row is branched, and trees made of sequences."""

from __future__ import annotations

import random

import pytest
import torch

from ithaca.engine.model.shrink import smallest
from ithaca.engine.sequence import document_bounds, places, positions
from ithaca.engine.trees import branch, from_paths, leaves_below, no_trees, read_trees


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            [(4, None), (6, 1)],
            r"documents\[0\]\[1\] has the parent 1, which is the node itself; .* an index from 0 to 0",
        ),
        ([(4, 1), (6, 0)], r"documents\[0\]\[0\] has the parent 1, which comes later in the row; .*the first entry"),
        ([(4, None), (2, 2), (4, 1)], r"\[0\]\[1\] has the parent 2, which comes later .* no way leads back"),
        ([4, (6, -1)], r"documents\[0\]\[1\] has the parent -1, which is no index; .* or None for a root"),
        ([4, (6, 7)], r"documents\[0\]\[1\] has the parent 7, which comes later"),
        ([4, (6, "0")], r"documents\[0\]\[1\] has the parent '0'; give the index"),
        ([4, (6, True)], r"documents\[0\]\[1\] has the parent True"),
        ([4, (6, 0.0)], r"documents\[0\]\[1\] has the parent 0.0"),
        ([4, (6,)], r"documents\[0\]\[1\] is \(6,\); an entry is a length, or a pair \(length, parent\)"),
        ([4, (3, 0, 3)], r"documents\[0\]\[1\] is \(3, 0, 3\)"),
        ([4, (5, 0)], r"documents\[0\] adds up to 9 tokens but the sequence has 10"),
        ([4, (7, 0)], r"documents\[0\] adds up to 11 tokens"),
        ([(10, None), (0, 0)], r"documents\[0\] has the length 0"),
        ([(12, None), (-2, 0)], r"documents\[0\] has the length -2"),
        ([(5.0, None), (5, 0)], r"documents\[0\] has the length 5.0"),
        ([(None, None), (5, 0)], r"documents\[0\] has the length None"),
    ],
)
def test_bad_trees_are_named(row, said):
    with pytest.raises(ValueError, match=said) as caught:
        read_trees([row], 1, 10)
    assert "\n" not in str(caught.value)


def test_rows_are_counted():
    with pytest.raises(ValueError, match="2 entries for a batch of 3 rows"):
        read_trees([[(4, None), (6, 0)], [10]], 3, 10)


def test_what_is_read():
    assert read_trees(None, 1, 10) == (None, None)
    assert read_trees([4, 6], 1, 10) == ([[4, 6]], None)
    assert read_trees(torch.tensor([[4, 6], [5, 5]]), 2, 10) == ([[4, 6], [5, 5]], None)
    assert read_trees([[(4, None), (6, None)]], 1, 10) == ([[4, 6]], None), "no tree, so nothing changes"
    mixed = [[4, (3, 0), [3, torch.tensor(0)]], [10]]
    assert read_trees(mixed, 2, 10) == ([[4, 3, 3], [10]], [[None, 0, 0], []])


def test_positions_go_on_from_the_parent():
    lengths, parents = [3, 2, 2, 1, 2], [None, 0, 1, 0, None]
    assert places(document_bounds(lengths, 12), parents) == [0, 3, 5, 3, 0, 0]  # and padding
    expected = [[0, 1, 2, 3, 4, 5, 6, 3, 0, 1, 0, 1]]
    assert positions([lengths], 1, 12, parents=[parents]).tolist() == expected
    assert leaves_below(parents) == [2, 1, 1, 1, 1]


def branched(lengths, parents, labels):
    row = branch(lengths, parents, torch.tensor(labels))
    assert sum(row.lengths) == len(row.source) == len(row.target) == len(row.leaves)
    return row.lengths, row.source.tolist(), row.target.tolist(), row.leaves.tolist()


def test_the_last_token_of_a_prompt_moves_into_its_answers():
    lengths, source, target, leaves = branched([3, 2, 2], [None, 0, 0], [0, 1, 2, 3, 4, 5, 6])
    assert lengths == [2, 3, 3]
    assert source == [0, 1, 2, 3, 4, 2, 5, 6]
    assert target == [1, 2, 3, 4, -1, 5, 6, -1]
    assert leaves == [2, 2, 1, 1, 1, 1, 1, 1]


def test_nothing_moves_where_no_first_token_is_supervised():
    lengths, source, target, _ = branched([3, 2, 2], [None, 0, 0], [0, 1, 2, -100, 4, -100, 6])
    assert lengths == [3, 2, 2] and source == list(range(7)) and target == [1, 2, -1, 4, -1, 6, -1]


def test_a_parent_of_one_token_is_left_with_none():
    """Its own token is not learned, so the one before it has nothing to say of it."""
    lengths, source, target, _ = branched([2, 1, 2, 2], [None, 0, 1, 1], [0, 1, -100, 3, 4, 5, 6])
    assert lengths == [2, 0, 3, 3] and source == [0, 1, 2, 3, 4, 2, 5, 6] and target == [1, -1, 3, 4, -1, 5, 6, -1]


def walk(tree) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each path, by the documents alone."""
    ends = torch.tensor([n for n, _ in tree.documents]).cumsum(0).tolist()
    found = []
    for path in tree.paths:
        assert tree.documents[path[0]][1] is None
        assert [tree.documents[node][1] for node in path[1:]] == path[:-1]
        at = [token for node in path for token in range(ends[node] - tree.documents[node][0], ends[node])]
        found.append((tree.tokens[at].tolist(), tree.labels[at].tolist()))
    return found


def test_sequences_come_back_from_their_tree():
    rng = random.Random(0)
    for _ in range(100):
        paths = [[rng.randrange(2) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 9))]
        labels = [[token if rng.random() < 0.9 else -100 for token in path] for path in paths]
        tree = from_paths(paths, labels)
        assert walk(tree) == list(zip(paths, labels, strict=True))
        inner = {parent for _, parent in tree.documents}
        leaves = [node for node in range(len(tree.documents)) if node not in inner]
        assert sorted(path[-1] for path in tree.paths) == leaves, "one leaf for each path"
        assert read_trees([tree.documents], 1, len(tree.tokens))[0] == [[n for n, _ in tree.documents]]


def test_what_is_shared():
    tree = from_paths([[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 7], torch.tensor([1, 2, 3, 4])])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 4, 7, 7] and torch.equal(tree.tokens, tree.labels)
    assert tree.documents == [(3, None), (1, 0), (2, 0), (1, 0), (2, None)]
    assert tree.paths == [[0, 1], [0, 2], [4], [0, 3]]
    assert tree.per_path(torch.tensor([1.0, 10.0, 100.0, 1000.0, 5.0])).tolist() == [11.0, 101.0, 5.0, 1001.0]
    apart = from_paths([[1, 2, 3, 4], [1, 2, 3, 5]], [[1, 2, 3, 4], [1, -100, 3, 5]])
    assert apart.documents == [(1, None), (3, 0), (3, 0)], "a token that is learned in one path only is not shared"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([],), "no sequence"),
        (([[1], []],), r"paths\[1\] has shape \(0,\)"),
        (([[[1]]],), r"paths\[0\] has shape \(1, 1\)"),
        (([[1]], [[1], [2]]), "1 sequences but 2 rows of labels"),
        (([[1, 2]], [[1]]), r"labels\[0\] has 1 labels for 2 tokens"),
    ],
)
def test_bad_paths_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        from_paths(*given)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "bamba", "llama", "glm4", "mixtral"])
def test_models_that_cannot_learn_from_trees(kind: str):
    """Asked before a run, by the config alone, so that nothing is shared which the first step would refuse."""
    config = smallest(kind)
    why = no_trees(config)
    assert ("carry one state along a row" in (why or "")) == (kind in ("qwen3_next", "qwen3_5_text", "bamba"))
    if kind == "mixtral":
        config.output_router_logits = True
        assert "balance loss" in (no_trees(config) or "")
