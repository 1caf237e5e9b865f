"""Small functions that the tests start as ranks: called as `ithaca train` calls its own, function(config) -> exit code."""

from __future__ import annotations

import os
import signal
import sys

from ithaca.config import Config


def add_up(config: Config) -> int:
    """A sum over all ranks; rank 0 says it, with what the ranks know about themselves."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(mine)
    seen = [None] * dist.get_world_size()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    dist.all_gather_object(seen, [os.environ.get(name) for name in names])
    if dist.get_rank() == 0:
        print("sum", int(mine.item()), "seen", seen)
    return 0


def add_up_and_look(config: Config) -> int:
    """And where they listen."""
    from tests.security.listening import look

    return add_up(config) or look(config)


def fail_on_rank_1(config: Config) -> int:
    """Rank 1 raises; the others wait for it in a collective and notice that it has gone."""
    import torch.distributed as dist

    dist.barrier()  # all of them have started
    if dist.get_rank() == 1:
        raise KeyError("missing weight")
    dist.barrier()
    return 0


def die_on_rank_1(config: Config) -> int:
    import torch.distributed as dist

    dist.barrier()  # all are connected: one that is not yet would have gloo say so in a line of its own
    if dist.get_rank() == 1:
        print("step 41", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def say(line: str) -> None:
    """In one write: ranks share an output, and lines must not run into each other."""
    os.write(1, f"{line}\n".encode())


def prove(config: Config) -> int:
    """The stack of the config on all ranks against the untouched model on one; and which hosts share an axis."""
    import socket

    import psutil
    import torch
    import torch.distributed as dist

    from ithaca.engine.mesh import build_mesh
    from ithaca.verify.case import Case, run_case

    torch.set_num_threads(1)
    stack = config.stack.chosen
    assert stack is not None
    items = run_case(Case("llama3", stack, world=dist.get_world_size(), length=301), ("plain",))
    for item in items:
        say(f"{item.name}: {item.error:.2e} of {item.limit:.0e} {'ok' if item.ok else 'MISS'}")
    mesh = build_mesh(stack, torch.device("cpu"))
    hosts: list = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    for name, axis in (("ulysses", mesh.ulysses), ("ring", mesh.ring)):
        mine = [hosts[rank] for rank in dist.get_process_group_ranks(axis.pg)]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            say(f"{name} {everyone}")
    cable = psutil.net_io_counters(pernic=True).get("cable")
    if cable and os.environ["LOCAL_RANK"] == "0":
        os.write(1, f"sent over the cable: {cable.bytes_sent}\n".encode())  # in one piece: two hosts share a pipe
    return 0 if all(item.ok for item in items) else 6


def alone(config: Config) -> int:
    """One process, no process group: does the stack run?"""
    import torch.distributed as dist

    from ithaca.verify.case import Case, run_case

    assert not dist.is_initialized() and "RANK" not in os.environ
    stack = config.stack.chosen
    assert stack is not None
    items = run_case(Case("llama3", stack, world=1, length=101), ("plain",))
    return 0 if all(item.ok for item in items) else 6


def add_up_on_gpu(config: Config) -> int:
    """NCCL for GPU tensors, gloo for CPU tensors, in one group."""
    import torch
    import torch.distributed as dist

    near = torch.tensor([dist.get_rank() + 1.0], device="cuda")
    far = torch.tensor([dist.get_rank() + 1.0])
    for each in (near, far):
        dist.all_reduce(each)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{near.device} sum {int(near.item())}, cpu sum {int(far.item())}")
    return 0
