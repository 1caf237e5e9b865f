"""Attention as the formula says, on any device and in float32, so that real ranks can be held to the float32 limits."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from ithaca.engine.attention.backends import BACKENDS, Cpu
from ithaca.verify.case import Case, run_case
from ithaca.verify.reference import Item


class Formula(Cpu):
    """Stands in for "cpu": whole score matrices, for the lengths of tests."""

    def problem(self, device, dtype, head_dim, windowed):
        return None

    def forward(self, q, k, v, *, causal, scale, window):
        self.calls.forward += 1
        scores, value = self._scores(q, k, causal, scale, window), v.repeat_interleave(q.shape[1] // k.shape[1], 1)
        lse = scores.logsumexp(-1)
        return torch.nan_to_num((scores - lse[..., None]).exp()) @ value, lse.float()

    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window):
        self.calls.backward += 1
        group = q.shape[1] // k.shape[1]
        key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.nan_to_num((self._scores(q, k, causal, scale, window) - lse[..., None]).exp())
        inner = (dout * out).sum(-1, keepdim=True)
        dscores = weights * (dout @ value.mT - inner) * scale
        dk, dv = dscores.mT @ q, weights.mT @ dout
        return dscores @ key, *(grad.unflatten(1, (-1, group)).sum(2) for grad in (dk, dv))

    @staticmethod
    def _scores(q, k, causal, scale, window):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        rows, columns = (torch.arange(size, device=q.device) for size in scores.shape[-2:])
        behind = rows[:, None] + (len(columns) - len(rows)) - columns  # how far a key lies behind its query
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        if causal:
            hidden |= behind < 0
        if window is not None:
            hidden |= behind > window
        return scores.masked_fill(hidden, -torch.inf)


def run_exactly(case: Case, checks: tuple[str, ...]) -> list[Item]:
    """`run_case` in float32 by the formula."""
    case = replace(case, dtype="float32", stack=replace(case.stack, attention="cpu"))
    with mock.patch.dict(BACKENDS, cpu=Formula):
        return run_case(case, checks)
