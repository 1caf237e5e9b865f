"""How fast the ranks of this process group exchange bytes: the four collectives of a training step, one after the other.

Each moves `nbytes` out of every rank (its own part included), all ranks at once, a few times; a round takes as long as its slowest
rank, and the median round counts. What is told is bytes a second that a rank sends to others, as the planner counts them
(planner/links.py, planner/speed.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

NBYTES = 256 << 20  # a stage of heads at a million tokens is about as large
ROUNDS, WARM = 10, 3


def measure_links(device: str, nbytes: int = NBYTES, rounds: int = ROUNDS) -> dict[str, float]:
    """Collective. The same on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    part = nbytes // world
    whole, received = (torch.zeros(part * world, dtype=torch.uint8, device=where) for _ in range(2))
    narrow = torch.zeros(part, dtype=torch.uint8, device=where)
    sums = torch.zeros(part // 4 * world, device=where)
    reduced = torch.zeros(part // 4, device=where)
    after, before = (rank + 1) % world, (rank - 1) % world

    def ring() -> None:
        send, receive = (
            dist.P2POp(way, tensor, peer)
            for way, tensor, peer in ((dist.isend, whole, after), (dist.irecv, received, before))
        )
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    # torch 2.13 has new names for them, and warns of the old ones
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    others = (world - 1) / world
    todo: dict[str, tuple[float, Callable[[], object]]] = {
        "all_to_all": (others * whole.nbytes, lambda: dist.all_to_all_single(received, whole)),
        "gather": (others * whole.nbytes, lambda: gather(received, narrow)),
        "reduce": (others * sums.nbytes, lambda: reduce(reduced, sums)),
        "ring": (whole.nbytes, ring),
    }
    return {name: sent / _seconds(call, where, rounds) for name, (sent, call) in todo.items()}


def _seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    taken = []
    for number in range(WARM + rounds):
        dist.barrier()
        _finish(device)
        begin = time.perf_counter()
        call()
        _finish(device)
        if number >= WARM:
            taken.append(time.perf_counter() - begin)
    slowest = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return median(slowest.tolist())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
