"""What a step learns: from micro-batches to the losses that are differentiated, one after the other.

    sft       cross-entropy of every supervised token, over their count
    dpo       of each pair, how much likelier the chosen answer has become than the other, compared with a reference
    policy    of completions that were sampled and judged, the better ones become likelier, token by token

A criterion is asked for all micro-batches of a step at once, since what a loss is divided by (tokens, pairs, completions) is
counted over the step; what it yields adds up to the loss of the step, the same on every rank. The arithmetic is in
engine/objective; here is who holds which token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base import faults
from .batch import Batch, Units
from .comm import total
from .objective.cross_entropy import IGNORE
from .objective.policy import Policy, advantages, token_losses, weights_of_tokens
from .objective.preference import Preference, preference_losses
from .objective.reference import without_adapters
from .run import Run

Reference = Callable[
    [Run, Batch], Tensor
]  # -> log-probabilities of the labels, [b, s], or of documents, [documents of units]


class Criterion(Protocol):
    def losses(self, run: Run, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each micro-batch its part of the step's loss, and whether what this rank computed of it is finite. Each is to be
        differentiated, or dropped, before the next."""
        ...

    def numbers(self) -> dict[str, float]:
        """Of the step that `losses` has gone through: what is worth a line, the same on every rank."""
        ...


class Supervised:
    """Cross-entropy."""

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}

    def losses(self, run: Run, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        supervised = sum(batch.supervised for batch in batches)
        for batch in batches:
            loss = run.loss(batch, supervised=supervised, **self.terms)
            assert run.part is not None
            yield loss, run.part.isfinite()

    def numbers(self) -> dict[str, float]:
        return {}


class Preferences:
    """Pairs. reference: sums of the log-probabilities of documents of units, float64."""

    def __init__(self, settings: Preference, reference: Reference) -> None:
        self.settings, self.reference = settings, reference
        self._sums: dict[str, Tensor] = {}
        self._pairs = 0

    def losses(self, run: Run, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        self._sums, self._pairs = {}, sum(units_of(batch).count for batch in batches)
        for batch in batches:
            units, device = units_of(batch), run.mesh.device
            reference = self.reference(run, batch)
            logprobs, sound = _watched(run.logprobs(batch))
            sums = run.by_document(batch, logprobs)[units.documents.to(device)]
            lengths = units.lengths.to(device).view(-1, 2)
            losses, numbers = preference_losses(sums.view(-1, 2), reference.view(-1, 2), lengths, self.settings)
            for name, values in numbers.items():
                self._sums[name] = self._sums.get(name, 0.0) + values.sum()
            yield losses.sum() / self._pairs, sound

    def numbers(self) -> dict[str, float]:
        return _over(self._sums, self._pairs)


class Rollouts:
    """Completions. rewards: values are such, and compared within their group; otherwise they are advantages. reference:
    log-probabilities of the labels, where the settings have a divergence."""

    def __init__(self, settings: Policy, *, rewards: bool, reference: Reference | None) -> None:
        self.settings, self.rewards, self.reference = settings, rewards, reference
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0

    def losses(self, run: Run, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        every = [units_of(batch) for batch in batches]
        judged = torch.cat([units.values for units in every])
        if self.rewards:
            starts = torch.tensor([0, *(units.count for units in every)]).cumsum(0)
            groups = torch.cat([units.unit + start for units, start in zip(every, starts, strict=False)])
            judged = advantages(judged, groups, self.settings)
        counts = {"completions": len(judged), "tokens": int(sum(units.lengths.sum() for units in every))}
        self._sums, self._tokens = {}, counts["tokens"]
        for batch, units, advantage in zip(batches, every, judged.split([len(u.parts) for u in every]), strict=True):
            weights = weights_of_tokens(units.lengths, self.settings, **counts, micro_batches=len(batches))
            reference = None if self.reference is None else self.reference(run, batch)
            found: Any = run.logprobs(batch, temperature=self.settings.temperature, entropy=True)
            (logprobs, sound), entropy = _watched(found[0]), found[1].detach()
            of_token = _of_tokens(run, batch, units)
            losses, numbers = token_losses(logprobs, batch.old, reference, of_token(advantage), self.settings)
            counted = (batch.labels != IGNORE) & (of_token(torch.ones(len(units.parts))) > 0)
            self._add({**numbers, "entropy": entropy}, counted, run)
            weighted = torch.where(counted, losses * of_token(weights), 0.0)
            yield run.by_document(batch, weighted).sum(), sound

    def _add(self, numbers: dict[str, Tensor], counted: Tensor, run: Run) -> None:
        sums = torch.stack([torch.where(counted, value, 0.0).double().sum() for value in numbers.values()])
        for name, value in zip(numbers, total(sums, run.mesh.world), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def numbers(self) -> dict[str, float]:
        return _over(self._sums, self._tokens)


def _of_tokens(run: Run, batch: Batch, units: Units) -> Callable[[Tensor], Tensor]:
    """Numbers of the documents of units as numbers of this rank's tokens; 0 for tokens of others."""
    where = batch.document_of_tokens(run.mesh)

    def spread(values: Tensor) -> Tensor:
        whole = torch.zeros(sum(batch.documents_of_rows), dtype=torch.float32)
        whole[units.documents] = values.float()
        return whole.to(run.mesh.device)[where]

    return spread


def _watched(logprobs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """With faults that are rehearsed, and whether this rank's numbers are finite."""
    watched = faults.spoil(logprobs)
    assert isinstance(watched, Tensor)
    if faults.armed() and watched.requires_grad:
        watched.register_hook(lambda _: faults.reach("bwd"))
    return watched, watched.detach().isfinite().all()


def _over(sums: dict[str, Tensor], count: int) -> dict[str, float]:
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: value / count for name, value in zip(sums, values, strict=True)}


def units_of(batch: Batch) -> Units:
    assert batch.units is not None, "this batch was read without its units"
    return batch.units


# -- the model without its adapters as the reference ------------------------------------------------------------------------


def by_the_base(temperature: float = 1.0) -> Reference:
    """Log-probabilities of the labels by the base, [b, s]: one forward more."""

    def tokens(run: Run, batch: Batch) -> Tensor:
        with torch.no_grad(), without_adapters(run.model):
            logprobs = run.logprobs(batch, temperature=temperature)
        assert isinstance(logprobs, Tensor)
        return logprobs

    return tokens


def summed(tokens: Reference) -> Reference:
    """The same as sums of the documents of units."""

    def sums(run: Run, batch: Batch) -> Tensor:
        documents = units_of(batch).documents.to(run.mesh.device)
        return run.by_document(batch, tokens(run, batch))[documents]

    return sums


def check_criterion(kind: str, decoder: Any) -> None:
    """ValueError where a model has a loss of its own that this criterion leaves out."""
    if kind != "sft" and decoder.router_weight:
        raise ValueError(
            f"objective.kind={kind} has no balance loss of experts, and this model asks for one (output_router_logits in its "
            "config.json); set output_router_logits to false there"
        )
