"""Documents that share what comes before them: trees.

A prompt with n completions, a conversation with branches, a chosen and a rejected answer. A node has a length and a parent, an
earlier node of its row; its tokens attend to themselves and to all of each ancestor, and positions go on from the parent. Loss and
gradients are those of the unrolled batch, in which every way from a root to a leaf is a document of its own; shared tokens are
computed once.

    documents=[[(1000, None), (50, 0), (80, 0)]]      a prompt of 1,000 tokens, and two answers to it

Two things are different from plain documents, and both are done here, before anything is cut to ranks:

Weights. A token counts once for every leaf that it is on the way to, as it would unrolled.

Labels. The last token of a parent predicts the first of every child: as many labels as children, for one token. So where the
first token of a child is supervised, that last token moves: each child begins with a copy of it, at the same position, and the
parent ends one token earlier. Then every token has one label at most, which is of its own node, and nothing behind this file knows
of branches but attention. It costs a token for each child but the first. A parent of one token that moves is left with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention.scan import has_scan
from .model.families import FAMILIES
from .objective.cross_entropy import IGNORE
from .sequence import document_bounds, plain, read_documents

Parents = list[list[int | None]]  # of each row's nodes


def read_trees(documents: Any, rows: int, length: int) -> tuple[list[list[int]] | None, Parents | None]:
    """Lengths and parents of each row, checked. An entry is a length, or a pair of a length and a parent; parents are None where no
    entry of the batch has one."""
    listed = plain(documents)
    if not isinstance(listed, (list, tuple)):
        return read_documents(documents, rows, length), None
    lengths: list[Any] = []
    parents: Parents = []
    for row, entries in enumerate(plain(entries) for entries in listed):
        if not isinstance(entries, (list, tuple)) or not any(isinstance(n, (list, tuple)) for n in map(plain, entries)):
            lengths.append(entries)
            parents.append([])
            continue
        pairs = [_pair(plain(entry), f"documents[{row}][{at}]", at) for at, entry in enumerate(entries)]
        lengths.append([n for n, _ in pairs])
        parents.append([parent for _, parent in pairs])
    checked = read_documents(lengths, rows, length)
    if not any(parent is not None for row in parents for parent in row):
        return checked, None
    return checked, parents


def _pair(entry: Any, where: str, at: int) -> tuple[Any, int | None]:
    if not isinstance(entry, (list, tuple)):
        return entry, None
    if len(entry) != 2:
        raise ValueError(
            f"{where} is {entry!r}; an entry is a length, or a pair (length, parent) in which the parent is the index of an "
            "earlier entry of its row, or None"
        )
    length, parent = (plain(value) for value in entry)
    if parent is not None and (not isinstance(parent, int) or isinstance(parent, bool)):
        raise ValueError(f"{where} has the parent {parent!r}; give the index of an earlier entry of its row, or None")
    if parent is not None and not 0 <= parent < at:
        why = "is the node itself" if parent == at else "comes later in the row" if parent > at else "is no index"
        raise ValueError(
            f"{where} has the parent {parent}, which {why}; parents come before their children, so that no way leads back: give "
            + (
                f"an index from 0 to {at - 1}, or None for a root"
                if at
                else "None, as the first entry of a row has none"
            )
        )
    return length, parent


def no_trees(config: Any) -> str | None:
    """Why a model, by its Hugging Face config, cannot learn from trees; None where it can."""
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        return "the experts' balance loss (output_router_logits in config.json) would count what is shared once"
    if config.model_type not in FAMILIES and has_scan(config):
        return "its linear mixers carry one state along a row, which does not branch"
    return None


def leaves_below(parents: Sequence[int | None]) -> list[int]:
    """How many leaves each node is on the way to; a leaf: itself."""
    inner = {parent for parent in parents if parent is not None}
    counts = [0 if node in inner else 1 for node in range(len(parents))]
    for node in reversed(range(len(parents))):
        parent = parents[node]
        if parent is not None:
            counts[parent] += counts[node]
    return counts


@dataclass(frozen=True)
class Branched:
    """A row as it is computed: `source` and `target` are indices into the tokens that were given, [tokens of the row]."""

    lengths: list[int]  # of the nodes; 0 where all of one has moved
    source: Tensor  # which token it is
    target: Tensor  # which token it predicts, -1 for none
    leaves: Tensor  # how many leaves it is on the way to


def branch(lengths: list[int], parents: list[int | None], labels: Tensor) -> Branched:
    """One row. labels: not shifted, [tokens]."""
    bounds = document_bounds(lengths, sum(lengths))
    parents = parents or [None] * len(lengths)
    firsts = labels[torch.tensor([start for start, _ in bounds])].tolist()
    moves = {parent for parent, label in zip(parents, firsts, strict=True) if label != IGNORE} - {None}
    source, target, sizes = [], [], []
    for node, ((start, stop), parent) in enumerate(zip(bounds, parents, strict=True)):
        own = torch.arange(start, stop)
        predicted = torch.where(own + 1 < stop, own + 1, -1)
        if node in moves:
            own, predicted = own[:-1], predicted[:-1]
        if parent is not None and parent in moves:
            own = torch.cat((torch.tensor([bounds[parent][1] - 1]), own))
            predicted = torch.cat((torch.tensor([start]), predicted))
        source.append(own)
        target.append(predicted)
        sizes.append(len(own))
    leaves = torch.tensor(leaves_below(parents)).repeat_interleave(torch.tensor(sizes))
    return Branched(sizes, torch.cat(source), torch.cat(target), leaves)


# -- from paths ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """Sequences that were put together where they begin alike: one row for `Run.shard`, or a part of one."""

    tokens: Tensor  # [n]
    labels: Tensor  # [n], not shifted
    documents: list[tuple[int, int | None]]
    paths: list[list[int]]  # the nodes of each sequence, from the root to a leaf of its own

    def per_path(self, values: Tensor) -> Tensor:
        """[nodes] -> [paths]: sums along each, such as log-probabilities of whole sequences. Differentiable."""
        return torch.stack([values[path].sum() for path in self.paths])


def from_paths(paths: Sequence[Any], labels: Sequence[Any] | None = None) -> Tree:
    """A tree (several, where sequences differ from the first token on) whose ways from root to leaf are `paths`.

    labels: as long as its path each, -100 where a token is not supervised; None = every token is. Tokens are shared as long as
    both they and their labels are the same. The last token of a path is its own, also where another goes on with it or is the same,
    so that every path is counted.
    """
    rows = [torch.as_tensor(plain(path), dtype=torch.int64) for path in paths]
    if not rows:
        raise ValueError("from_paths was given no sequence; give at least one list of token ids")
    if labels is not None and len(labels) != len(rows):
        raise ValueError(
            f"from_paths was given {len(rows)} sequences but {len(labels)} rows of labels; give one for each"
        )
    wanted = rows if labels is None else [torch.as_tensor(plain(row), dtype=torch.int64) for row in labels]
    for at, (row, own) in enumerate(zip(rows, wanted, strict=True)):
        if row.dim() != 1 or not len(row):
            raise ValueError(f"paths[{at}] has shape {tuple(row.shape)}; a sequence is a list of at least one token id")
        if own.shape != row.shape:
            raise ValueError(f"labels[{at}] has {own.numel()} labels for {len(row)} tokens; give one for each token")
    both = [torch.stack(pair, 1) for pair in zip(rows, wanted, strict=True)]
    root = _Edge(0, 0, 0)
    for at in range(len(both)):
        root.insert(both, at, 0)
    parts: list[Tensor] = []
    documents: list[tuple[int, int | None]] = []
    ways: dict[int, list[int]] = {}
    waiting = [(edge, None, []) for edge in reversed(root.children)]
    while waiting:  # depth first, so that what is below a node lies side by side
        edge, parent, above = waiting.pop()
        node, way = len(documents), [*above, len(documents)]
        documents.append((edge.stop - edge.start, parent))
        parts.append(both[edge.path][edge.start : edge.stop])
        if not edge.children:
            ways[edge.path] = way
        waiting += [(child, node, way) for child in reversed(edge.children)]
    tokens, kept = torch.cat(parts).unbind(1)
    return Tree(tokens.contiguous(), kept.contiguous(), documents, [ways[at] for at in range(len(both))])


class _Edge:
    """Tokens start to stop of a path, and what comes behind them."""

    def __init__(self, path: int, start: int, stop: int) -> None:
        self.path, self.start, self.stop = path, start, stop
        self.children: list[_Edge] = []

    def insert(self, both: list[Tensor], path: int, at: int) -> None:
        """Put the rest of a path, from token `at` on, behind this edge."""
        edge = self
        while True:
            for child in edge.children:
                alike = _alike(both[child.path][child.start : child.stop], both[path][at:])
                # the last token of either path is not shared
                alike = min(alike, len(both[path]) - 1 - at, len(both[child.path]) - 1 - child.start)
                if alike:
                    break
            else:
                edge.children.append(_Edge(path, at, len(both[path])))
                return
            if alike < child.stop - child.start:
                child.split(child.start + alike)
            edge, at = child, at + alike

    def split(self, at: int) -> None:
        below = _Edge(self.path, at, self.stop)
        below.children, self.children, self.stop = self.children, [below], at


def _alike(one: Tensor, other: Tensor) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).any(1)
    return int(differ.nonzero()[0]) if bool(differ.any()) else length
