"""What a data collator makes, in the form that every rank of a run needs.

A trainer gives each process rows of its own. Here the ranks of a sequence need the same rows, and all ranks must know how many
tokens of the whole batch are supervised. So every rank reads the whole batch, which is small beside what is computed from it, and
`Run.shard` takes a rank's rows and tokens. The collator is called once for each data-parallel group, as it would be by processes of
their own: one that joins its examples into a single row (padding-free, packing) then makes one row a group.

Collators say with an attention mask where a row is padded, and with positions that begin again where documents are packed. Both are
documents to us, so a batch leaves here with one meaning: positions begin again at 0 with every document, padding is a document
without labels. What the untouched model would treat in another way is refused: padding on the left or in the middle, packed
documents under a mask (transformers lets them see each other), labels that reach from one document into the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
# of a padding-free collator: says again what the positions say
_SAID_TWICE = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_READ = {"input_ids", "labels", "attention_mask", "position_ids"}


class WholeBatch(dict[str, Tensor]):
    """input_ids, labels, position_ids and attention_mask of the rows of all data-parallel groups, [B, S] each. Of preferences also
    the reference's log-probabilities where they are known, [B]; a chosen row and the rejected one behind it are a pair."""

    @property
    def supervised(self) -> int:
        """Tokens with a label, behind the shift to the next token."""
        return int((self["labels"][:, 1:] != IGNORE).sum())

    @property
    def padded(self) -> bool:
        return not bool(self["attention_mask"].all())

    def documents(self) -> list[list[int]] | None:
        """Lengths by row, as `Run.shard` takes them; None where every row is one."""
        starts = self["position_ids"].cpu() == 0
        if not bool(starts[:, 1:].any()):
            return None
        length = starts.shape[1]
        bounds = [[*row.nonzero().flatten().tolist(), length] for row in starts]
        return [[b - a for a, b in pairwise(row)] for row in bounds]

    def digest(self) -> int:
        """The same on ranks that hold the same batch."""
        value = 0
        for name in sorted(self):
            value = zlib.crc32(self[name].cpu().contiguous().numpy(), value)  # pyright: ignore[reportArgumentType]
        return value


