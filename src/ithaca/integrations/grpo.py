"""TRL's policy step with a stack: `GRPOTrainer(model, rewards, args, rollout_func=sample, ..., stack=Stack(ulysses=8))`.

Completions are sampled elsewhere: `rollout_func` is called on rank 0, and all ranks get what it returns. Reward functions are
called on every rank with the whole batch, and rank 0's answers count. From there on TRL's own code goes on, on every rank alike:
advantages, buffers, all its losses and what it logs. What is replaced is where log-probabilities come from: rows are unpadded, cut
over ranks by `run.shard`, and `run.by_token` puts the numbers of all ranks together again, differentiable, [completions, tokens].

per_device_train_batch_size counts completions of a data-parallel group, and generation_batch_size follows from it and
steps_per_generation. Not supported: what options.py names, sampling with the model itself above all; a router's balance loss;
images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import trl
from torch import Tensor, nn
from transformers import set_seed

from ..engine.ranks import on_rank0
from ..engine.run import Run
from ..stack import Stack
from .batches import IGNORE, WholeBatch
from .options import policy_violations
from .trainer import LongContext, WholeBatches


class _OneProcess(WholeBatches):
    """For TRL, which takes its part of what it gathered: here every rank has all of it."""

    @property
    def process_index(self) -> int:
        return 0

    @property
    def num_processes(self) -> int:
        return 1


class GRPOTrainer(LongContext, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with `stack=`, on completions that `rollout_func` brings."""

    _known: ClassVar[frozenset[str]] = LongContext._known | {"trl.trainer.grpo_trainer.GRPOTrainer"}
    _accelerator: ClassVar[type[WholeBatches]] = _OneProcess
    _divides = False
    _read: Any = None  # examples, which TRL makes batches of itself

    def __init__(self, *given: Any, stack: Stack, **named: Any) -> None:
        super().__init__(*given, stack=stack, **named)
        self._reference = self._prepare_reference(stack, named.get("offload_parameters", False))
        self._trained = [parameter for parameter in self.run.model.parameters() if parameter.requires_grad]
        sample: Any = self.rollout_func
        world = self.run.mesh.world
        self.rollout_func = lambda prompts, trainer: on_rank0(world, lambda: sample(prompts, trainer))
        set_seed(self.args.seed)  # TRL has given each rank its own, but they shuffle completions together

    @staticmethod
    def _violations(args: Any, given: Mapping[str, Any], groups: int) -> list[str]:
        return policy_violations(args, given, groups)

    @staticmethod
    def _adapted(args: Any, groups: int) -> Any:
        args = copy.copy(args)
        args.generation_batch_size = args.per_device_train_batch_size * groups * args.steps_per_generation
        return args

    # -- batches ----------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):  # whatever sampling and rewards draw, on whichever rank
            return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, *given: Any) -> Tensor:
        """TRL gathers those of all ranks, one behind the other."""
        return super()._calculate_rewards(inputs, prompts, *given)[: len(prompts)]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        names = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
        self._require_same([WholeBatch({name: inputs[name] for name in names})])
        return inputs

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        """TRL's loss counts by itself."""

    # -- loss -------------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        if any(value is not None for value in images.values()):
            raise ValueError("completions come with images, but a stack takes text; leave them out of the dataset")
        for parameter in self._trained:  # TRL freezes adapters while they are off: see engine/objective/reference.py
            parameter.requires_grad_(True)
        run = self.run if self._reference is None or model is not self.ref_model else self._reference
        rows = self._groups * (batch_size or len(input_ids))
        parts = [
            self._score(run, ids.cpu(), mask.cpu() != 0, logits_to_keep)
            for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows), strict=True)
        ]
        logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
        return logprobs, entropy if compute_entropy else None, None

    def _score(self, run: Run, ids: Tensor, real: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Of the last `keep` tokens of each row, [rows, keep]. Rows are padded before the prompt and behind the completion."""
        place = real.long().cumsum(1) - 1  # of each token in its row without padding
        row = torch.arange(len(ids))[:, None].expand_as(ids)
        asked = real.clone()
        asked[:, :-keep] = False
        rows = -(-len(ids) // self._groups) * self._groups
        plain = torch.zeros(rows, int(place.max()) + 1, dtype=torch.long)
        labels = torch.full_like(plain, IGNORE)
        plain[row[real], place[real]] = ids[real]
        labels[row[asked], place[asked]] = ids[asked]
        batch = run.shard(plain, labels)
        found = run.logprobs(batch, temperature=self.temperature, entropy=True)
        asked &= place > 0  # a first token is predicted by nothing
        at, mask = (row[asked], place[asked] - 1), asked[:, -keep:].to(run.mesh.device)
        logprobs, entropy = (
            value.new_zeros(mask.shape).masked_scatter(mask, run.by_token(batch, value)[at]) for value in found
        )
        return logprobs, entropy

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super(LongContext, self).training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        return super(LongContext, self).compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        return super(LongContext, self).prediction_step(model, inputs, prediction_loss_only, ignore_keys)
