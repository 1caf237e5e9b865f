"""The real code on fake tensors, as rank 0 of N: what a step allocates, without a GPU and without the memory.

The model is built, sharded and stepped by the same functions as in training, under torch's FakeTensorMode and on its fake process
group; `LiveBytes` counts. Tensors are labelled "cpu", because FSDP2 asks a CUDA device for streams. Three parts cannot run so and
are replaced by stand-ins that allocate alike: the attention kernel, the store (dry_store.py) and the fused loss. Under FSDP2's CPU
offload what lies on the host has the same label: its shards are not counted here, and their copies on the GPU are made by hand.

Not seen: what the allocator holds beyond what is in use, the CUDA context, and the workspace of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import _disable_current_modes

from ...base.kernels import backward_workspace
from ...config.schema import Lora
from ...engine import fsdp, parallelize
from ...engine import run as run_module
from ...engine.attention.kernel import Calls
from ...engine.model import norm
from ...engine.model.families import FAMILIES
from ...engine.objective import cross_entropy as loss_module
from ...engine.objective.cross_entropy import LossTerms
from ...engine.run import Run
from ...stack import PER_LAYER, Stack
from ..job import OPTIMIZERS, Job, Memory
from .alike import LeftOut, chosen, local, on_host, state_bytes
from .store import DryGpuStore, DryStore
from .tracker import LiveBytes

CPU = torch.device("cpu")


@dataclass
class DryRun(Memory):
    """What a step of one rank holds, in bytes, and which lines of code it comes from."""

    lines: dict[str, dict[str, int]] = field(default_factory=dict)  # at the peak of a phase
    layers: int = 0  # that were counted
    executed: int = 0  # of them; the others are alike


class DryKernel:
    """Allocates what an attention kernel does, in its order, and computes nothing."""

    packed = True

    def __init__(self, name: str, processors: int = 0) -> None:
        self.name, self.processors, self.calls = name, processors, Calls()

    def problem(self, device: Any, dtype: Any, head_dim: int, windowed: bool) -> str | None:
        return None

    def workspace(self, direction: str, q: Tensor, k: Tensor) -> Tensor:
        inside = (
            0 if direction == "forward" else backward_workspace(self.name, tuple(q.shape), k.shape[1], self.processors)
        )
        return q.new_empty(inside, dtype=torch.uint8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
        self.workspace("forward", q, k)
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        grads = tuple(t.new_empty(t.shape) for t in (q, k, v))
        self.workspace("backward", q, k)
        return grads

    forward_packed, backward_packed = forward, backward


@dataclass
class Case:
    """What a dry run needs to know of a run."""

    config: Any  # of Hugging Face
    stack: Stack
    context: int
    world: int = 1
    rows: int = 1  # of a micro-batch
    dtype: torch.dtype = torch.bfloat16
    lora: Lora | None = None
    kernel: str = "fa4"
    windowed: str = ""  # the kernel of layers with a window, if that is another
    optimizer: str = "adamw"
    optimizer_bytes: float | None = None  # of its states, for each trained weight; None = as it takes
    offload: bool = False  # train.offload_optimizer
    accumulation: int = 1  # micro-batches of a step; of several, two are run
    processors: int = 0  # as in Job
    documents: list[int] | None = None

    @classmethod
    def of(cls, job: Job, config: Any) -> Case:
        """config: Hugging Face's, of the job's model."""
        return cls(
            config, job.stack, job.context, world=job.world, rows=job.batch, kernel=job.kernel, windowed=job.windowed,
            lora=Lora(rank=job.lora, targets=job.targets) if job.lora else None, optimizer=job.optimizer,
            offload=job.offload, accumulation=job.accumulation, processors=job.processors,
        )  # fmt: skip

    @property
    def states(self) -> float:
        return OPTIMIZERS[self.optimizer] if self.optimizer_bytes is None else self.optimizer_bytes


def dry_run(case: Case, layers: int | None = None, *, every: bool = False) -> DryRun:
    """Run one step of `case`. layers: fewer than the model has, and then no more than those are counted. every: run also the layers
    that are alike, which are otherwise added up (alike.py)."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own, and this process has one already")
    if FAMILIES[case.config.model_type].experts:
        raise ValueError(
            "a dry run of a mixture of experts is not possible: which expert a token goes to depends on its numbers"
        )
    config = shortened(case.config, layers)
    depth = config.num_hidden_layers
    stack = shortened_stack(case.stack, depth)
    tokens = case.rows * case.context // case.world
    executed, gaps = chosen(depth, stack, tokens * config.hidden_size * case.dtype.itemsize)
    if every:
        executed, gaps = list(range(depth)), []
    config, stack = shortened(config, len(executed)), picked(stack, executed)
    tracker = LiveBytes()
    with ExitStack() as opened:
        opened.enter_context(fake_group(case.world))
        opened.enter_context(_fused())
        if case.offload:
            opened.enter_context(_arriving())
        fake = opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        opened.enter_context(tracker.watching())
        run = _prepared(case, config, stack, tracker)
        away = _put_away(run, tracker, case.states) if case.offload else 0
        for gap in gaps:
            left = LeftOut(run, tracker, gap, case.states, case.offload)
            away += left.away
            opened.enter_context(left.counted())
        _step(case, run, fake, tracker)
        store = run.store
    held = store.held if isinstance(store, DryStore) else {}
    return DryRun(
        {phase: dict(by) for phase, by in tracker.peaks.items()},
        host=held.get("host", 0) + away,
        disk=held.get("disk", 0),
        offloaded=away,
        lines={phase: dict(by) for phase, by in tracker.lines.items()},
        layers=depth,
        executed=len(executed),
    )


