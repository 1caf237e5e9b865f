"""Log-probabilities of labels by tiles, differentiable with any gradient from above: what preferences and policy steps are made of.

    logprob = z[label] - lse        entropy = lse - m        z = logits / temperature, lse = logsumexp(z), m = Σ p z
    dz = dlogprob · (onehot - p) - dentropy · p · (z - m)

The gradient from above is not known in forward, so backward computes a tile of logits again; lse and m of a token are kept, and
logits of one tile are all there ever are. Tokens without a label never meet the head: a long prompt costs nothing here. A rank that
has no label at all still has gradients, which are 0, because FSDP2 reduces them on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.holding import module_holds
from ..tiling import Gradients, differentiate, tiles
from .cross_entropy import LossKernel, LossTerms, cap

module_holds(__name__, "loss")


@dataclass(frozen=True)
class Scored:
    """Of the tokens of a rank, [B, s] each, in fp32 at least; 0 and False where there is no label."""

    logprobs: Tensor
    entropy: Tensor
    hits: Tensor  # the label is the likeliest token


@dataclass(frozen=True)
class Question:
    """What is asked of the head, and how."""

    head: Callable[[Tensor], Tensor]  # [1, t, d] -> [1, t, V]
    asked: Tensor  # places of the tokens with a label, in [B · s]
    labels: Tensor  # their labels
    tile: int | None
    temperature: float
    logit_cap: float | None
    kernel: LossKernel
    again: Callable[[], AbstractContextManager[None]]  # around the head, when backward computes it again

    def fuses(self, x: Tensor) -> bool:
        return self.kernel.fuses(x.device, x.dtype, LossTerms(logit_cap=self.logit_cap))

    def parts(self) -> Iterator[slice]:
        return iter(tiles(len(self.asked), self.tile) if len(self.asked) else [])


def tiled_log_probs(x: Tensor, question: Question, parameters: list[Tensor]) -> Scored:
    """x [B, s, d]."""
    logprobs, entropy, hits = _LogProbs.apply(x, question, *parameters)  # pyright: ignore[reportGeneralTypeIssues]
    return Scored(logprobs, entropy, hits)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, question: Question, *parameters: Tensor):
        wide = torch.promote_types(x.dtype, torch.float32)
        # of the tokens that are asked for: z of the label, lse, m, and whether the label is the likeliest
        found = torch.empty(4, len(question.asked), dtype=wide, device=x.device)
        flat = x.flatten(0, 1)
        for part in question.parts():
            logits = cap(question.head(flat[question.asked[part]][None])[0], question.logit_cap)
            _numbers(logits, question.labels[part], question, found[:, part], question.fuses(x))
            del logits
        chosen, lse, mean, hits = found
        ctx.question, ctx.parameters = question, parameters
        ctx.save_for_backward(x, lse, mean)
        logprobs, entropy = (_spread(value, x, question) for value in (chosen - lse, lse - mean))
        hits = _spread(hits, x, question).bool()
        ctx.mark_non_differentiable(hits)
        return logprobs, entropy, hits

    @staticmethod
    def backward(ctx, dlogprobs: Tensor, dentropy: Tensor, _: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        question: Question = ctx.question
        x, lse, mean = ctx.saved_tensors
        flat, dx, sums = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1), Gradients()
        above = [grad.flatten()[question.asked] / question.temperature for grad in (dlogprobs, dentropy)]
        for part in question.parts():
            places = question.asked[part]
            with torch.enable_grad(), question.again():
                leaf = flat[places][None].detach().requires_grad_()
                logits = cap(question.head(leaf), question.logit_cap)
            slopes = [value[part] for value in (lse, mean, *above)]
            grad = _gradient(logits.detach()[0], question.labels[part], question, slopes, question.fuses(x))
            derivatives = differentiate([logits], [grad[None]], [leaf, *ctx.parameters])
            del logits, grad
            dx[places] = derivatives[0][0]  # pyright: ignore[reportOptionalSubscript]
            sums.add(ctx.parameters, derivatives[1:])
            del derivatives  # or the head's gradient of this tile would live on beside the next one's
        grads = [sums.take(p) for p in ctx.parameters]
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(ctx.parameters, grads, strict=True)]
        return dx.view_as(x) if ctx.needs_input_grad[0] else None, None, *grads


def _spread(values: Tensor, x: Tensor, question: Question) -> Tensor:
    """Values of the tokens that were asked for -> [B, s]."""
    whole = torch.zeros(x.shape[:2], dtype=values.dtype, device=x.device)
    whole.view(-1)[question.asked] = values
    return whole


def _numbers(logits: Tensor, labels: Tensor, question: Question, out: Tensor, fused: bool) -> None:
    """out [4, t]"""
    if fused:
        question.kernel.numbers(logits, labels, question.temperature, out)
        return
    z = logits.to(out.dtype) / question.temperature
    out[0] = z.gather(1, labels[:, None])[:, 0]
    out[1] = z.logsumexp(-1)
    out[2] = (z * (z - out[1][:, None]).exp()).sum(-1)
    out[3] = z.argmax(-1) == labels


def _gradient(logits: Tensor, labels: Tensor, question: Question, slopes: list[Tensor], fused: bool) -> Tensor:
    """slopes: lse, m, and what comes from above for logprob and entropy, over the temperature; [t] each"""
    if fused:
        question.kernel.gradient_in_place(logits, labels, question.temperature, slopes)
        return logits
    lse, mean, dlogprob, dentropy = (value[:, None] for value in slopes)
    z = logits.to(lse.dtype) / question.temperature
    grad = (z - lse).exp_().mul_(-(dlogprob + dentropy * (z - mean)))
    grad.scatter_add_(1, labels[:, None], dlogprob)
    return grad.to(logits.dtype)
