"""The real code on fake tensors, as rank 0 of N: what a step allocates, without a GPU and without the memory.

The model is built, sharded and stepped by the same functions as in training, under torch's FakeTensorMode and on its fake process
group; `LiveBytes` counts. Tensors are labelled "cpu", because FSDP2 asks a CUDA device for streams. Parts that cannot run so are
brought along (`assemble` takes them as arguments) and allocate alike: the kernels of attention, norms and loss (kernels.py) and the
store (store.py). Under FSDP2's CPU offload what lies on the host has the same label: its shards are not counted here, and are
copied wherever FSDP2 asks for them on the device.

Not seen: what the allocator holds beyond what is in use, the CUDA context, and the workspace of matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes

from ...config.schema import Lora
from ...engine.assemble import assemble
from ...engine.criterion import by_the_base
from ...engine.fsdp import gathered_groups
from ...engine.job import Job, Memory
from ...engine.limits import HOST_CACHE
from ...engine.mesh import Mesh, build_mesh, local_part
from ...engine.model.adapter import read_model
from ...engine.model.families import FAMILIES
from ...engine.model.shrink import cut, depth_of
from ...engine.own import OwnDecoder, read_own
from ...engine.proof import require_proof
from ...engine.run import Run
from ...stack import PER_LAYER, Stack
from .alike import LeftOut, chosen, held_by, on_host, state_bytes
from .kernels import DryKernels, DryLoss, DryNf4, DryTokens
from .own import NotAlike, alike_stages, alike_tiles, stand_ins
from .store import DryGpuStore, DryStore
from .tracker import LiveBytes, plain_tensors

CPU = torch.device("cpu")


@dataclass
class DryRun(Memory):
    """What a step of one rank holds, in bytes, and which lines of code it comes from. The copy that a checkpoint is written from is
    counted for models by their own code only."""

    lines: dict[str, dict[str, int]] = field(default_factory=dict)  # at the peak of a phase
    layers: int = 0  # that were counted
    executed: int = 0  # of them; the others are alike


def dry_run(
    job: Job,
    config: Any,
    layers: int | None = None,
    *,
    every: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    documents: list[int] | None = None,
    optimizer_bytes: float | None = None,
) -> DryRun:
    """Run one step of `job`. Of several micro-batches two are run.

    config: Hugging Face's, of the job's model. layers: fewer than the model has, and then no more than those are counted.
    every: run also the layers that are alike, which are otherwise added up (alike.py). documents: lengths of those in a row.
    optimizer_bytes: of its states, for each trained weight; None = as the job's optimizer takes.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own, and this process has one already")
    try:
        return _dry_run(job, config, layers, every, dtype, documents, optimizer_bytes)
    except NotAlike:
        return _dry_run(job, config, layers, True, dtype, documents, optimizer_bytes)


def _dry_run(
    job: Job,
    config: Any,
    layers: int | None,
    every: bool,
    dtype: torch.dtype,
    documents: list[int] | None,
    optimizer_bytes: float | None,
) -> DryRun:
    own = by_own_code(config, job.stack)
    config = shortened(config, layers)
    depth = depth_of(config)
    stack = shortened_stack(job.stack, depth)
    tokens = job.batch * job.context // job.world
    executed, gaps = list(range(depth)), []
    if not own and not every:
        executed, gaps = chosen(depth, stack, tokens * config.hidden_size * dtype.itemsize)
        config = shortened(config, len(executed))
    job = replace(job, stack=picked(stack, executed))
    per_weight = job.optimizer_bytes if optimizer_bytes is None else optimizer_bytes
    tracker, left_out = LiveBytes(), 0
    model = meta_model(job, config, dtype)
    decoder = proven(model) if own else None  # on real numbers, so before there are none
    with ExitStack() as opened:
        opened.enter_context(fake_group(job.world))
        mesh = replace(build_mesh(job.stack, CPU), offload=job.offload)  # which a mesh of CPUs would refuse
        fake = opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        opened.enter_context(tracker.watching())
        _fill(model)
        run = assembled(model, job, mesh, tracker, dtype, decoder)
        del model, decoder
        for parameter in run.model.parameters():
            for part in plain_tensors(local_part(parameter)):
                tracker.see(part, "parameters", line="the weights")
        away = _put_away(run, tracker, per_weight, job.accumulation) if job.offload else 0
        tracker.begin("load")
        for gap in gaps:
            left = LeftOut(run, tracker, gap, per_weight, job)
            away += left.away
            opened.enter_context(left.counted())
        if own and not every:
            left_out = opened.enter_context(stand_ins(run))
        batch = _batch(run, job, documents, fake)
        if own and not every:
            opened.enter_context(alike_tiles(run, batch.input_ids.shape[1]))
            opened.enter_context(alike_stages())
        try:
            _step(run, job, batch, per_weight, tracker)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise NotCounted(_not_counted(config.model_type, error)) from error
        trained = held_by(run.model, per_weight)
        store = run.store
    held = store.held if isinstance(store, DryStore) else {}
    return DryRun(
        {phase: dict(by) for phase, by in tracker.peaks.items()},
        host=held.get("host", 0) + away,
        disk=held.get("disk", 0),
        offloaded=away,
        snapshot=trained["gradients"] + trained["optimizer"] if own and job.asynchronous else 0,
        near=min(held.get("disk", 0), HOST_CACHE),
        lines={phase: dict(by) for phase, by in tracker.lines.items()},
        layers=depth,
        executed=len(executed) - left_out,
    )


