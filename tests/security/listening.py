"""Run as ranks: where does this process listen?"""

from __future__ import annotations

import sys

from ithaca.config import Config


def addresses() -> list[str]:
    import psutil

    found = psutil.Process().net_connections("inet")
    return sorted({each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN})


def look(config: Config) -> int:
    """After what a run does: the default group, a group for an asynchronous save, a collective on it."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, addresses())
    if dist.get_rank() == 0:
        print("listening", everyone)
    return 0


def alone() -> None:
    """One process, on a host whose name leads into a network: as torch does it, and as we do."""
    import torch
    import torch.distributed as dist

    from ithaca.engine.mesh import _ensure_process_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("torch", addresses())
    dist.destroy_process_group()
    _ensure_process_group(torch.device("cpu"))
    print("ithaca", addresses())


if __name__ == "__main__":
    sys.exit(alone())