def _prepared(case: Case, config: Any, stack: Stack, tracker: LiveBytes) -> Run:
    model = _build(case, config)
    quiet = replace(stack, store="gpu", attention="cpu")
    build_mesh = real(parallelize.build_mesh)
    with (
        mock.patch.object(parallelize, "build_mesh", lambda *given: replace(build_mesh(*given), offload=case.offload)),
        mock.patch.object(fsdp, "CPUOffloadPolicy", lambda **_: CPUOffloadPolicy(pin_memory=False)),  # nothing to pin
        mock.patch.object(parallelize, "materialize", lambda *_: None),  # fake weights are where they belong
    ):
        run = parallelize.prepare(model, quiet, device=CPU, dtype=case.dtype)
    run.stack = stack
    run.near = DryGpuStore(CPU, tracker)
    run.store = run.near if stack.far == "gpu" else DryStore(CPU, stack.far)
    kernels = {False: case.kernel, True: case.windowed or case.kernel}
    run.kernels.chosen = {need: DryKernel(kernels[need.windowed], case.processors) for need in run.kernels.chosen}  # pyright: ignore
    del model
    for parameter in run.model.parameters():
        tracker.see(local(parameter), "parameters", line="the weights")
    tracker.begin("load")
    return run


def meta_model(case: Case, config: Any) -> nn.Module:
    """The model as training builds it, without weights. What FSDP2 keeps masters of is fp32."""
    from transformers import AutoModelForCausalLM

    from ...engine.build import with_lora

    narrow = case.lora is not None or not case.stack.shard_parameters
    with torch.device("meta"):
        dtype = case.dtype if narrow else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        return model if case.lora is None else with_lora(model, case.lora, 0)


def _build(case: Case, config: Any) -> nn.Module:
    """The model, with fake weights on the CPU label."""
    with _disable_current_modes():
        model = meta_model(case, config)
    made: dict[int, nn.Parameter] = {}  # a tied parameter sits in several modules and must stay one
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) not in made:
                made[id(value)] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype), value.requires_grad)
            module._parameters[name] = None if value is None else made[id(value)]
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else torch.empty(value.shape, dtype=value.dtype)
    return model


def _step(case: Case, run: Run, fake: FakeTensorMode, tracker: LiveBytes) -> None:
    """The second step of a run, when the optimizer's states are there."""
    held = [] if case.offload else states(run.model, case.states)
    for each in held:
        tracker.see(each, "optimizer", line="the optimizer's states")
    batch = _batch(case, run, fake)
    for value in vars(batch).values():
        if isinstance(value, Tensor):
            tracker.see(value, "other")
    for _ in range(min(case.accumulation, 2)):  # from the second on, all gradients are there from the beginning
        tracker.begin("forward")
        with loss_phase(run, tracker):
            loss = run.loss(batch)
        tracker.begin("backward")
        loss.backward()
        del loss
    for parameter in run.model.parameters():
        if parameter.grad is not None and not case.offload:
            tracker.see(local(parameter.grad), "gradients")
    tracker.begin("step")
    del held


