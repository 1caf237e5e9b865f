"""Policy steps against TRL's own code: advantages of rewards, losses of given log-probabilities, weights over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.engine.objective.policy import LOSSES, Policy, advantages, token_losses, weights_of_tokens

from ...integrations.runs import launched, settings, small, tokenizer

GROUPS, EACH, LONGEST, PROMPT = 3, 4, 6, 2
ROWS = GROUPS * EACH
REWARDS = [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.25, None, 3.0, -2.0, 0.5, 0.7]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        completions = [[2] * (1 + row % LONGEST) for row in range(len(prompts))]
        logprobs = [[0.0] * len(ids) for ids in completions]
        return {"prompt_ids": [[3] * PROMPT for _ in prompts], "completion_ids": completions, "logprobs": logprobs}

    changes = dict(per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, num_generations=EACH)
    args = trl.GRPOConfig(
        **settings(str(tmp_path_factory.mktemp("grpo")), 1, None, **changes), max_completion_length=LONGEST
    )
    with launched(), pytest.warns(UserWarning, match="rollout_func"):
        made = trl.GRPOTrainer(
            small(), lambda completions, **_: REWARDS[: len(completions)], args=args, processing_class=tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": "w3 w3"}] * GROUPS), rollout_func=rollout,
        )  # fmt: skip
        made.current_gradient_accumulation_steps = 1
        yield made


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_as_trl(trainer: Any, scale: str):
    trainer.scale_rewards = scale
    trainer.model.train()
    theirs = trainer._generate_and_score_completions([{"prompt": "w3 w3"}] * ROWS)["advantages"]
    rewards = torch.tensor([float("nan") if reward is None else reward for reward in REWARDS])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(ROWS) // EACH * 7
    ours = torch.empty(ROWS)
    ours[order] = advantages(rewards[order], groups[order], Policy(normalise=scale))
    torch.testing.assert_close(ours[EACH:], theirs[EACH:], rtol=1e-5, atol=1e-6)
    assert float(theirs[:EACH].abs().max()) < 1e-3  # of equal rewards, by rounding
    assert not ours[:EACH].any() and float(ours[7]) == 0.0 and bool(ours[4:7].all())


def table() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=random)
    logprobs = -2 * torch.rand(ROWS, LONGEST, generator=random)
    noise = torch.randn(2, ROWS, LONGEST, generator=random)
    return {
        "lengths": lengths,
        "mask": (torch.arange(LONGEST) < lengths[:, None]).long(),
        "logprobs": logprobs,
        "old": logprobs + 0.3 * noise[0],
        "reference": logprobs + 0.5 * noise[1],
        "advantages": torch.randn(ROWS, generator=random),
        "entropy": torch.rand(ROWS, LONGEST, generator=random),
    }


def theirs(trainer: Any, asked: Policy, old: bool, parts: int) -> tuple[float, Tensor, dict[str, list[float]]]:
    """Of TRL's loss over micro-batches, each of `ROWS / parts` completions."""
    given = table()
    logprobs = given["logprobs"].requires_grad_()
    trainer.loss_type, trainer.beta = asked.loss, asked.kl
    trainer.args.use_bias_correction_kl = asked.unbiased_kl
    trainer.epsilon_low, trainer.epsilon_high = asked.clip_low, asked.clip_high
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
    trainer._metrics["train"].clear()
    total = torch.zeros(())
    for part in torch.arange(ROWS).chunk(parts):
        trainer._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (
            logprobs[part], given["entropy"][part], None,
        )  # fmt: skip
        prompt = torch.ones(len(part), PROMPT, dtype=torch.long)
        inputs = {
            "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": given["mask"][part],
            "completion_mask": given["mask"][part], "advantages": given["advantages"][part],
            "num_items_in_batch": given["mask"].sum(), "ref_per_token_logps": given["reference"][part],
        }  # fmt: skip
        total = total + trainer._compute_loss(
            None, inputs | ({"old_per_token_logps": given["old"][part]} if old else {})
        )
    del trainer._get_per_token_logps_and_entropies
    (grad,) = torch.autograd.grad(total, logprobs)
    return float(total.detach()), grad, dict(trainer._metrics["train"])