class NotCounted(ValueError):
    """The code of a model cannot run without numbers."""


def _not_counted(kind: str, error: Exception) -> str:
    return (
        f"the code of {kind} asks for numbers that a dry run does not have ({' '.join(str(error).split())[:80]}), as experts do "
        "that are called one by one, so what it takes cannot be counted. Give `ithaca train` a stack (--stack.FIELD VALUE) and let "
        "it run two steps: it says what they took"
    )


def by_own_code(config: Any, stack: Stack) -> bool:
    """Whether a run of it takes the module engine (engine/parallelize.py)."""
    return stack.engine == "module" or (stack.engine == "auto" and config.model_type not in FAMILIES)


def proven(model: nn.Module) -> OwnDecoder:
    """With what a proof has shown; ValueError where it is not exact."""
    decoder = read_own(model)
    require_proof(decoder)
    decoder.token_kernels = DryTokens()
    return decoder


def meta_model(job: Job, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model as training builds it, without weights. What FSDP2 keeps masters of is fp32."""
    from transformers import AutoModelForCausalLM

    from ...engine.build import with_lora

    narrow = job.lora or not job.stack.shard_parameters
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype if narrow else torch.float32, trust_remote_code=False
        )
        return with_lora(model, Lora(rank=job.lora, targets=job.targets), 0) if job.lora else model


def _fill(model: nn.Module) -> None:
    """Give a model without weights fake ones, on the CPU label."""
    made: dict[int, nn.Parameter] = {}  # a tied parameter sits in several modules and must stay one
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) not in made:
                made[id(value)] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype), value.requires_grad)
            module._parameters[name] = None if value is None else made[id(value)]
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else torch.empty(value.shape, dtype=value.dtype)


def assembled(
    model: nn.Module, job: Job, mesh: Mesh, tracker: LiveBytes, dtype: torch.dtype, decoder: OwnDecoder | None = None
) -> Run:
    """The model as `prepare` leaves it, with parts that allocate as those of a GPU do and compute nothing."""
    stack, on_device = job.stack, DryGpuStore(CPU, tracker)
    return assemble(
        model, decoder or read_model(model, DryTokens()), stack, mesh,
        store=on_device if stack.offload == "gpu" else DryStore(CPU, stack.offload), on_device=on_device,
        kernels=DryKernels(job.kernel, windowed=job.windowed, processors=job.processors), loss_kernel=DryLoss(),
        dtype=dtype, weights=lambda run: None,  # they are where they belong
        packing=None if job.quantize is None else DryNf4,
    )  # fmt: skip


def _step(run: Run, job: Job, batch: Any, optimizer_bytes: float, tracker: LiveBytes) -> None:
    """The second step of a run, when the optimizer's states are there."""
    held = [] if job.offload else states(run.model, optimizer_bytes)
    for state in held:
        tracker.see(state, "optimizer", line="the optimizer's states")
    for value in vars(batch).values():
        if isinstance(value, Tensor):
            tracker.see(value, "other")
    for _ in range(min(job.accumulation, 2)):  # from the second on, all gradients are there from the beginning
        tracker.begin("forward")
        with loss_phase(run, tracker):
            loss = _loss(run, job, batch)
        tracker.begin("backward")
        loss.backward()
        del loss
    for parameter in run.model.parameters():
        if parameter.grad is not None and not job.offload:
            tracker.see(local_part(parameter.grad), "gradients")
    tracker.begin("step")
    del held


def _loss(run: Run, job: Job, batch: Any) -> Tensor:
    if not job.units:
        return run.loss(batch)
    if job.reference:
        by_the_base()(run, batch)
    logprobs = run.logprobs(batch)
    assert isinstance(logprobs, Tensor)
    return logprobs.sum()


def states(model: nn.Module, per_weight: float) -> list[Tensor]:
    """Stands for the optimizer's states."""
    trained = [local_part(p) for p in model.parameters() if p.requires_grad]
    return [torch.empty(state_bytes(p, per_weight), dtype=torch.uint8) for p in trained]


class _OnHost:
    """A shard in host memory: asked for on the device, it is copied, although both have the same label here."""

    def __init__(self, shard: Tensor) -> None:
        self.shard = shard

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        return self.shard.clone()


def _put_away(run: Run, tracker: LiveBytes, optimizer_bytes: float, accumulation: int) -> int:
    """FSDP2's CPU offload: shards, their states and, once reduced, their gradients are not on the GPU. -> their bytes"""

    def gone(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.ignore(local_part(parameter.grad))

    for module in run.model.modules():
        for group in gathered_groups(module):
            group.lazy_init()  # as the first forward does: it looks for the shards once more, and then never again
            for parameter in group.fsdp_params:
                parameter._sharded_param_data = _OnHost(parameter._sharded_param_data)
    for parameter in run.model.parameters():
        tracker.ignore(local_part(parameter))
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gone)
    return on_host(run.model, optimizer_bytes, accumulation)


def _batch(run: Run, job: Job, documents: list[int] | None, fake: FakeTensorMode) -> Any:
    given: list[Any] | None = documents
    if job.trees:  # a prompt and two answers; the token where they part is computed twice
        answer = job.context // 4
        given = [(job.context - 1 - 2 * answer, None), (answer, 0), (answer, 0)]
    packed = None if given is None else [given] * job.batch
    with _disable_current_modes():  # how a batch is cut depends on its numbers
        batch = run.shard(torch.zeros(job.batch, job.context - job.trees, dtype=torch.int64), documents=packed)
        asked = batch.asked if job.units else None
    values = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor) and name != "asked"}
    batch = replace(batch, **{name: fake.from_tensor(value) for name, value in values.items()})
    if asked is not None:
        batch.asked = fake.from_tensor(asked)
    return batch


