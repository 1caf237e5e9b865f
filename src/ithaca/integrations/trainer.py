"""transformers' Trainer with a stack: `Trainer(model, args, ..., stack=Stack(ulysses=8))`, or a mixin for a trainer of your own.

What a trainer does by itself stays as it is: its loop, schedule, logging, callbacks, evaluation, the names and rotation of its
checkpoints. What has to know that ranks share a sequence and that parameters are shards is replaced here:

    model          `prepare` shards it in place when the trainer is made; Accelerate does not wrap it. bf16=True: compute dtype
    batches        every rank reads the whole batch (batches.py); ranks compare what they read before each step
    loss           `run.loss`, divided by the supervised tokens of all micro-batches and ranks of the step
    gradients      summed by FSDP2; their norm is that of all shards
    checkpoints    weights as transformers loads them, gathered a parameter at a time; beside them the fp32 shards and the optimizer
                   in a checkpoint of ours (`state`), from which a resumed run goes on exactly

per_device_train_batch_size counts rows of a data-parallel group, that is of `ulysses × ring` ranks together. Gradient checkpointing
of the trainer is switched off: the stack's `recompute` is what does it here.

Not supported: what options.py names, `predict` and metrics, which need whole logits, and trainers with a loss of their own, other
than TRL's preferences and policy steps (dpo.py, grpo.py).
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from ..engine.optimizer import clip, global_norm, gradients
from ..engine.parallelize import prepare
from ..engine.ranks import gather, on_rank0
from ..engine.run import Run
from ..stack import Stack, require
from ..storage import checkpoint as checkpoints
from ..storage.export import export_model
from .batches import Collate, WholeBatch, read
from .options import violations

log = logging.getLogger("ithaca")

STATE = "state"  # inside a checkpoint of the trainer: shards and optimizer
_HIDDEN = ".weights"  # a folder of weights that is not complete yet
# Trainers whose own methods are known to be replaced rightly.
_KNOWN = {"transformers.trainer.Trainer", "trl.trainer.base_trainer._BaseTrainer", "trl.trainer.sft_trainer.SFTTrainer"}
# What is replaced without being called: a trainer that brings another one would lose it.
_REPLACED = (
    "compute_loss", "prediction_step", "predict", "save_model", "_move_model_to_device", "_wrap_model", "_get_num_items_in_batch",
    "_clip_grad_norm", "_get_grad_norm", "get_total_train_batch_size", "_save_optimizer_and_scheduler", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_best_model",
)  # fmt: skip

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class WholeBatches(Accelerator):
    """An accelerator whose processes all hold the whole batch, and whose model is sharded already."""

    _ithaca_groups: int
    _ithaca_read: Callable[[Any], WholeBatch] | None  # None: what the collator makes stays as it is

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not evaluation_mode:  # a reference is no model of the optimizer's
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if data_loader in self._dataloaders:
            return data_loader
        if self._ithaca_read is not None:
            data_loader.collate_fn = Collate(data_loader.collate_fn, self._ithaca_groups, self._ithaca_read)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,  # each reads everything
            process_index=0,
            put_on_device=False,  # a rank takes its tokens first
            rng_types=[],
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Of evaluation: a value for each row of a group. The loss is that of all groups, so it counts for each of theirs."""
        whole = input_data.repeat(self._ithaca_groups)
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
        return whole[:left] if left > 0 else whole