@dataclass
class Collate:
    """A data collator, called for each of `groups` data-parallel groups, and what it makes put together."""

    collate: Callable[[list[Any]], Any]
    groups: int
    read: Callable[[Mapping[str, Any]], WholeBatch]

    def __call__(self, examples: list[Any]) -> WholeBatch:
        size = -(-len(examples) // self.groups)
        parts = [examples[at : at + size] for at in range(0, len(examples), size)]
        return join([self.read(self.collate(part)) for part in parts], self.groups)


def read(inputs: Mapping[str, Any]) -> WholeBatch:
    """One collator's batch. ValueError where it means something that documents cannot say."""
    if isinstance(inputs, WholeBatch):
        return inputs
    ids, labels = (inputs.get(name) if isinstance(inputs, Mapping) else None for name in ("input_ids", "labels"))
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.dim() != 2 or labels.shape != ids.shape:
        raise ValueError(
            f"the data collator made {_words(inputs)}; a stack needs tensors input_ids and labels of one shape [rows, tokens] "
            "(DataCollatorForLanguageModeling(tokenizer, mlm=False) makes labels)"
        )
    unknown = sorted(name for name, value in inputs.items() if name not in _READ | _SAID_TWICE and value is not None)
    if unknown:
        raise ValueError(
            f"the data collator made {', '.join(unknown)}, which would be left out: a stack takes input_ids, labels, "
            "attention_mask and position_ids; remove the rest from the dataset or the collator"
        )
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    real = torch.ones_like(ids)
    if mask is not None:
        real = _right_padding(mask, ids)
        starts[:, 1:] |= real.diff() != 0
    if positions is not None:
        starts |= _document_starts(positions, ids, masked=mask is not None)
    across = (starts | (real == 0)) & (labels != IGNORE)
    across[:, 0] = False  # predicted by nothing
    if bool(across.any()):
        row, at = across.nonzero()[0].tolist()
        raise ValueError(
            f"labels[{row}, {at}] is {int(labels[row, at])}, but that token is padding or begins a document, which the token "
            f"before it cannot foresee; set its label to {IGNORE}"
        )
    return WholeBatch(input_ids=ids, labels=labels, position_ids=_positions(starts), attention_mask=real)


def read_pairs(inputs: Mapping[str, Any]) -> WholeBatch:
    """A batch of TRL's preferences, in which all chosen rows stand before all rejected ones; here each pair stands together, so
    that a data-parallel group has whole pairs."""
    if isinstance(inputs, WholeBatch):
        return inputs
    names = ("input_ids", "attention_mask", "completion_mask")
    rows = [inputs.get(name) if isinstance(inputs, Mapping) else None for name in names]
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else () for value in rows}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or shape[0] % 2:
        raise ValueError(
            f"the data collator made {_words(inputs)}; a stack needs tensors input_ids, attention_mask and completion_mask of one "
            "shape [rows, tokens], the chosen rows and then the rejected ones (TRL's DataCollatorForPreference makes them)"
        )
    ids, mask, answer = (inputs[name] for name in names)
    order = torch.arange(len(ids)).view(2, -1).T.flatten()
    known = {name: inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps") if name in inputs}
    rest = {name: value for name, value in inputs.items() if name not in names and name not in known}
    labels = ids.masked_fill(answer == 0, IGNORE)
    whole = read({**rest, "input_ids": ids[order], "labels": labels[order], "attention_mask": mask[order]})
    if len(known) == 2:
        whole["reference"] = torch.stack([*known.values()], 1).float().flatten()
    return whole


def _words(inputs: Mapping[str, Any]) -> str:
    if not isinstance(inputs, Mapping):
        return f"a {type(inputs).__name__}"
    kinds = [f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name for name, value in inputs.items()]
    return ", ".join(kinds) or "nothing"


def _right_padding(mask: Tensor, ids: Tensor) -> Tensor:
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; a stack takes one of 0 and 1 for each "
            "token, and packed documents by position_ids without a mask"
        )
    real = (mask != 0).to(ids.dtype)
    if bool((real.diff() > 0).any()):
        raise ValueError(
            "attention_mask hides tokens before others that it shows; pad on the right (tokenizer.padding_side = 'right')"
        )
    return real


def _document_starts(positions: Tensor, ids: Tensor, masked: bool) -> Tensor:
    if positions.shape != ids.shape:
        raise ValueError(
            f"position_ids has shape {list(positions.shape)}, input_ids {list(ids.shape)}; give one a token"
        )
    starts = positions == 0
    expected = _positions(starts)
    if not bool(starts[:, 0].all()) or not torch.equal(expected, positions.to(expected)):
        raise ValueError("position_ids do not count 0, 1, 2, ... from the beginning of each document; leave them out")
    if masked and bool(starts[:, 1:].any()):
        raise ValueError(
            "position_ids begin again inside a row, which packs documents, but there is an attention_mask too, with which "
            "transformers lets them see each other; leave the mask out (SFTConfig(packing=True) does)"
        )
    return starts


def _positions(starts: Tensor) -> Tensor:
    """Of each token in its document."""
    place = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return place - torch.where(starts, place, 0).cummax(1).values


def join(parts: Sequence[WholeBatch], groups: int) -> WholeBatch:
    """The rows of each group behind those of the one before, all as long and as many: a group that has fewer gets rows of
    padding."""
    length = max(part["input_ids"].shape[1] for part in parts)
    rows = max(part["input_ids"].shape[0] for part in parts)
    like = parts[0]["input_ids"]
    joined = {
        "input_ids": like.new_zeros(groups, rows, length),
        "labels": like.new_full((groups, rows, length), IGNORE),
        "attention_mask": like.new_zeros(groups, rows, length),
        "position_ids": torch.arange(length, device=like.device).repeat(groups, rows, 1),
    }
    for group, part in enumerate(parts):
        height, width = part["input_ids"].shape
        for name, value in joined.items():
            value[group, :height, :width] = part[name]
        joined["position_ids"][group, :height, width:] -= width
    for name in parts[0].keys() - joined.keys():  # a number a row
        joined[name] = parts[0][name].new_zeros(groups, rows)
        for group, part in enumerate(parts):
            joined[name][group, : len(part[name])] = part[name]
    return WholeBatch({name: value.flatten(0, 1) for name, value in joined.items()})
