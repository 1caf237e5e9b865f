"""A policy step: completions were sampled elsewhere and rewarded; make those better than their group more likely.

    advantage   (reward - mean of its group) / (std + 1e-4)       std: of the group, of the batch, or left out
    ratio       π(token) / π_old(token)                           π_old: who sampled, or π before this step
    a token     -min(ratio · A, clip(ratio, 1 - low, 1 + high) · A) + kl · ratio · (π_ref/π - log π_ref/π - 1)

How tokens are put together is the only difference between the losses, so it is a weight for each completion's tokens, and the loss
of a step is the plain sum of weighted token losses over all micro-batches and ranks:

    grpo      mean over completions of the mean over tokens       1 / (tokens of the completion · completions of the step)
    bnpo      mean over tokens of a micro-batch                   1 / (tokens of the micro-batch · micro-batches of the step)
    dr_grpo   by a constant, so that length is no bias            1 / (longest · completions of the step)
    dapo      mean over tokens of the step                        1 / tokens of the step

Papers: Schulman 2017 (clip), Shao 2024 (GRPO), Liu 2025 (Dr. GRPO), Yu 2025 (DAPO, low and high clip apart), DeepSeek-V3.2 2025
(the ratio before the divergence, without which its gradient is not that of the divergence). Names and constants are those of TRL.
No collectives here: functions of tensors, token by token, whoever holds the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...stack import require

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
SCALES = ("group", "batch", "none")
_EPSILON = 1e-4  # beside a standard deviation, as TRL has it


@dataclass(frozen=True)
class Policy:
    loss: str = "grpo"
    clip_low: float = 0.2  # a ratio below 1 - this has no more to win
    clip_high: float = 0.2  # nor one above 1 + this
    kl: float = 0.0  # weight of the divergence from the reference
    unbiased_kl: bool = True  # the divergence times the ratio
    normalise: str = "group"  # whose standard deviation divides the advantages
    longest: int | None = None  # tokens that a completion may have: dr_grpo divides by it
    temperature: float = 1.0  # that completions were sampled with, for `Run.logprobs`

    def violations(self) -> list[str]:
        problems = []
        for name, known in (("loss", LOSSES), ("normalise", SCALES)):
            if getattr(self, name) not in known:
                problems.append(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")
        if not 0.0 <= self.clip_low <= 1.0:
            problems.append(
                f"clip_low={self.clip_low} must be between 0 and 1: a ratio below 1 - clip_low is clipped; 0.2 is usual"
            )
        for name in ("clip_high", "kl"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name}={getattr(self, name)} must be finite and not negative")
        if not 0.0 < self.temperature < float("inf"):
            problems.append(
                f"temperature={self.temperature} must be a finite number above 0: the one completions were sampled with"
            )
        if self.longest is not None and self.longest < 1:
            problems.append(f"longest={self.longest} must be at least 1: the most tokens that a completion may have")
        if self.loss == "dr_grpo" and self.longest is None:
            problems.append(
                "loss='dr_grpo' divides by longest, which is not set: the most tokens a completion may have"
            )
        return problems


def advantages(rewards: Tensor, groups: Tensor, settings: Policy) -> Tensor:
    """Of completions, [n]. groups: whole numbers, the same for completions of one prompt.

    Where all rewards of a group are equal, or it has one completion, they are 0. A completion whose reward is NaN was not scored:
    it counts for no mean and its advantage is 0."""
    require(settings.violations(), "these advantages cannot be computed")
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, groups {tuple(groups.shape)}; pass one of each for every completion"
        )
    scored = ~rewards.isnan()
    values = rewards.double()  # in which the mean of equal rewards is exactly that reward
    _, group = groups.unique(return_inverse=True)
    centred = torch.where(scored, values - _mean(values, scored, group), 0.0)
    if settings.normalise == "group":
        centred = centred / (_std(centred, scored, group) + _EPSILON)
    elif settings.normalise == "batch":
        everyone = torch.zeros_like(group)
        spread = torch.where(scored, values - _mean(values, scored, everyone), 0.0)
        centred = centred / (_std(spread, scored, everyone) + _EPSILON)
    return centred.to(rewards.dtype)


def _mean(values: Tensor, scored: Tensor, group: Tensor) -> Tensor:
    return _sums(torch.where(scored, values, 0.0), group) / _sums(scored.double(), group).clamp(min=1)


def _std(centred: Tensor, scored: Tensor, group: Tensor) -> Tensor:
    """Unbiased; 0 of one."""
    return (_sums(centred.square(), group) / (_sums(scored.double(), group) - 1).clamp(min=1)).sqrt()


def _sums(values: Tensor, group: Tensor) -> Tensor:
    """Over each completion's group, for every completion."""
    return values.new_zeros(len(values)).index_add(0, group, values)[group]


def token_losses(
    logprobs: Tensor, old: Tensor | None, reference: Tensor | None, advantage: Tensor, settings: Policy
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each token costs, and numbers of each token, without gradients: `ratio`, `clipped` (and `clipped_low`, `clipped_high` of
    it), and `kl` where there is a reference. Shapes are those of logprobs; advantage may be one that broadcasts.

    old: log-probabilities of who sampled; None = the policy as it is, in the first step on its own completions. What is computed
    for a token without a label means nothing: its weight is 0."""
    require(settings.violations(), "this policy step cannot be computed")
    if settings.kl and reference is None:
        raise ValueError(
            f"kl={settings.kl} asks for the divergence from a reference, but there are no log-probabilities of one; pass "
            "reference, or kl=0.0"
        )
    ratio = torch.exp(logprobs - (logprobs.detach() if old is None else old))
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    seen = ratio.detach()
    clipped_low, clipped_high = (seen < low) & (advantage < 0), (seen > high) & (advantage > 0)
    numbers = {
        "ratio": seen,
        "clipped": (clipped_low | clipped_high).to(seen.dtype),
        "clipped_low": clipped_low.to(seen.dtype),
        "clipped_high": clipped_high.to(seen.dtype),
    }
    if reference is not None:
        further = reference - logprobs
        divergence = further.exp() - further - 1  # never negative (Schulman's k3)
        divergence = divergence * ratio if settings.unbiased_kl else divergence
        numbers["kl"] = divergence.detach()
        if settings.kl:
            losses = losses + settings.kl * divergence
    return losses, numbers


def weights_of_tokens(
    lengths: Tensor, settings: Policy, *, completions: int, tokens: int, micro_batches: int = 1
) -> Tensor:
    """What the token losses of each completion of a micro-batch are multiplied by, [completions of the micro-batch].

    lengths: supervised tokens of the completions of this micro-batch, on all ranks. completions, tokens, micro_batches: of the
    whole step."""
    require(settings.violations(), "this policy step cannot be computed")
    counts = {"completions": completions, "tokens": tokens, "micro_batches": micro_batches}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1: it is counted over all micro-batches of the step")
    lengths = lengths.to(torch.get_default_dtype())
    if settings.loss == "grpo":
        return 1 / (lengths.clamp(min=1) * completions)
    if settings.loss == "bnpo":
        divisor = lengths.sum().clamp(min=1) * micro_batches
    elif settings.loss == "dr_grpo":
        divisor = lengths.new_tensor((settings.longest or 1) * completions)
    else:
        divisor = lengths.new_tensor(tokens)
    return (1 / divisor).expand_as(lengths)
