"""A run to be measured: the model with random weights as training prepares it, its optimizer, a batch, and a step.

One process stands for rank 0 of N on torch's fake process group: kernels, copies and allocations are those of that rank, while
collectives take no time and bring back what was sent, so the loss means nothing. With one rank there is nothing to fake, and N real
ranks bring a group of their own (`joined`).

With fewer layers than the model has, `states` adds what a rank would hold of the others all the time: weights, optimizer states,
and from backward on gradients. Their activations are not there; with a store beside the GPU they would not be either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config.schema import Train
from ...engine.batch import Batch
from ...engine.job import Job
from ...engine.model.shrink import depth_of
from ...engine.model.weights import fill_at_random
from ...engine.optimizer import backward, build_optimizer, gradients, norm_of, update
from ...engine.parallelize import prepare
from ...engine.run import Run
from ...planner.dry_run.alike import held_by
from ...planner.dry_run.run import fake_group, meta_model, shortened, shortened_stack


@dataclass
class Steps:
    """What a step needs, and what it does. Call it with a function that is told when a phase begins."""

    run: Run
    optimizer: torch.optim.Optimizer
    batch: Batch
    train: Train
    resident: dict[str, int]  # category -> bytes of the layers that are not there
    held: dict[str, Tensor]
    accumulation: int = 1  # micro-batches of a step

    def __call__(self, begin: Callable[[str], None] = lambda phase: None) -> None:
        """As training/step.py does it, but whatever the loss is: it lacks what peers would have sent."""
        for _ in range(self.accumulation):
            begin("forward")
            loss = self.run.loss(self.batch, supervised=self.accumulation * self.batch.supervised)
            self.hold("gradients")
            begin("backward")
            backward(loss, self.optimizer)
            del loss
        begin("step")
        grads = gradients(self.run.model)
        if self.run.mesh.world.fake:
            for grad in grads:  # sums that lack their peers may be no numbers, and would leave weights that are none
                grad.zero_()
        norm = norm_of(grads, self.optimizer)
        update(self.optimizer, grads, norm, self.train.clip)
        del grads, norm
        self.held.pop("gradients", None)

    def hold(self, *categories: str) -> None:
        for name in categories:
            if self.resident.get(name) and name not in self.held:
                self.held[name] = torch.zeros(self.resident[name], dtype=torch.uint8, device=self.run.mesh.device)

    def make_states(self) -> None:
        """The optimizer makes its states at its first step. Let that be one whose gradients are zero, before anything is measured:
        otherwise the second step finds less room than the first, and the allocator is at work while it is timed."""
        for parameter in self.run.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def tokens(self) -> int:
        """Of a step, on this rank."""
        return self.accumulation * self.batch.input_ids.numel()


@contextmanager
def ready(
    job: Job, config: Any, device: torch.device, layers: int | None = None, states: bool = False, *,
    dtype: torch.dtype = torch.bfloat16, joined: bool = False,
) -> Iterator[Steps]:  # fmt: skip
    """Build everything; a process group that this made is gone afterwards. config: Hugging Face's, of the job's model. joined: the
    ranks of the job are there, and this is one of them."""
    if dist.is_initialized() and not joined:
        raise RuntimeError("a profile makes a process group of its own, and this process has one already")
    if joined and dist.get_world_size() != job.world:
        raise RuntimeError(f"{dist.get_world_size()} ranks are there, and the job has {job.world}")
    short = shortened(config, layers)
    missing = depth_of(config) - depth_of(short) if states else 0
    job = replace(job, stack=shortened_stack(job.stack, depth_of(short)))
    try:
        with fake_group(job.world) if job.world > 1 and not joined else nullcontext():
            yield _steps(job, short, device, missing, dtype)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _steps(job: Job, config: Any, device: torch.device, missing: int, dtype: torch.dtype) -> Steps:
    run = prepare(
        meta_model(job, config, dtype), job.stack, device=device, dtype=dtype,
        weights=lambda run: fill_at_random(run.decoder, run.mesh), offload_parameters=job.offload, quantize=job.quantize,
    )  # fmt: skip
    train = Train(steps=100, optimizer=job.optimizer, offload_optimizer=job.offload)
    torch.manual_seed(0)
    ids = torch.randint(0, run.decoder.config.vocab_size, (job.batch, job.context))
    layer = held_by(run.decoder.layers[0].module, job.optimizer_bytes)
    steps = Steps(
        run, build_optimizer(run.model, train, dtype, device), run.shard(ids), train,
        {} if job.offload else {name: missing * nbytes for name, nbytes in layer.items()}, {}, job.accumulation,
    )  # fmt: skip
    steps.hold("parameters", "optimizer")
    steps.make_states()
    return steps
