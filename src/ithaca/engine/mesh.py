"""Who talks to whom: the process groups of a run, held as fields.

The world is laid out as replicate × shard × ring × ulysses, Ulysses innermost so that its all-to-alls stay inside a node.
A sequence is shared by the ring × ulysses ranks; a batch row by one (replicate, shard) pair. Parameters shard over
shard × ring × ulysses, all ranks of a replica, whatever part of a sequence they hold.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ..stack import Stack, require

# torch 2.13 has a new name for it, and warns of the old one
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Group:
    """One axis as seen from this rank. `pg` is None for an axis of size 1, where nothing is ever sent."""

    size: int
    rank: int
    pg: dist.ProcessGroup | None

    @property
    def fake(self) -> bool:
        """Rank 0 of N on torch's fake process group: the others are not there."""
        return self.pg is not None and dist.get_backend(self.pg) == "fake"

    @property
    def peerless(self) -> bool:
        """Nobody is there to talk to."""
        return self.pg is None or self.fake


@dataclass(frozen=True)
class Mesh:
    device: torch.device
    world: Group
    ulysses: Group
    ring: Group
    data: Group  # replicas and data-parallel shards together: who holds which batch rows
    parameters: DeviceMesh | None  # what FSDP2 shards (and replicates) over; None: parameters stay whole
    offload: bool = False  # shards, their gradients and optimizer states wait in host memory
    both: Group | None = None  # ring and ulysses together, where neither is the whole

    @property
    def sequence(self) -> Group:
        """All ranks that share a sequence, Ulysses innermost."""
        return self.both or (self.ulysses if self.ring.size == 1 else self.ring)

    @property
    def home(self) -> torch.device:
        """Where shards of parameters live."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def shards(self) -> int:
        """Into how many parts a parameter is cut."""
        return 1 if self.parameters is None else self.parameters.mesh.shape[-1]

    @property
    def ranks_here(self) -> int:
        """Of this host, which share its memory."""
        ranks, said = self.world.size, os.environ.get("LOCAL_WORLD_SIZE", "")
        cuda = self.device.type == "cuda"
        on_this_host = int(said) if said.isdecimal() and int(said) else torch.cuda.device_count() if cuda else ranks
        return min(ranks, on_this_host)


def local_part(value: Tensor) -> Tensor:
    """What this rank has of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole_tensor(value: Tensor) -> Tensor:
    """All of it, on every rank. Collective, without a gradient.

    On CPUs not by `full_tensor`: once in some 100,000 calls torch 2.13's functional all-gather ends a process of a gloo group
    ("double free or corruption"), where the plain one did 200,000 (docs/developer/log.md).
    """
    if not isinstance(value, DTensor):
        return value
    mesh, local = value.device_mesh, value.to_local().detach()
    cut = [at for at, place in enumerate(value.placements) if not place.is_replicate() and mesh.size(at) > 1]
    if local.device.type != "cpu" or [value.placements[at] for at in cut] != [Shard(0)]:
        return value.full_tensor()
    ranks = mesh.size(cut[0])
    rows = -(-value.shape[0] // ranks)  # the last ranks may have fewer, or none
    padded = local if local.shape[0] == rows else local.new_zeros(rows, *value.shape[1:])
    if padded is not local:
        padded[: local.shape[0]] = local
    out = local.new_empty(ranks * rows, *value.shape[1:])
    all_gather(out, padded.contiguous(), group=mesh.get_group(cut[0]))
    return out[: value.shape[0]]


def build_mesh(stack: Stack, device: torch.device, offload: bool = False) -> Mesh:
    """Lay the world out for `stack`. Without a process group the world is this one process."""
    if offload and not stack.shard_parameters:
        raise ValueError(
            "offload_parameters=True moves shards from the GPU to the host, but shard_parameters=False keeps parameters whole "
            "there; switch one off"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > 1 and not dist.is_initialized():
        raise ValueError(
            f"a launcher started {started} processes (WORLD_SIZE), but they do not know each other yet, so each would train "
            "by itself; call torch.distributed.init_process_group() before prepare"
        )
    require(stack.violations(world), "this stack cannot run")
    if world > 1 or stack.shard_parameters:
        _ensure_process_group(device)
    if not dist.is_initialized():
        alone = Group(1, 0, None)
        return Mesh(device, alone, alone, alone, alone, None)
    shard = world // (stack.replicate * stack.context_ranks)
    mesh = init_device_mesh(
        device.type,
        (stack.replicate, shard, stack.ring, stack.ulysses),
        mesh_dim_names=("replicate", "shard", "ring", "ulysses"),
    )
    data_rank = mesh.get_local_rank("replicate") * shard + mesh.get_local_rank("shard")
    data = Group(stack.replicate * shard, data_rank, None)
    return Mesh(
        device=device,
        world=Group(world, dist.get_rank(), dist.group.WORLD if world > 1 else None),
        ulysses=_axis(mesh, "ulysses"),
        ring=_axis(mesh, "ring"),
        data=data,
        parameters=_parameter_mesh(mesh, stack),
        offload=offload,
        both=_both(mesh, stack),
    )


def _axis(mesh: DeviceMesh, name: str) -> Group:
    size = mesh[name].size()
    return Group(size, mesh.get_local_rank(name), mesh.get_group(name) if size > 1 else None)


def _both(mesh: DeviceMesh, stack: Stack) -> Group | None:
    if stack.ring == 1 or stack.ulysses == 1:
        return None
    flat = mesh["ring", "ulysses"]._flatten("sequence")
    return Group(flat.size(), flat.get_local_rank(), flat.get_group())


def _parameter_mesh(mesh: DeviceMesh, stack: Stack) -> DeviceMesh | None:
    if not stack.shard_parameters:
        if mesh.size() == 1:
            return None
        # Whole parameters on every rank: a mesh of replicas with one shard each, so that FSDP2 only sums gradients.
        flat = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("copy", "whole"))
        return flat
    shards = mesh["shard", "ring", "ulysses"]._flatten("parameters")
    if stack.replicate == 1:
        return shards
    return init_device_mesh(
        mesh.device_type, (stack.replicate, shards.size()), mesh_dim_names=("copy", "parameters_of_copy")
    )


def _ensure_process_group(device: torch.device) -> None:
    """FSDP2 needs a process group even for one process; make a private one that opens no port."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _on_loopback():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """gloo listens even where there is nobody to talk to, and does so on the network that the host's name leads to."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
