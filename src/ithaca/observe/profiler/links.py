"""How fast the ranks of this process group exchange bytes: the four collectives of a training step, one after the other.

Each moves `nbytes` out of every rank (its own part included), all ranks at once, a few times; a round takes as long as its slowest
rank, and the median round counts. What is told is bytes a second that a rank sends to others, as the planner counts them
(planner/links.py, planner/speed.py). Before that, what arrives is compared with what was sent: a fast wrong sum is no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from ...engine.mesh import all_gather

NBYTES = 256 << 20  # a stage of heads at a million tokens is about as large
ROUNDS, WARM = 10, 3
CHECKED = (4 << 10, 256 << 10, 4 << 20, 64 << 20)  # bytes: NCCL has another protocol for each


# torch 2.13 has a new name for it, and warns of the old one
_reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def check_collectives(device: str, sizes: tuple[int, ...] = CHECKED) -> None:
    """Collective. Small whole numbers are sent, whose sums float32 holds exactly; an error names what came out wrong."""
    world, rank, where = dist.get_world_size(), dist.get_rank(), _where(device)
    wrong = []
    for nbytes in sizes:
        part = max(1, nbytes // 4 // world)
        sent = [(torch.arange(part * world, device=where) * 7 + 13 * r).remainder(127).float() for r in range(world)]
        mine, total = sent[rank], torch.stack(sent).sum(0)
        own = slice(part * rank, part * (rank + 1))
        received, narrow, wide = torch.empty_like(mine), torch.empty_like(mine[:part]), mine.repeat(world)
        dist.all_to_all_single(received, mine)
        _reduce(narrow, mine)
        all_gather(wide, mine)
        summed = mine.clone()
        dist.all_reduce(summed)
        pairs = {
            "all-to-all": (received, torch.cat([tensor[own] for tensor in sent])),
            "reduce-scatter": (narrow, total[own]),
            "all-gather": (wide, torch.cat(sent)),
            "all-reduce": (summed, total),
        }
        wrong += [f"{name} of {mine.nbytes} bytes" for name, (came, due) in pairs.items() if not torch.equal(came, due)]
    found: list[list[str]] = [[]] * world
    dist.all_gather_object(found, wrong)
    if any(found):
        first = next(r for r in range(world) if found[r])
        raise RuntimeError(
            f"collectives between these ranks are wrong: on rank {first} {', '.join(found[first])}. Nothing that trains here could "
            "be right; unset NCCL_PROTO and NCCL_ALGO if you set them, try NCCL_PROTO=Simple, and look for a newer NCCL or driver"
        )


def measure_links(device: str, nbytes: int = NBYTES, rounds: int = ROUNDS) -> dict[str, float]:
    """Collective. The same on every rank."""
    check_collectives(device, tuple(size for size in CHECKED if size <= nbytes))
    world, rank, where = dist.get_world_size(), dist.get_rank(), _where(device)
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

    others = (world - 1) / world
    todo: dict[str, tuple[float, Callable[[], object]]] = {
        "all_to_all": (others * whole.nbytes, lambda: dist.all_to_all_single(received, whole)),
        "gather": (others * whole.nbytes, lambda: all_gather(received, narrow)),
        "reduce": (others * sums.nbytes, lambda: _reduce(reduced, sums)),
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


def _where(device: str) -> torch.device:
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
