"""AdamW of a run whose weights, gradients and averages wait in host memory: they come to the GPU block by block to be updated.

FSDP2's CPU offload keeps shards of fp32 weights in pinned host memory and sends gradients there as they are made (fsdp.py). The
averages are pinned beside them. An update does little with much: 16 bytes of each weight are read and 12 written, so it takes as
long as these take to move. Cores move what they can: 57 GB/s were measured with 16 of them, and torchrun gives a process one.
The link to the GPU moves 55 GB/s each way at the same time, whatever the cores do. So a block of weight, averages and gradient
comes in while the one before is updated and the one before that goes back, and the update is the kernel that also updates states
on the GPU: the same numbers, to the bit. Whatever else needs all gradients comes by the same way: their norm, and their sum over
micro-batches, which FSDP2 would add up on one core while backward waits (1 GB/s was measured).

Memory on the GPU: SLOTS blocks, between backward and the next forward, where nothing else is. On the host: 16 bytes a weight, and
4 more with several micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.holding import module_holds
from .limits import BLOCK, SLOTS
from .mesh import local_part
from .offload.host import HostBuffer, Lane
from .offload.store import Meter

module_holds(__name__, "optimizer")
Work = Callable[[list[Tensor]], object]


class HostAdamW(torch.optim.AdamW):
    """scale: what the next step multiplies gradients by (clipping); None = nothing."""

    saved_as = "AdamW"  # its states are those of torch's: a run goes on with them on either side

    def __init__(self, groups: list[dict[str, Any]], *, device: torch.device, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self.device = device
        self.scale: Tensor | None = None
        self._buffers: list[HostBuffer] = []  # that the averages lie in

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        scale, self.scale = self.scale, None
        steps: dict[float, Tensor] = {}  # on the device; nearly always one

        def blocks() -> Iterator[tuple[list[Tensor], Work]]:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self._averages(parameter)
                    state["step"] += 1
                    count = state["step"].item()
                    if count not in steps:
                        steps[count] = torch.full((), count, device=self.device)
                    held = [parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad]
                    yield [local_part(each) for each in held], _updating(group, steps[count], scale)

        _streamed(blocks(), self.device, written=3)

    def _averages(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if state:
            return state
        local = local_part(parameter)
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            if self.device.type != "cuda" or not local.numel():
                state[name] = torch.zeros_like(parameter)
                continue
            buffer = HostBuffer(local.nbytes, self.device)  # fresh from the system: zeros
            self._buffers.append(buffer)
            average = buffer.bytes.view(local.dtype).view(local.shape)
            # with the spec of the parameter: DTensor.from_local would move it to the device of the mesh
            sharded = isinstance(parameter, DTensor)
            state[name] = DTensor(average, parameter._spec, requires_grad=False) if sharded else average  # pyright: ignore
        return state

    @torch.no_grad()
    def norm(self, grads: list[Tensor]) -> Tensor:
        """Of all gradients on all ranks together, on the device."""
        norms: list[Tensor] = []

        def add(block: list[Tensor]) -> None:
            norms.append(torch.linalg.vector_norm(block[0], dtype=torch.float64))

        _streamed((([local_part(grad)], add) for grad in grads), self.device, written=0)
        norms = norms or [torch.zeros((), dtype=torch.float64, device=self.device)]  # a rank may hold no rows of any
        return total_norm(norms, grads) if grads else torch.zeros((), device=self.device)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around the backward of a micro-batch: adds its gradients to those of the ones before."""
        before = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter in before:
            parameter.grad = None
        yield
        made = {parameter: parameter.grad for parameter in before if parameter.grad is not None}
        for parameter, grad in before.items():
            parameter.grad = grad
        with torch.no_grad():
            pairs = ([local_part(before[parameter]), local_part(grad)] for parameter, grad in made.items())
            _streamed(((pair, _add) for pair in pairs), self.device, written=1)


def total_norm(norms: list[Tensor], grads: list[Tensor]) -> Tensor:
    """norms: of parts of this rank's gradients, in float64. -> of all gradients on all ranks"""
    total = torch.linalg.vector_norm(torch.stack(norms)) ** 2
    if isinstance(grads[0], DTensor):  # as all of them are
        for axis, placement in enumerate(grads[0].placements):
            if placement.is_shard() and grads[0].device_mesh.size(axis) > 1:
                dist.all_reduce(total, group=grads[0].device_mesh.get_group(axis))
    return total.sqrt().to(grads[0].dtype)


def _add(block: list[Tensor]) -> None:
    block[0] += block[1]


def _updating(group: dict[str, Any], step: Tensor, scale: Tensor | None) -> Work:
    """What torch.optim.AdamW(fused=True) does with a parameter."""

    def work(block: list[Tensor]) -> None:
        parameter, average, squares, grad = block
        if scale is not None:
            grad *= scale
        torch._fused_adamw_(
            [parameter], [grad], [average], [squares], [], [step], amsgrad=False, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

    return work


def _streamed(items: Iterable[tuple[list[Tensor], Work]], device: torch.device, *, written: int) -> None:
    """Call each `work` with blocks of its tensors on the device. The first `written` of them go back to the host; they are there
    when this returns."""
    blocks = list(_cut(items))
    if not blocks:
        return
    width = max(flat.nbytes for block, _ in blocks for flat in block)
    room = torch.empty(SLOTS, len(blocks[0][0]), -(-width // 256) * 256, dtype=torch.uint8, device=device)
    come, go = (Lane(device, Meter()) for _ in range(2))
    gone: list[torch.cuda.Event | None] = [None] * SLOTS  # when what was in a slot is back on the host

    def bring(number: int) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """After the update before the last, which is all that this stream has been given; so its slot is free, once it is empty."""
        block, slot = blocks[number][0], number % SLOTS
        here = [room[slot, at, : flat.nbytes].view(flat.dtype) for at, flat in enumerate(block)]
        return here, come.copy(list(zip(here, block, strict=True)), after=[gone[slot]])

    following = bring(0)
    for number, (block, work) in enumerate(blocks):
        here, arrived = following
        if number + 1 < len(blocks):
            following = bring(number + 1)
        if arrived is not None:
            torch.cuda.current_stream(device).wait_event(arrived)
        work(here)
        gone[number % SLOTS] = go.copy(list(zip(block[:written], here[:written], strict=True)), after=[])
    if go.stream is not None:
        go.stream.synchronize()


def _cut(items: Iterable[tuple[list[Tensor], Work]]) -> Iterator[tuple[list[Tensor], Work]]:
    for tensors, work in items:
        flats = [tensor.view(-1) for tensor in tensors]
        for begin in range(0, flats[0].numel(), BLOCK):
            yield [flat[begin : begin + BLOCK] for flat in flats], work
