"""Whether a kernel does its job here: it is run once on a few tokens, and its output and gradients are compared.

Whether a build and a GPU support a case, only a call tells. And a kernel may run and be wrong: FlashAttention-4 4.0.0b36 returns
gradients on Hopper that are off by 40 to 100% where its two halves round the head size up differently (8, 16, 40, 48, 72, 80),
and raises nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernel import Calls

TOKENS, WINDOW = 200, 40  # no multiple of any kernel's tile
LIMIT = 0.05  # relative; rounding in bf16 is a tenth of it


def probe(kernel: Any, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> str | None:
    """Why `kernel` cannot be used, None if it can. Asked once."""
    key = (device, dtype, head_dim, windowed)
    if key not in kernel.probed:
        try:
            kernel.probed[key] = _wrong(kernel, device, dtype, head_dim, WINDOW if windowed else None)
        except Exception as error:  # whatever an optional package or a driver raises is the reason, not our failure
            why = (str(error).strip().splitlines() or [""])[0][:160]
            kernel.probed[key] = f"does not run on this GPU ({type(error).__name__}: {why})"
        kernel.calls = Calls()
    return kernel.probed[key]


def _wrong(kernel: Any, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    generator = torch.Generator().manual_seed(0)  # a run's random numbers are its own
    q, k, v, dout = (
        torch.randn(1, heads, TOKENS, head_dim, generator=generator).to(device, dtype) for heads in (2, 1, 1, 2)
    )
    how = {"causal": True, "scale": head_dim**-0.5, "window": window}
    out, lse = kernel.forward(q, k, v, **how)
    ours = out, *kernel.backward(dout, q, k, v, out, lse, **how)
    for name, mine, right in zip(("outputs", *["gradients"] * 3), ours, _plain(q, k, v, dout, **how), strict=True):
        off = float((mine.float() - right).norm() / right.norm())
        if not off < LIMIT:  # also where it is not a number
            return f"computes wrong {name} for head_dim={head_dim} on this GPU (off by {off:.0%})"
    return None


def _plain(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    """Output and gradients by the formula, in float32: the whole matrix of scores."""
    assert causal
    with torch.enable_grad():
        leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
        ages = torch.arange(TOKENS, device=q.device)[:, None] - torch.arange(TOKENS, device=q.device)
        hidden = ages < 0 if window is None else (ages < 0) | (ages > window)
        scores = (leaves[0] @ leaves[1].transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ leaves[2]
        return out.detach(), *torch.autograd.grad(out, leaves, dout.float())