CASES = {
    **{loss: (Policy(loss, kl=0.04, longest=LONGEST), True, 1) for loss in LOSSES},
    **{f"{loss}, 3 micro-batches": (Policy(loss, longest=LONGEST), False, 3) for loss in LOSSES},
    "kl as it is": (Policy(kl=0.1, unbiased_kl=False), True, 1),
    "kl in the first step": (Policy(kl=0.1), False, 1),
    "clipped higher": (Policy("dapo", clip_low=0.1, clip_high=0.28, kl=0.0), True, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_as_trl(trainer: Any, name: str):
    asked, old, parts = CASES[name]
    loss, grad, logged = theirs(trainer, asked, old, parts)
    given = table()
    logprobs, mask = given["logprobs"].requires_grad_(), given["mask"]
    losses, numbers = token_losses(
        logprobs, given["old"] if old else None, given["reference"], given["advantages"][:, None], asked
    )
    weights = torch.cat([
        weights_of_tokens(part, asked, completions=ROWS, tokens=int(mask.sum()), micro_batches=parts)
        for part in given["lengths"].chunk(parts)
    ])  # fmt: skip
    ours = (losses * weights[:, None] * mask).sum()
    (found,) = torch.autograd.grad(ours, logprobs)
    assert float(ours.detach()) == pytest.approx(loss, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-8)
    assert not any(value.requires_grad for value in numbers.values())
    assert torch.equal(numbers["ratio"], torch.ones_like(mask.float())) != old
    names = {
        "clip_ratio/low_mean": "clipped_low",
        "clip_ratio/high_mean": "clipped_high",
        "clip_ratio/region_mean": "clipped",
    }
    names |= {"kl": "kl"} if asked.kl else {}
    if parts == 1:
        for key, number in names.items():
            mean = float((numbers[number] * mask).sum() / mask.sum())
            assert mean == pytest.approx(logged[key][0], rel=1e-5, abs=1e-8) and (
                mean > 0 or not (old or key == "kl")
            ), key


def test_weights_make_a_mean():
    """Of losses that are 1 everywhere the step's loss is 1, dr_grpo's as far as completions are as long as they may be."""
    lengths = torch.tensor([3, 1, 6, 2])
    for loss, right in {"grpo": 1.0, "bnpo": 1.0, "dapo": 1.0, "dr_grpo": 12 / 24}.items():
        weights = weights_of_tokens(lengths, Policy(loss, longest=6), completions=4, tokens=12)
        assert float((weights * lengths).sum()) == pytest.approx(right), loss


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(loss="cispo"), "loss='cispo' is none of grpo, bnpo, dr_grpo, dapo"),
        (dict(normalise="std"), "normalise='std' is none of group, batch, none"),
        (dict(clip_low=1.5), "clip_low=1.5 must be between 0 and 1"),
        (dict(clip_high=-0.1), "clip_high=-0.1 must be finite"),
        (dict(kl=float("inf")), "kl=inf must be finite"),
        (dict(temperature=0.0), "temperature=0.0 must be"),
        (dict(longest=0), "longest=0 must be at least 1"),
        (dict(loss="dr_grpo"), "longest, which is not set"),
    ],
)
def test_refused(changes: dict[str, Any], words: str):
    (said,) = Policy(**changes).violations()
    assert words in said
    one = torch.ones(1)
    for call in (
        lambda asked: advantages(one, one.long(), asked),
        lambda asked: token_losses(one, None, None, one, asked),
        lambda asked: weights_of_tokens(one, asked, completions=1, tokens=1),
    ):
        with pytest.raises(ValueError, match="cannot be computed"):
            call(Policy(**changes))


def test_what_a_step_needs_is_asked_for():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="pass reference, or kl"):
        token_losses(one, None, None, one, Policy(kl=0.1))
    with pytest.raises(ValueError, match=r"rewards has shape \(1,\), groups \(2,\)"):
        advantages(one, torch.zeros(2), Policy())
    with pytest.raises(ValueError, match="tokens=0 must be at least 1"):
        weights_of_tokens(one, Policy(), completions=1, tokens=0)
