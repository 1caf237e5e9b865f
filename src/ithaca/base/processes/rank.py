"""What runs inside one process of the pool (pool.py): a loop that carries out commands and answers.

Between commands the rank keeps its process group, drops those that a run left behind, and empties DTensor's caches of meshes.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

NEVER = timedelta(days=365)  # the parent keeps the time
LOOPBACK = "127.0.0.1"


@dataclass
class Failure:
    kind: str
    message: str
    traceback: str
    moment: float

    @property
    def headline(self) -> str:
        return f"raised {self.kind}: {self.message}" if self.message else f"raised {self.kind}"


@dataclass
class Answer:
    value: Any = None
    failure: Failure | None = None
    group_intact: bool = True


@dataclass
class Home:
    """What a rank keeps between commands."""

    rank: int
    device: str = "cpu"
    port: int = 0  # of the parent's store
    store: dist.Store | None = None
    group: dist.ProcessGroup | None = None

    @property
    def group_intact(self) -> bool:
        return (dist.group.WORLD if dist.is_initialized() else None) is self.group

    @property
    def extra_groups(self) -> list[dist.ProcessGroup]:
        return [group for group in dist.distributed_c10d._world.pg_map if group is not self.group]


def work(pipe: Connection, rank: int) -> None:
    home = Home(rank)
    while True:
        message = pipe.recv_bytes()
        try:
            command, args = pickle.loads(message)
            answer = pickle.dumps(Answer(command(home, *args), None, home.group_intact))
        except BaseException as error:  # SystemExit too: only the parent ends a rank
            answer = pickle.dumps(Answer(failure=_failure(error)))
        pipe.send_bytes(answer)
        del message, answer
        if home.extra_groups:
            _forget_meshes()
        gc.collect()  # a model is full of cycles; the next run should not find the memory of the last one


def _failure(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    return Failure(type(error).__name__, str(error), "".join(lines).rstrip(), time.monotonic())


def settle(home: Home, device: str, gpus: int, threads: int, port: int) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(home.rank % gpus)
    home.device, home.port = device, port
    home.store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=NEVER)
    gc.freeze()  # what was preloaded is never garbage: collections after a run look at the rest only


def join(home: Home, generation: int, world: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    home.group = None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if home.rank >= world:
        return
    assert home.store is not None
    os.environ.update(RANK=str(home.rank), LOCAL_RANK=str(home.rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(home.port))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if home.device == "cuda" else "gloo",
        store=dist.PrefixStore(f"generation{generation}", home.store),
        rank=home.rank,
        world_size=world,
        timeout=NEVER,
    )
    home.group = dist.group.WORLD


def call(home: Home, path: list[str], task: bytes) -> Any:
    _drop_extra_groups(home)  # now, not at the end of the last run: there a peer might still have been busy
    sys.path[:] = path  # a test runner adds folders as it goes
    torch.manual_seed(0)
    fn, args, kwargs = pickle.loads(task)
    return fn(*args, **kwargs)


def _drop_extra_groups(home: Home) -> None:
    for group in home.extra_groups:
        dist.destroy_process_group(group)


def _forget_meshes() -> None:
    """Empty DTensor's caches. They take an equal mesh for the same mesh, whose groups may be gone by now."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    debug._clear_sharding_prop_cache()
    # These know meshes by size only: a stale one does no harm there, but keeps the threads and sockets of its groups.
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
