"""Whether a kernel does its job here: it is run on a few tokens, and its output and gradients are compared with the formula.

Whether a build and a GPU support a case, only a call tells. And a kernel may run and be wrong: FlashAttention-4 4.0.0b36 returns
gradients on Hopper that are off by 40 to 100% where its two halves round the head size up differently (8, 16, 40, 48, 72, 80),
and raises nothing.

`probe` is asked when kernels are chosen: one that fails is passed over. `check` is for a backend that compiles a kernel for each
kind of mask and each number of heads that share a KV head: each is compared when it is first used, and a wrong one ends the run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .kernel import Calls

TOKENS, WINDOW = 200, 40  # no multiple of any kernel's tile
DOCUMENTS = (0, 70, 71, TOKENS)  # where they begin and end, if packed
CAP = 1.0  # of scores that vary by as much
LIMIT = 0.05  # relative; rounding in bf16 is a tenth of it


class WrongKernel(RuntimeError):
    """`what` is wrong."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what


def probe(
    kernel: Any, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, *,
    softcapped: bool = False, value_dim: int | None = None,
) -> str | None:  # fmt: skip
    """Why `kernel` cannot be used, None if it can. Asked once."""
    key = (device, dtype, head_dim, windowed, softcapped, value_dim or head_dim)
    if key not in kernel.probed:
        how = {"window": WINDOW if windowed else None, "softcap": CAP if softcapped else None, "value_dim": value_dim}
        try:
            kernel.probed[key] = _wrong(kernel, device, dtype, head_dim, **how)
        except WrongKernel as error:  # it checks its own calls
            kernel.probed[key] = error.what
        except Exception as error:  # whatever an optional package or a driver raises is the reason, not our failure
            why = (str(error).strip().splitlines() or [""])[0][:160]
            kernel.probed[key] = f"does not run on this GPU ({type(error).__name__}: {why})"
    return kernel.probed[key]


def check(kernel: Any, q: Tensor, k: Tensor, *, backward: bool, **mask: Any) -> None:
    """Before a call with q and k. mask: causal and window of the call, packed or not. Asked once of each kind."""
    group, window = q.shape[1] // k.shape[1], mask["window"] is not None
    tokens_first = q.stride(1) < q.stride(2)
    key = (q.device, q.dtype, q.shape[3], group, window, mask["causal"], mask["packed"], backward, tokens_first)
    if key in kernel.checked:
        return
    kernel.checked.add(key)  # it is called in here, too
    how = {**mask, "window": WINDOW if window else None, "group": group, "backward": backward}
    how["tokens_first"] = tokens_first
    wrong = _wrong(kernel, q.device, q.dtype, q.shape[3], **how)
    if wrong:
        kind = f"{'causal' if mask['causal'] else 'full'}{', packed' * mask['packed']}{', with a window' * window}"
        text = f"attention kernel {kernel.name} {wrong}: {kind}, {group} query heads to a KV head"
        raise WrongKernel(f"{text}; remedy: another kernel, stack.attention: cudnn (has no windows) or flash", wrong)


def _wrong(
    kernel: Any, device: torch.device, dtype: torch.dtype, head_dim: int, *, window: int | None, group: int = 2,
    causal: bool = True, packed: bool = False, backward: bool = True, softcap: float | None = None, value_dim: int | None = None,
    tokens_first: bool = False,
) -> str | None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)  # a run's random numbers are its own
    value_dim = value_dim or head_dim
    shapes = ((group, head_dim), (1, head_dim), (1, value_dim), (group, value_dim))
    q, k, v, dout = (
        torch.randn(1, heads, TOKENS, size, generator=generator).to(device, dtype) for heads, size in shapes
    )
    if tokens_first:  # in memory
        q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout))
    how: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    forward, back = kernel.forward, kernel.backward
    if packed:
        forward, back = kernel.forward_packed, kernel.backward_packed
        longest = max(end - begin for begin, end in pairwise(DOCUMENTS))
        how |= {"bounds": torch.tensor(DOCUMENTS, dtype=torch.int32, device=device), "longest": longest}
    else:
        how["causal"] = causal
    counted, kernel.calls = kernel.calls, Calls()
    try:
        with torch.no_grad():
            out, lse = forward(q, k, v, **how)
            ours = [out, *back(dout, q, k, v, out, lse, **how)] if backward else [out]
    finally:
        kernel.calls = counted
    right = _plain(q, k, v, dout, _hidden(causal, window, packed, device), how["scale"], softcap)
    for name, actual, expected in zip(("outputs", *["gradients"] * 3), ours, right, strict=False):
        off = float((actual.float() - expected).norm() / expected.norm())
        if not off < LIMIT:  # also where it is not a number
            what = f"head_dim={head_dim}" + f", value_dim={value_dim}" * (value_dim != head_dim)
            what += " with a soft cap" * (softcap is not None)
            return f"computes wrong {name} for {what} on this GPU (off by {off:.0%})"
    return None


def _hidden(causal: bool, window: int | None, packed: bool, device: torch.device) -> Tensor:
    """[query, key]: which keys a query does not see."""
    token = torch.arange(TOKENS, device=device)
    age = token[:, None] - token
    hidden = torch.zeros_like(age, dtype=torch.bool)
    if causal:
        hidden |= age < 0
    if window is not None:
        hidden |= age > window
    if packed:
        document = torch.bucketize(token, torch.tensor(DOCUMENTS[1:], device=device), right=True)
        hidden |= document[:, None] != document
    return hidden


def _plain(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, ...]:
    """Output and gradients by the formula, in float32: the whole matrix of scores. k and v have one head."""
    q, k, v, dout = (t.float() for t in (q, k, v, dout))
    scores, slope = q @ k.mT * scale, 1.0
    if softcap is not None:
        bent = (scores / softcap).tanh()
        scores, slope = softcap * bent, 1.0 - bent**2
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = weights @ v
    dscores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * slope * scale
    dk, dv = (t.sum(1, keepdim=True) for t in (dscores.mT @ q, weights.mT @ dout))
    return out, dscores @ k, dk, dv
