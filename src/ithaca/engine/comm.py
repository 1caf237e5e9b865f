"""The collectives of context parallelism, with explicit groups and explicit waiting.

Nothing here knows of autograd: every exchange is called by a backward that knows its own transpose. A pending exchange keeps
the tensors it reads alive until `wait`, which on CUDA makes the current stream wait and does not block the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.holding import module_holds
from .mesh import Group

module_holds(__name__, "exchange")


class Pending:
    """Results that may still be on their way."""

    def __init__(self, results: tuple[Tensor, ...], works: Sequence = (), reads: tuple = ()) -> None:
        self.results, self.works, self.reads = results, works, reads

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        self.works, self.reads = (), ()
        return self.results


def all_to_all(out: Tensor, send: Tensor, counts_out: list[int], counts_in: list[int], group: Group) -> Pending:
    """Exchange slices along dim 0: `counts_in[r]` of them go to rank r, `counts_out[r]` come from it. Asynchronous."""
    assert group.pg is not None and out.is_contiguous() and send.is_contiguous()
    assert sum(counts_in) == send.shape[0] and sum(counts_out) == out.shape[0] and out.shape[1:] == send.shape[1:]
    if group.fake:
        return _sent_back((out,), (send,))
    size = prod(send.shape[1:])  # flat element counts: a slice of several dims is one run of memory
    work = dist.all_to_all_single(
        out.view(-1), send.view(-1), [c * size for c in counts_out], [c * size for c in counts_in],
        group=group.pg, async_op=True,
    )  # fmt: skip
    return Pending((out,), [work], (send,))


def shift(tensors: tuple[Tensor, ...], ring: Group) -> Pending:
    """Pass tensors to the next rank of the ring and take those of the rank before. Asynchronous."""
    assert ring.pg is not None
    coming = tuple(torch.empty_like(t) for t in tensors)
    if ring.fake:
        return _sent_back(coming, tensors)
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    operations = [dist.P2POp(dist.isend, t, group=ring.pg, group_peer=after) for t in tensors]
    operations += [dist.P2POp(dist.irecv, t, group=ring.pg, group_peer=before) for t in coming]
    return Pending(coming, dist.batch_isend_irecv(operations), tensors)


def _sent_back(coming: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> Pending:
    """Rank 0 of N without its peers gets its own data. Memory as it is found would do for counting bytes, but a GPU is as fast as
    its power allows, and numbers like those of a real run take more of it than zeros and leftovers do."""
    for out, send in zip(coming, sent, strict=True):
        # where heads do not divide, a rank sends and gets different numbers of them
        common = min(out.shape[0], send.shape[0])
        out[:common].copy_(send[:common])
        out[common:].zero_()
    return Pending(coming, (), sent)


def total(value: Tensor, group: Group) -> Tensor:
    """Sum over the ranks of a group; every rank gets it."""
    if group.pg is None:
        return value
    value = value.clone()
    dist.all_reduce(value, group=group.pg)
    return value
