"""Preference losses against TRL's own code on the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.engine.objective.preference import Preference, preference_losses

from ...integrations.runs import launched, settings, small, tokenizer

PAIRS, PROMPT, ANSWER = 5, 3, 7


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": "w2", "chosen": " w3", "rejected": " w4"}] * 4)
    args = trl.DPOConfig(**settings(str(tmp_path_factory.mktemp("dpo")), 1, None))
    with launched():
        made = trl.DPOTrainer(small(), small(), args=args, train_dataset=rows, processing_class=tokenizer())
        made.precompute_ref_logps = True  # the reference's log-probabilities come with a batch
        yield made


def table() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """A batch of TRL's, and of its tokens log-probabilities: chosen rows, then rejected ones; sums of a reference; lengths."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, ANSWER + 1, (2 * PAIRS,), generator=random)
    place = torch.arange(PROMPT + ANSWER).expand(2 * PAIRS, -1)
    answer = (place >= PROMPT) & (place < PROMPT + lengths[:, None])
    logprobs = -2 * torch.rand(2 * PAIRS, PROMPT + ANSWER - 1, generator=random) * answer[:, 1:]
    reference = logprobs.sum(1) + 3 * torch.randn(2 * PAIRS, generator=random)
    inputs = {
        "input_ids": torch.ones_like(place),
        "attention_mask": (place < PROMPT + lengths[:, None]).long(),
        "completion_mask": answer.long(),
        "ref_chosen_logps": reference[:PAIRS],
        "ref_rejected_logps": reference[PAIRS:],
    }
    return inputs, logprobs, reference, lengths


def pairs(values: Tensor) -> Tensor:
    """[chosen, rejected] as TRL has it -> [n, 2]"""
    return torch.stack(values.chunk(2), 1)


CASES = {
    "sigmoid": Preference(beta=0.3),
    "sigmoid_norm": Preference(by_length=True, beta=0.7),
    "robust": Preference("robust", beta=0.2, label_smoothing=0.1),
    "hinge": Preference("hinge", beta=0.25),
    "ipo": Preference("ipo", beta=0.4),
}


def theirs(trainer: Any, name: str, asked: Preference) -> tuple[float, Tensor, dict[str, float]]:
    inputs, logprobs, _, _ = table()
    logprobs.requires_grad_()
    trainer.loss_types, trainer.loss_weights = [name], [1.0]
    trainer.beta, trainer.label_smoothing = asked.beta, asked.label_smoothing
    zero = torch.zeros_like(logprobs)
    answer = SimpleNamespace(log_probs=logprobs, entropy=zero, mean_logits=zero, is_top1=zero.bool())
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(lambda **_: answer, inputs, False)
    (grad,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), grad, {key: values[-1] for key, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("name", CASES)
def test_as_trl(trainer: Any, name: str):
    asked = CASES[name]
    loss, grad, logged = theirs(trainer, name, asked)
    _, logprobs, reference, lengths = table()
    logprobs.requires_grad_()
    losses, numbers = preference_losses(pairs(logprobs.sum(1)), pairs(reference), pairs(lengths), asked)
    (ours,) = torch.autograd.grad(losses.mean(), logprobs)
    assert losses.shape == (PAIRS,) and float(losses.detach().mean()) == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(ours, grad, rtol=1e-5, atol=1e-8)
    names = {
        "rewards/chosen": "chosen_reward", "rewards/rejected": "rejected_reward", "rewards/margins": "margin",
        "rewards/accuracies": "accuracy", "logps/chosen": "chosen_logprob", "logps/rejected": "rejected_logprob",
    }  # fmt: skip
    assert set(names.values()) == set(numbers) and not any(value.requires_grad for value in numbers.values())
    for key, number in names.items():
        assert float(numbers[number].mean()) == pytest.approx(logged[key], rel=1e-6), key


def test_smoothed_labels_are_those_of_aot_pair_by_pair(trainer: Any):
    """TRL smooths labels in `aot`, which is the sigmoid of sorted pairs: of a single pair, the same."""
    asked = Preference(beta=0.3, label_smoothing=0.2)
    inputs, logprobs, reference, lengths = table()
    losses, _ = preference_losses(pairs(logprobs.sum(1)), pairs(reference), pairs(lengths), asked)
    trainer.loss_types, trainer.loss_weights, trainer.beta, trainer.label_smoothing = ["aot"], [1.0], 0.3, 0.2
    for pair in range(PAIRS):
        rows = [pair, PAIRS + pair]
        one = {name: value[rows] for name, value in inputs.items() if not name.startswith("ref_")}
        one |= {name: value[[pair]] for name, value in inputs.items() if name.startswith("ref_")}
        zero = torch.zeros_like(logprobs[rows])
        answer = SimpleNamespace(log_probs=logprobs[rows], entropy=zero, mean_logits=zero, is_top1=zero.bool())
        loss = trainer._compute_loss(lambda answer=answer, **_: answer, one, False)
        assert float(losses[pair]) == pytest.approx(float(loss), rel=1e-6)


def test_hinge_by_length_is_that_of_means():
    _, logprobs, reference, lengths = table()
    by_hand = (pairs(logprobs.sum(1)) - pairs(reference)) / pairs(lengths)
    right = (1 - 2.0 * (by_hand[:, 0] - by_hand[:, 1])).clamp(min=0)
    asked = Preference("hinge", beta=2.0, by_length=True)
    losses, _ = preference_losses(pairs(logprobs.sum(1)), pairs(reference), pairs(lengths), asked)
    torch.testing.assert_close(losses, right)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(loss="exo_pair"), "'exo_pair' is none of the preference losses sigmoid, robust, hinge, ipo"),
        (dict(beta=0.0), "beta=0.0 must be a finite number above 0"),
        (dict(label_smoothing=0.5), "must be at least 0 and below 0.5"),
        (dict(loss="ipo", label_smoothing=0.1), "no meaning for loss='ipo'"),
    ],
)
def test_refused(changes: dict[str, Any], words: str):
    (said,) = Preference(**changes).violations()
    assert words in said
    with pytest.raises(ValueError, match="these preferences cannot be computed"):
        preference_losses(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), Preference(**changes))
