"""Ring attention: KV blocks travel while the queries stay.

Rank r attends its queries to its own KV, then to those of r-1, r-2, ...: at each step it passes the block it has just used to
r+1 and takes the next from r-1, while the kernel works. Partial results merge by log-sum-exp in fp32. In backward the blocks
make the same round, and with each block travels the fp32 sum of its gradients, which is home after the last hop.

`plans[i]` is the segment plan for the block that started i ranks behind (zigzag chunks make the steps weigh the same).
Memory: one KV block in use and one on its way; in backward also two fp32 gradient blocks.
Liu et al., "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

from torch import Tensor

from ...base.holding import module_holds
from ..comm import shift
from ..mesh import Group
from .kernel import Kernel
from .segments import Plan, Running, attend, attend_backward, attend_backward_into, attend_into, wide_zeros

module_holds(__name__, "attention")


def ring_attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, plans: list[Plan], scale: float, ring: Group, *,
    softcap: float | None = None,
):  # fmt: skip
    if ring.size == 1:
        return attend(kernel, q, k, v, plans[0], scale, softcap=softcap)
    running = Running(q, v.shape[3])
    for step, plan in enumerate(plans):
        last = step == ring.size - 1
        coming = None if last else shift((k.contiguous(), v.contiguous()), ring)
        attend_into(running, kernel, q, k, v, plan, scale, softcap=softcap)
        if coming is not None:
            k, v = coming.wait()
    return running.out.to(q.dtype), running.lse


def ring_attend_backward(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    plans: list[Plan], scale: float, ring: Group, *, softcap: float | None = None,
):  # fmt: skip
    if ring.size == 1:
        return attend_backward(kernel, dout, q, k, v, out, lse, plans[0], scale, softcap=softcap)
    dq, travelling = wide_zeros(q), None
    dtype = q.dtype
    for step, plan in enumerate(plans):
        last = step == ring.size - 1
        coming = None if last else shift((k.contiguous(), v.contiguous()), ring)
        grads = wide_zeros(k), wide_zeros(v)
        attend_backward_into((dq, *grads), kernel, dout, q, k, v, out, lse, plan, scale, softcap=softcap)
        if travelling is not None:  # the sum so far of the block now here, from the ranks that had it before
            for grad, before in zip(grads, travelling.wait(), strict=True):
                grad += before
        travelling = shift(grads, ring)
        if coming is not None:
            k, v = coming.wait()
    assert travelling is not None
    dk, dv = travelling.wait()
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
