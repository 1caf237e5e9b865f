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
from .attention.segments import Plan, plan_segments
from .mesh import Mesh
from .objective.cross_entropy import IGNORE
from .sequence import Layout, document_bounds, positions, read_documents, shift_labels


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
    supervised: int  # supervised tokens of the whole batch, over all ranks
    tokens: int  # real tokens of the whole batch, over all ranks
    documents_of_rows: list[int] = field(default_factory=list)  # how many each row of the whole batch has
    weights: Tensor | None = None  # [b, s], of the labels, float32
    fold: int = 1  # rows that stand for the ranks of one sequence, in a proof
    plans: dict[tuple[int | None, int | None], list[Plan]] = field(default_factory=dict)

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
    lengths = read_documents(documents, rows, length)
    input_ids, labels = (t.long() for t in (input_ids, input_ids if labels is None else labels))
    labels = shift_labels(labels, lengths, IGNORE)
    shifted = None if weights is None else shift_labels(weights.float(), lengths, 0)
    supervised = int((labels != IGNORE).sum())
    if supervised == 0:
        raise ValueError(
            "no token of this batch is supervised: every label is -100 after the shift to the next token. The loss "
            "would be 0/0; leave such batches out, or supervise at least one token"
        )
    layout = Layout(length, stack.ulysses, stack.ring)
    own = slice(*(rows // mesh.data.size * (mesh.data.rank + i) for i in (0, 1)))
    where = layout.tokens(mesh.ring.rank, mesh.ulysses.rank)
    real = where < length
    take = where.clamp(max=length - 1)
    device = mesh.device
    own_lengths = None if lengths is None else lengths[own]
    place = positions(own_lengths, len(range(*own.indices(rows))), layout.padded)
    if lengths is None:
        place = place[:1]  # the same in every row
    padded = not bool(real.all())
    valid = real.to(device).expand(len(range(*own.indices(rows))), -1) if padded else None
    ids, targets = (t[own].cpu()[:, take] for t in (input_ids, labels))
    return Batch(
        input_ids=ids.masked_fill(~real, 0).to(device),
        labels=targets.masked_fill(~real, IGNORE).to(device),
        positions=place[:, where].to(device),
        valid=valid,
        layout=layout,
        documents=own_lengths,
        longest=length if lengths is None else max(max(row) for row in lengths),
        supervised=supervised,
        tokens=rows * length,
        documents_of_rows=[1] * rows if lengths is None else [len(row) for row in lengths],
        weights=None if shifted is None else shifted[own].cpu()[:, take].masked_fill(~real, 0.0).to(device),
    )


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
