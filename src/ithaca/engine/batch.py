"""A batch: checked, labels shifted, cut to the tokens of this rank.

Every rank gets the same global [B, S] tensors and takes its rows and tokens. What must be known of the whole batch, the count of
supervised tokens above all, is counted here, before anything is cut, so that no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..stack import Stack, require
from .attention.scan import MixerKernels
from .attention.segments import Plan, plan_segments
from .layer.mixer import Spread
from .mesh import Mesh
from .objective.cross_entropy import IGNORE
from .sequence import Layout, document_bounds, places, positions, shift_labels
from .trees import Parents, branch, read_trees


@dataclass(frozen=True)
class Units:
    """Documents that belong together: pairs, or completions of one prompt. Of all documents of the whole batch that are in one, the
    same on every rank and on the CPU, [n] each."""

    documents: Tensor  # their numbers, as in `Run.by_document`
    unit: Tensor  # which of the batch's units each is in, counted from 0
    parts: Tensor  # their numbers in the packed folder
    lengths: Tensor  # supervised tokens
    values: Tensor  # rewards or advantages, float64

    @property
    def count(self) -> int:
        return int(self.unit[-1]) + 1


@dataclass
class Batch:
    """This rank's slice of a global batch."""

    input_ids: Tensor  # [b, s]
    labels: Tensor  # [b, s], shifted: the label of a token is the next token
    positions: Tensor  # [b or 1, s]
    valid: Tensor | None  # [b, s], False on padding; None where there is none
    layout: Layout
    documents: list[list[int]] | None  # of this rank's rows
    longest: int  # longest document, in tokens: what rotary settings that depend on the length look at
    supervised: int  # supervised tokens of the whole batch, over all ranks; each as often as it counts
    tokens: int  # real tokens of the whole batch, over all ranks
    documents_of_rows: list[int] = field(default_factory=list)  # how many each row of the whole batch has
    weights: Tensor | None = None  # [b, s], of the labels, float32; in trees times the leaves below
    parents: Parents | None = None  # of the documents of this rank's rows, where some of the batch are trees (trees.py)
    units: Units | None = None
    old: Tensor | None = None  # [b, s], of the labels: log-probabilities of who sampled them, float32
    reference: Tensor | None = None  # [b, s], of the labels: those of a reference that has scored them before
    fold: int = 1  # rows that stand for the ranks of one sequence, in a proof
    plans: dict[tuple[int | None, int | None], list[Plan]] = field(default_factory=dict)
    spreads: list[Spread] = field(default_factory=list)

    @cached_property
    def asked(self) -> Tensor:
        """Places of this rank's tokens that have a label, in [b · s]."""
        return (self.labels.flatten() != IGNORE).nonzero()[:, 0]

    def document_of_tokens(self, mesh: Mesh) -> Tensor:
        """[b, s]: number of the document of each token, counted over all rows of the whole batch. What is behind the end of a row
        belongs to its last document."""
        rows, first = len(self.input_ids), len(self.documents_of_rows) // mesh.data.size * mesh.data.rank
        where = self.layout.tokens(mesh.ring.rank, mesh.ulysses.rank)
        numbers = torch.empty(rows, len(where), dtype=torch.int64)
        for row in range(rows):
            before = sum(self.documents_of_rows[: first + row])
            ends = [] if self.documents is None else list(accumulate(self.documents[row]))[:-1]
            numbers[row] = before + torch.bucketize(where, torch.tensor(ends, dtype=torch.int64), right=True)
        return numbers.to(mesh.device)

    def spread(self, mesh: Mesh, heads_per_stage: int | None, kernels: MixerKernels) -> Spread:
        """Where the tokens of linear mixers lie, made once per batch."""
        if not self.spreads:
            rows = len(self.input_ids) // self.fold
            whole = [[(0, self.layout.padded)]] * rows
            documents = self.documents
            bounds = whole if documents is None else [document_bounds(n, self.layout.padded) for n in documents]
            self.spreads.append(Spread(mesh.sequence, self.layout, bounds, heads_per_stage, kernels))
        return self.spreads[0]

    def plans_for(self, window: int | None, mesh: Mesh, chunk: int | None = None) -> list[Plan]:
        """One plan per ring step, made once per batch, window and chunk."""
        kind = (window, chunk)
        if kind not in self.plans:
            layout, ring = self.layout, mesh.ring
            bounds = None
            if self.documents is not None:
                bounds = [document_bounds(lengths, layout.padded) for lengths in self.documents]
            self.plans[kind] = [
                plan_segments(
                    layout.chunks(ring.rank),
                    layout.chunks((ring.rank - step) % ring.size),
                    bounds,
                    window,
                    mesh.device,
                    chunk,
                    self.parents,
                )
                for step in range(ring.size)
            ]
        return self.plans[kind]


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None,
    documents: Sequence | Tensor | None,
    weights: Tensor | None = None,
    *,
    mesh: Mesh,
    stack: Stack,
    vocabulary: int,
) -> Batch:
    """This rank's slice of a global batch (see `Run.shard`)."""
    _check_batch(input_ids, labels, mesh, vocabulary)
    _check_weights(weights, input_ids)
    rows, length = input_ids.shape
    lengths, parents = read_trees(documents, rows, length)
    input_ids, labels = (t.long() for t in (input_ids, input_ids if labels is None else labels))
    weights, counts = None if weights is None else weights.float(), [length] * rows  # tokens of each row
    if lengths is not None and parents is not None:
        branched = _branched(input_ids.cpu(), labels.cpu(), weights, lengths, parents)
        input_ids, labels, weights, lengths, supervised = branched
        counts, length = [sum(row) for row in lengths], input_ids.shape[1]
    else:
        labels = shift_labels(labels, lengths, IGNORE)
        weights = None if weights is None else shift_labels(weights, lengths, 0)
        supervised = int((labels != IGNORE).sum())
    if supervised == 0:
        raise ValueError(
            "no token of this batch is supervised: every label is -100 after the shift to the next token. The loss "
            "would be 0/0; leave such batches out, or supervise at least one token"
        )
    layout = Layout(length, stack.ulysses, stack.ring)
    own = slice(*(rows // mesh.data.size * (mesh.data.rank + i) for i in (0, 1)))
    where = layout.tokens(mesh.ring.rank, mesh.ulysses.rank)
    real = where < torch.tensor(counts[own])[:, None]
    take = where.clamp(max=length - 1)
    device = mesh.device
    own_lengths = None if lengths is None else lengths[own]
    own_parents = None if parents is None else parents[own]
    place = positions(own_lengths, len(counts[own]), layout.padded, parents=own_parents)
    if lengths is None:
        place = place[:1]  # the same in every row
    ids, targets = (t[own].cpu()[:, take] for t in (input_ids, labels))
    return Batch(
        input_ids=ids.masked_fill(~real, 0).to(device),
        labels=targets.masked_fill(~real, IGNORE).to(device),
        positions=place[:, where].to(device),
        valid=None if bool(real.all()) else real.to(device),
        layout=layout,
        documents=own_lengths,
        longest=length if lengths is None else _longest(lengths, parents),
        supervised=supervised,
        tokens=sum(counts),
        documents_of_rows=[1] * rows if lengths is None else [len(row) for row in lengths],
        weights=None if weights is None else weights[own].cpu()[:, take].masked_fill(~real, 0.0).to(device),
        parents=own_parents,
    )


def _branched(
    input_ids: Tensor, labels: Tensor, weights: Tensor | None, lengths: list[list[int]], parents: Parents
) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]], int]:
    """Rows of trees as they are computed (trees.py). -> input_ids, shifted labels and their weights, lengths of the nodes, count of
    labels. Rows become longer, each by as much as it has branches; the tokens behind are padding."""
    rows = [branch(*each) for each in zip(lengths, parents, labels, strict=True)]
    shape = len(rows), max(len(row.source) for row in rows)
    ids, shifted = input_ids.new_zeros(shape), labels.new_full(shape, IGNORE)
    leaves, given = torch.zeros(shape, dtype=torch.int64), torch.ones(shape)
    for at, row in enumerate(rows):
        own, target = slice(0, len(row.source)), row.target.clamp(min=0)
        ids[at, own] = input_ids[at, row.source]
        shifted[at, own] = labels[at, target].masked_fill(row.target < 0, IGNORE)
        leaves[at, own] = row.leaves
        if weights is not None:
            given[at, own] = weights.cpu()[at, target]
    leaves.masked_fill_(shifted == IGNORE, 0)
    # a prompt that is not learned: plain tokens, as far as the loss goes
    plain = weights is None and bool((leaves <= 1).all())
    return ids, shifted, None if plain else given * leaves, [row.lengths for row in rows], int(leaves.sum())