class LongContext(_Base):
    """Put it first: `class Mine(LongContext, SFTTrainer)`.

    stack: the techniques. weights, scratch, offload_parameters, quantize: as `ithaca.prepare` takes them.
    """

    _metrics: Any  # of TRL, which logs their means
    _known: ClassVar[frozenset[str]] = frozenset(_KNOWN)
    _accelerator: ClassVar[type[WholeBatches]] = WholeBatches
    _divides: ClassVar[bool] = True  # the loss, by the count of the whole step, so that micro-batches only add up
    run: Run
    """The prepared model: its mesh, its report."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        behind = order[order.index(LongContext) + 1 :]
        if transformers.Trainer not in behind:
            raise TypeError(
                f"{cls.__name__} has no trainer behind LongContext; put LongContext first: "
                f"class {cls.__name__}(LongContext, Trainer)"
            )
        for kind in behind[: behind.index(transformers.Trainer)]:
            lost = [name for name in _REPLACED if name in vars(kind)]
            if lost and f"{kind.__module__}.{kind.__qualname__}" not in cls._known:
                raise TypeError(
                    f"{kind.__name__} has a {', '.join(lost)} of its own, which LongContext would replace; derive from a trainer "
                    "without it (Trainer, SFTTrainer, one of ithaca.integrations), and override in the class that has LongContext"
                )

    def __init__(
        self,
        *given: Any,
        stack: Stack,
        weights: str | Path | Callable[[Run], None] | None = None,
        scratch: str | Path | None = None,
        offload_parameters: bool = False,
        quantize: str | None = None,
        **named: Any,
    ) -> None:
        bound = inspect.signature(super().__init__).bind(*given, **named)
        args, place = bound.arguments.get("args"), bound.arguments
        for kind in inspect.signature(super().__init__).parameters.values():
            if kind.kind is kind.VAR_KEYWORD and "args" in bound.arguments.get(kind.name, {}):
                place = bound.arguments[kind.name]
                args = place["args"]
        if not isinstance(args, transformers.TrainingArguments):
            raise ValueError("args is missing; pass TrainingArguments (or SFTConfig) as args")
        groups = max(1, args.world_size // max(1, stack.context_ranks))
        require(
            [*stack.violations(args.world_size), *self._violations(args, place, groups)],
            "this trainer cannot run with a stack",
        )
        place["args"], self._groups = self._adapted(_replaced_checkpointing(args), groups), groups
        super().__init__(*bound.args, **bound.kwargs)
        self._check_launch()
        self._set_signature_columns_if_needed()  # while the model's forward still names its arguments
        model: Any = self.model
        self._weights_dtype = next(model.parameters()).dtype  # as it came: what is saved
        self.run = self._prepare_model(
            model, stack, scratch=scratch, weights=weights, offload_parameters=offload_parameters, quantize=quantize
        )
        if self.run.mesh.world.size != self.args.world_size:
            raise ValueError(
                f"the process group has {self.run.mesh.world.size} ranks, but Accelerate sees {self.args.world_size}: start with "
                "torchrun, and on a machine without GPUs set use_cpu=True"
            )
        self.model_accepts_loss_kwargs = self._divides  # if not, the trainer divides by the micro-batches
        self._check_balance()
        self.gather_function = self.accelerator.gather_for_metrics

    @staticmethod
    def _adapted(args: Any, groups: int) -> Any:
        """A copy of the settings, as they are meant with a stack."""
        return args

    @staticmethod
    def _violations(args: transformers.TrainingArguments, given: Mapping[str, Any], groups: int) -> list[str]:
        return violations(args, given, groups)

    # -- the model --------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.__class__ = self._accelerator
        accelerator._ithaca_groups, accelerator._ithaca_read = self._groups, self._read

    def _prepare_model(self, model: Any, stack: Stack, **options: Any) -> Run:
        _take_back_patches(model)
        compute = torch.bfloat16 if self.args.mixed_precision == "bf16" else next(model.parameters()).dtype
        device = self.args.device if self.args.device.type == "cuda" else self.args.device.type  # Accelerate says cpu:1
        with torch.random.fork_rng(devices=[]):  # the order of the data must not depend on a proof
            return prepare(model, stack, device=device, dtype=compute, seed=self.args.seed, **options)

    def _check_launch(self) -> None:
        """What `accelerate launch` asks for by itself."""
        state: Any = self.accelerator.state
        problems = []
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.accelerator.parallelism_config is not None:
            problems.append(
                "accelerate was configured with DeepSpeed, FSDP or a parallelism of its own, but the stack shards by itself; start "
                "with torchrun, or `accelerate launch --multi_gpu`"
            )
        if state.dynamo_plugin.backend.value not in ("no", "NO"):
            problems.append(
                "accelerate was configured with torch.compile (dynamo), which would not be used; switch it off"
            )
        require(problems, "this trainer cannot run with a stack")

    def _prepare_reference(self, stack: Stack, offload_parameters: bool = False) -> Run | None:
        """TRL's `ref_model`, where it has one, under the same stack; it keeps nothing for a backward."""
        model: Any = getattr(self, "ref_model", None)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "the model's config asks for the router's balance loss, which is no part of this loss; set router_aux_loss_coef=0.0"
            )
        if model is None:
            return None
        frozen = model.requires_grad_(False)
        return self._prepare_model(frozen, replace(stack, store="gpu"), offload_parameters=offload_parameters)

    def _check_balance(self) -> None:
        if self.run.decoder.router_weight and self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: transformers leaves the router's balance loss out "
                "with it; set it to 0, or config.output_router_logits = False"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """`prepare` does, a layer at a time: the whole model may not fit."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    # -- batches ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _read(inputs: Any) -> WholeBatch:
        """What the data collator makes."""
        return read(inputs)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *given: Any, **named: Any) -> Any:
        """Of whole batches."""
        return super()._get_dataloader(dataset, description, batch_size * self.run.mesh.data.size, *given, **named)

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.run.mesh.data.size

    def _prepare_input(self, data: Any) -> Any:
        """Stays on the host until a rank has taken its tokens."""
        return data

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        """Supervised tokens of all micro-batches, over all ranks. Here ranks find out whether they read the same."""
        batches = [self._read(batch) for batch in batch_samples]
        self._require_same(batches)
        supervised = sum(batch.supervised for batch in batches)
        if batches and supervised == 0:
            raise ValueError(
                f"step {self.state.global_step + 1}: no token of its {len(batches)} micro-batches is supervised (every label is "
                "-100), so its loss would be 0/0. Leave such examples out; were answers cut off by max_length?"
            )
        return supervised

    def _require_same(self, batches: list[WholeBatch]) -> None:
        digests = gather(self.run.mesh.world, [batch.digest() for batch in batches])
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise RuntimeError(
                f"rank {other} has read another batch than rank 0, but ranks share their sequences and must read the same: give "
                "the dataset the same order and the collator no randomness that depends on the rank (a shuffled stream needs a "
                "seed)"
            )

    # -- loss -------------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self.run.decoder.router_weight and self._read(inputs).supervised == 0:
            return torch.zeros((), device=self.args.device)  # nothing to learn from; the other micro-batches have it
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if return_outputs:
            raise ValueError("logits of a long sequence never exist whole, so compute_loss cannot return outputs")
        return self._loss(self._read(inputs), None if num_items_in_batch is None else int(num_items_in_batch))

    def _loss(self, whole: WholeBatch, count: int | None) -> Tensor:
        """count: supervised tokens of the step; None in evaluation."""
        if whole.padded and self.run.decoder.router_weight:
            raise ValueError(
                "a batch has padding, which the router's balance loss would count; use packing, one row a batch, and "
                "dataloader_drop_last=True, or config.output_router_logits = False"
            )
        batch = self.run.shard(whole["input_ids"], whole["labels"], whole.documents())
        by_trl = hasattr(self, "_total_train_tokens")  # its SFTTrainer
        if by_trl and self.run.model.training:
            self._total_train_tokens += int(whole["attention_mask"].sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        # transformers adds the balance losses of micro-batches up, TRL takes their mean
        balance = 1.0 / self.current_gradient_accumulation_steps if count and by_trl else 1.0
        return self.run.loss(batch, supervised=count, label_smoothing=self.args.label_smoothing_factor, balance=balance)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        whole = self._read(inputs)
        self._require_same([whole])
        with torch.no_grad():
            return self.compute_loss(model, whole), None, None

    def predict(self, *given: Any, **named: Any) -> Any:
        raise ValueError("predict needs logits of all tokens, which never exist whole; save the model and ask that")

    # -- gradients --------------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        grads = gradients(self.run.model)
        norm = global_norm(grads)
        clip(grads, norm, self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return global_norm(gradients(self.run.model)) if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """The trainer adds up what ranks say, and each has counted the whole batch."""
        return super().floating_point_ops(inputs) // self.run.mesh.world.size

    # -- saving and resuming ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective. A parameter at a time is whole, on every device for a moment; rank 0 writes."""
        folder = Path(output_dir or str(self.args.output_dir))
        world = self.run.mesh.world
        on_rank0(world, lambda: shutil.rmtree(folder / _HIDDEN, ignore_errors=True))
        export_model(self.run, folder / _HIDDEN, dtype=self._weights_dtype)
        on_rank0(world, lambda: self._publish(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _publish(self, folder: Path) -> None:
        """Put complete weights in the place of older ones, and beside them what the trainer saves with a model."""
        for old in [*folder.glob("model*.safetensors*"), *folder.glob("adapter_model*")]:
            old.unlink()
        for file in (folder / _HIDDEN).iterdir():
            os.replace(file, folder / file.name)
        (folder / _HIDDEN).rmdir()
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        about = {"rows": self._rows(), "seed": self.args.seed}
        checkpoints.save(folder / STATE, self.run, self._plain_optimizer(), about, step=self.state.global_step)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer should be saved too
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)  # pyright: ignore

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the optimizer's states. Here, before anything else, is the look whether they are there."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ValueError(
                f"{resume_from_checkpoint} has no folder {STATE!r}, in which a trainer with a stack keeps shards and optimizer: it "
                "was saved without a stack or with save_only_model=True. Load it as a model (from_pretrained) and start anew"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        about = checkpoints.load(Path(checkpoint) / STATE, self.run, self._plain_optimizer())
        if about["rows"] != self._rows() and not self.args.ignore_data_skip:
            raise ValueError(
                f"{checkpoint} was saved with {about['rows']} rows a step (micro-batch × accumulation × data-parallel groups), now "
                f"they are {self._rows()}: the place in the data is not known. Keep their product, or set ignore_data_skip=True"
            )
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))  # pyright: ignore

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        self._load_from_checkpoint(best)
        checkpoints.load(Path(best) / STATE, self.run)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper

    def _rows(self) -> int:
        return self.get_total_train_batch_size(self.args)


class Trainer(LongContext, transformers.Trainer):
    """`transformers.Trainer` with `stack=`."""


def _take_back_patches(model: Any) -> None:
    """TRL gives a model a forward that returns log-probabilities by tiles; the stack's own loss does that."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = vars(inner).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        del inner.forward


def _replaced_checkpointing(args: transformers.TrainingArguments) -> transformers.TrainingArguments:
    """TRL switches gradient checkpointing on unless told otherwise, so it is replaced, not refused."""
    args = copy.copy(args)
    if args.gradient_checkpointing:
        log.info("gradient_checkpointing of the trainer is off: the stack recomputes by itself (Stack(recompute=...))")
    args.gradient_checkpointing, args.gradient_checkpointing_kwargs = False, None
    return args