@contextmanager
def loss_phase(run: Run, tracker: LiveBytes) -> Iterator[None]:
    """The head is where the loss begins."""
    head = run.decoder.head.register_forward_pre_hook(lambda *_: tracker.begin("loss"), prepend=True)
    try:
        yield
    finally:
        head.remove()


def shortened(config: Any, layers: int | None) -> Any:
    """The first so many layers."""
    config, depth = deepcopy(config), depth_of(config)
    if layers is not None and layers < depth:
        if config.get_text_config() is not config:
            raise ValueError(
                f"a {config.model_type} has a config inside its config, so its layers cannot be cut; leave --layers out"
            )
        config = type(config).from_dict(cut(config.to_dict(), depth, list(range(layers))))
    config.use_cache = False
    return config


def shortened_stack(stack: Stack, layers: int) -> Stack:
    """Where layers differ in what they keep, each kind has its share of the slice."""
    depth = max((len(value) for name in PER_LAYER if isinstance(value := getattr(stack, name), tuple)), default=layers)
    return picked(stack, [i * depth // layers for i in range(layers)])


def picked(stack: Stack, layers: list[int]) -> Stack:
    """What these layers are asked for."""
    whole = {name: getattr(stack, name) for name in PER_LAYER if isinstance(getattr(stack, name), tuple)}
    return replace(stack, **{name: tuple(values[i] for i in layers) for name, values in whole.items()})


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """As rank 0 of `world`, without peers: collectives take no time, and bring back what was sent (comm.py)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