def _longest(lengths: list[list[int]], parents: Parents | None) -> int:
    if parents is None:
        return max(max(row) for row in lengths)
    ends = []
    for row, above in zip(lengths, parents, strict=True):
        ends += [place + n for place, n in zip(places(document_bounds(row, sum(row)), above), row, strict=True)]
    return max(ends)


def _check_weights(weights: Tensor | None, input_ids: Tensor) -> None:
    if weights is None:
        return
    if not isinstance(weights, Tensor) or weights.shape != input_ids.shape:
        found = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights is {found}, but input_ids has shape {tuple(input_ids.shape)}; pass the weight of each label in a tensor of "
            "that shape"
        )
    if not bool(weights.isfinite().all()):
        row, at = (~weights.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"weights[{row}, {at}] is {float(weights[row, at])}; weights of labels are finite numbers")


def _check_batch(input_ids: Tensor, labels: Tensor | None, mesh: Mesh, vocabulary: int) -> None:
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(value, Tensor) and not (name == "labels" and value is None):
            raise ValueError(f"{name} is a {type(value).__name__}; pass a torch.Tensor of shape [rows, tokens]")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, tokens], both at least 1")
    problems = []
    if labels is not None and labels.shape != input_ids.shape:
        problems.append(
            f"labels has shape {tuple(labels.shape)} but input_ids {tuple(input_ids.shape)}; pass labels of the same "
            "shape, unshifted, with -100 where a token is not supervised"
        )
    if input_ids.shape[0] % mesh.data.size:
        problems.append(
            f"a batch of {input_ids.shape[0]} rows cannot be split over {mesh.data.size} data-parallel groups; "
            f"pass a multiple of {mesh.data.size} rows, or raise ulysses or ring so that fewer groups are left"
        )
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if value is None or value.is_floating_point():
            if value is not None:
                problems.append(f"{name} has dtype {value.dtype}; token ids are whole numbers (torch.int64)")
            continue
        wrong = (value < 0) | (value >= vocabulary)
        if name == "labels":
            wrong &= value != IGNORE
        if bool(wrong.any()):
            row, at = wrong.nonzero()[0].tolist()
            token = int(value[row, at])
            remedy = "check that tokenizer and model belong together"
            if name == "labels" and token < 0:
                remedy = f"a token without loss has the label {IGNORE}: labels[labels == {token}] = {IGNORE}"
            problems.append(
                f"{name}[{row}, {at}] is {token}, outside the model's vocabulary of {vocabulary:,} tokens (0 to "
                f"{vocabulary - 1:,}); {remedy}"
            )
    require(problems, "this batch cannot be used")
