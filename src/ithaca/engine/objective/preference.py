"""Preferences: of a pair of answers to one prompt, one is chosen. What a pair costs, from sums of log-probabilities alone.

    r = (log π(y) - log π_ref(y)) / n        Δ = r_chosen - r_rejected        n = 1, or the answer's tokens (by_length)

    sigmoid   -log σ(βΔ), and with label smoothing ε: -(1-ε) log σ(βΔ) - ε log σ(-βΔ)     DPO; cDPO where labels may be wrong
    robust    (-(1-ε) log σ(βΔ) + ε log σ(-βΔ)) / (1-2ε)                                  unbiased under wrong labels
    hinge     max(0, 1 - βΔ)                                                              SLiC
    ipo       (Δ - 1/2β)², always by length, as its authors do it                         IPO

Papers: Rafailov 2023, Mitchell 2023 (cDPO), Chowdhury 2024 (robust), Zhao 2023 (SLiC), Azar 2023 (IPO); names and numbers are those
of TRL, except that its `sigmoid` leaves label smoothing out. No collectives here: sums of the whole batch come from
`Run.by_document`, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...stack import require

LOSSES = ("sigmoid", "robust", "hinge", "ipo")


@dataclass(frozen=True)
class Preference:
    loss: str = "sigmoid"
    beta: float = 0.1  # how far the policy may go from the reference: the smaller, the further
    label_smoothing: float = 0.0  # share of pairs that are the wrong way round
    by_length: bool = False  # log-ratios a token, so that a long answer weighs no more than a short one

    def violations(self) -> list[str]:
        problems = []
        if self.loss not in LOSSES:
            problems.append(f"loss={self.loss!r} is none of the preference losses {', '.join(LOSSES)}")
        if not 0.0 < self.beta < float("inf"):
            problems.append(f"beta={self.beta} must be a finite number above 0; 0.1 is usual")
        if not 0.0 <= self.label_smoothing < 0.5:
            problems.append(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5, where a pair says nothing any more"
            )
        elif self.label_smoothing and self.loss in ("hinge", "ipo"):
            problems.append(
                f"label_smoothing={self.label_smoothing} has no meaning for loss={self.loss!r}; use 'sigmoid' or 'robust', or 0.0"
            )
        return problems


def preference_losses(
    sums: Tensor, reference: Tensor, lengths: Tensor, settings: Preference
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each pair costs, [n], and numbers of each pair, [n], without gradients.

    sums, reference: log-probabilities of the chosen and the rejected answer, [n, 2], of the policy and of the reference.
    lengths: their supervised tokens, [n, 2]. Rewards are β times the log-ratio, never by length."""
    require(settings.violations(), "these preferences cannot be computed")
    ratios = sums - reference
    by_length = settings.by_length or settings.loss == "ipo"
    scores = ratios / lengths.clamp(min=1) if by_length else ratios
    rewards, detached = settings.beta * ratios.detach(), sums.detach()
    numbers = {
        "chosen_reward": rewards[:, 0],
        "rejected_reward": rewards[:, 1],
        "margin": rewards[:, 0] - rewards[:, 1],
        "accuracy": (rewards[:, 0] > rewards[:, 1]).to(rewards.dtype),
        "chosen_logprob": detached[:, 0],
        "rejected_logprob": detached[:, 1],
    }
    return _losses(scores[:, 0] - scores[:, 1], settings), numbers


def _losses(delta: Tensor, settings: Preference) -> Tensor:
    if settings.loss == "ipo":
        return (delta - 1 / (2 * settings.beta)) ** 2
    logits, wrong = settings.beta * delta, settings.label_smoothing
    if settings.loss == "hinge":
        return torch.relu(1 - logits)
    right, flipped = -(1 - wrong) * F.logsigmoid(logits), -wrong * F.logsigmoid(-logits)
    return right + flipped if settings.loss == "sigmoid" else (right - flipped) / (1 - 2 * wrong)
