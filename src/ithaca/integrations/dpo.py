"""TRL's preference optimization with a stack: `DPOTrainer(model, args=args, train_dataset=data, stack=Stack(ulysses=8))`.

The chosen and the rejected answer of a pair are two rows of one batch, whose log-probabilities come from `run.logprobs`, a tile of
logits at a time, and are summed over ranks by document. From there on a pair is two numbers, the same on every rank.

The reference is, in this order: `ref_model`, prepared with the same stack (without its store: it keeps nothing); with a
`peft_config` the model without its adapters; with `precompute_ref_log_probs=True` the model before the first step, whose sums go
into the dataset, so that training holds one model; else the model that TRL loads again from where it came.

Not supported: losses and settings that options.py names, a router's balance loss, images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import trl
from datasets import Dataset, concatenate_datasets
from torch import Tensor

from ..engine.objective.preference import preference_losses
from ..engine.objective.reference import without_adapters
from ..engine.run import Run
from ..stack import Stack
from .batches import Collate, WholeBatch, read_pairs
from .options import preference_of, preference_violations
from .trainer import LongContext

_LOGGED = {
    "rewards/chosen": "chosen_reward", "rewards/rejected": "rejected_reward", "rewards/margins": "margin",
    "rewards/accuracies": "accuracy", "logps/chosen": "chosen_logprob", "logps/rejected": "rejected_logprob",
}  # fmt: skip


class DPOTrainer(LongContext, trl.DPOTrainer):
    """`trl.DPOTrainer` with `stack=`: the losses sigmoid, sigmoid_norm, robust, hinge and ipo. It logs no mean logits and no token
    accuracy, which would take logits that never exist whole; else what TRL logs."""

    _known: ClassVar[frozenset[str]] = LongContext._known | {"trl.trainer.dpo_trainer.DPOTrainer"}
    _divides = False

    def __init__(self, *given: Any, stack: Stack, **named: Any) -> None:
        super().__init__(*given, stack=stack, **named)
        self._preference = preference_of(self.args)
        self._reference = self._prepare_reference(stack, named.get("offload_parameters", False))
        if self.precompute_ref_logps:
            self._precompute_all()

    @staticmethod
    def _violations(args: Any, given: Mapping[str, Any], groups: int) -> list[str]:
        return preference_violations(args, given, groups)

    @staticmethod
    def _read(inputs: Any) -> WholeBatch:
        return read_pairs(inputs)

    # -- the reference ----------------------------------------------------------------------------------------------------

    def _precompute_all(self) -> None:
        args: Any = self.args
        rows = args.precompute_ref_batch_size
        self.train_dataset = self._precompute_ref_logps(
            self.train_dataset, "train", rows or args.per_device_train_batch_size
        )
        rows = rows or args.per_device_eval_batch_size
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._precompute_ref_logps(part, name, rows) for name, part in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = self._precompute_ref_logps(self.eval_dataset, "eval", rows)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if not hasattr(self, "run"):
            return dataset  # TRL asks before the model is prepared
        if not isinstance(dataset, Dataset):
            raise ValueError(f"precompute_ref_log_probs=True needs a dataset that can be counted, {name} is a stream")
        sums = torch.cat([self._reference_sums(whole).cpu() for whole in self._whole_batches(dataset, batch_size)])
        columns = {"ref_chosen_logps": sums[:, 0].tolist(), "ref_rejected_logps": sums[:, 1].tolist()}
        return concatenate_datasets([dataset, Dataset.from_dict(columns)], axis=1)

    def _whole_batches(self, dataset: Dataset, batch_size: int) -> Iterator[WholeBatch]:
        collate, size = Collate(self.data_collator, self._groups, self._read), batch_size * self._groups
        for at in range(0, len(dataset), size):
            yield collate([dataset[i] for i in range(at, min(at + size, len(dataset)))])

    @torch.no_grad()
    def _reference_sums(self, whole: WholeBatch) -> Tensor:
        """[pairs, 2], the same on every rank."""
        if self._reference is not None:
            return _sums(self._reference, whole)
        if hasattr(self.run.model, "peft_config"):
            with without_adapters(self.run.model):
                return _sums(self.run, whole)
        return _sums(self.run, whole)  # before the first step

    # -- loss -------------------------------------------------------------------------------------------------------------

    def _loss(self, whole: WholeBatch, count: int | None) -> Tensor:
        """The mean over the pairs of this batch, as TRL's."""
        real = whole["attention_mask"][::2, 0] != 0
        if self.precompute_ref_logps:
            reference = whole["reference"].view(-1, 2)[real]
        else:
            reference = self._reference_sums(whole)
        batch = self.run.shard(whole["input_ids"], whole["labels"], whole.documents())
        logprobs, entropy = self.run.logprobs(batch, entropy=True)
        sums = _by_pair(self.run.by_document(batch, logprobs), batch.documents_of_rows, real)
        lengths = (whole["labels"] != -100).sum(1).view(-1, 2)[real]
        losses, numbers = preference_losses(sums, reference.to(sums), lengths.to(sums.device), self._preference)
        logged = {name: float(numbers[of].mean()) for name, of in _LOGGED.items()}
        logged["entropy"] = float(self.run.by_document(batch, entropy.detach()).sum()) / batch.supervised
        training = self.run.model.training
        metrics = self._metrics["train" if training else "eval"]
        for name, value in logged.items():
            metrics[name].append(value)
        if training:
            self._total_train_tokens += int(whole["attention_mask"].sum())
        metrics["num_tokens"] = [self._total_train_tokens]
        return losses.mean()


def _sums(run: Run, whole: WholeBatch) -> Tensor:
    batch = run.shard(whole["input_ids"], whole["labels"], whole.documents())
    logprobs = run.logprobs(batch)
    assert isinstance(logprobs, Tensor)
    real = whole["attention_mask"][::2, 0] != 0
    return _by_pair(run.by_document(batch, logprobs), batch.documents_of_rows, real)


def _by_pair(sums: Tensor, documents_of_rows: list[int], real: Tensor) -> Tensor:
    """Sums by document -> [pairs, 2]. The first document of a row is the answer with its prompt, the next one padding.
    In float32, as TRL writes the reference's into its dataset: what the model has not moved yet stays equal to it."""
    counts = torch.tensor(documents_of_rows)
    first = (counts.cumsum(0) - counts).view(-1, 2)[real]
    return sums[first.to(sums.device)].float()