def states(model: nn.Module, per_weight: float) -> list[Tensor]:
    """Stands for the optimizer's states."""
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    return [torch.empty(state_bytes(p, per_weight), dtype=torch.uint8) for p in trained]


def _put_away(run: Run, tracker: LiveBytes, optimizer_bytes: float) -> int:
    """FSDP2's CPU offload: shards, their states and, once reduced, their gradients are not on the GPU. -> their bytes"""

    def gone(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.ignore(local(parameter.grad))

    for parameter in run.model.parameters():
        tracker.ignore(local(parameter))
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gone)
    tracker.begin("load")
    return on_host(run.model, optimizer_bytes)


@contextmanager
def _arriving() -> Iterator[None]:
    """A shard that is gathered comes to the GPU first, as it is, and is rounded there."""
    rounded = _fsdp_param._to_dtype_if_needed
    with mock.patch.object(_fsdp_param, "_to_dtype_if_needed", lambda shard, dtype: rounded(shard.clone(), dtype)):
        yield


def _batch(case: Case, run: Run, fake: FakeTensorMode) -> Any:
    documents = None if case.documents is None else [case.documents] * case.rows
    with _disable_current_modes():  # how a batch is cut depends on its numbers
        batch = run.shard(torch.zeros(case.rows, case.context, dtype=torch.int64), documents=documents)
    changed = {name: fake.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **changed)


@contextmanager
def loss_phase(run: Run, tracker: LiveBytes) -> Iterator[None]:
    """The head is where the loss begins."""
    head = run.decoder.head.register_forward_pre_hook(lambda *_: tracker.begin("loss"), prepend=True)
    try:
        yield
    finally:
        head.remove()


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function on real tensors: a mesh asks its own for their values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def shortened(config: Any, layers: int | None) -> Any:
    from copy import deepcopy

    config = deepcopy(config)
    if layers is not None and layers < config.num_hidden_layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    config.use_cache = False
    return config


def shortened_stack(stack: Stack, layers: int) -> Stack:
    """Where layers differ in what they keep, each kind has its share of the slice."""
    depth = max((len(value) for name in PER_LAYER if isinstance(value := getattr(stack, name), tuple)), default=layers)
    return picked(stack, [i * depth // layers for i in range(layers)])


def picked(stack: Stack, layers: list[int]) -> Stack:
    """What these layers are asked for."""
    whole = {name: getattr(stack, name) for name in PER_LAYER if isinstance(getattr(stack, name), tuple)}
    return replace(stack, **{name: tuple(each[i] for i in layers) for name, each in whole.items()})


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """As rank 0 of `world`, without peers: collectives take no time, and bring back what was sent (comm.py)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _fused() -> Iterator[None]:
    """On a GPU one kernel makes loss and gradient, and one a norm; on the CPU label they would not be chosen."""

    def loss_fuses(device: Any, dtype: torch.dtype, terms: LossTerms) -> bool:
        return terms.logit_cap is None and dtype in (torch.bfloat16, torch.float32)

    def loss_fused(logits: Tensor, labels: Tensor, terms: LossTerms, scale: float, learn: bool):
        rows = torch.empty(labels.numel(), dtype=torch.float32)
        return rows.sum(), logits, logits.detach()

    with (
        mock.patch.object(loss_module, "fuses", loss_fuses),
        mock.patch.object(run_module, "fuses", loss_fuses),
        mock.patch.object(loss_module, "_fused", loss_fused),
        mock.patch.object(norm, "fuses", lambda x: x.dtype in (torch.bfloat16, torch.float16)),
        mock.patch.object(norm, "fused", lambda x, weight, epsilon: _DryNorm.apply(x, weight)),
    ):
        yield


class _DryNorm(torch.autograd.Function):
    """Keeps and makes what torch's fused RMSNorm does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
