"""A policy step on any layout, `run.logprobs` and objective/policy.py, against TRL's GRPOTrainer: the same rollouts, the same loss
and gradients. And that trainer itself with a stack, against itself without."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.engine.objective.policy import LOSSES, Policy, advantages, token_losses, weights_of_tokens

from ..contract.tiny import VOCABULARY, gradients, worst
from .runs import launched, logged, other, parameters, settings, small, tokenizer

trl = pytest.importorskip("trl")
GROUPS, EACH, LONGEST = 2, 2, 7
REWARDS = [0.3, 1.0, -0.5, 2.0]
TEMPERATURE, KL, HIGH = 0.8, 0.07, 0.28


def rollouts() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions of unequal lengths."""
    random = torch.Generator().manual_seed(4)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=random))
        return torch.randint(2, VOCABULARY, (length,), generator=random).tolist()

    prompts = [ids(1, 6) for _ in range(GROUPS)]
    return [prompts[i // EACH] for i in range(GROUPS * EACH)], [ids(1, LONGEST + 1) for _ in range(GROUPS * EACH)]


def nudged(model: Any, size: float) -> Any:
    """Away from who sampled: ratios are not 1."""
    random = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=random)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By loss: what TRL computes and logs; and the log-probabilities of who sampled, [rows, tokens], 0 where there is none."""
    from datasets import Dataset

    folder: Path = tmp_path_factory.mktemp("grpo")
    small().save_pretrained(folder / "model")
    prompts, completions = rollouts()

    def rollout(_: list[str], __: Any) -> dict[str, Any]:
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    changes = dict(
        per_device_train_batch_size=GROUPS * EACH, gradient_accumulation_steps=1, gradient_checkpointing=False
    )
    args = trl.GRPOConfig(
        **settings(str(folder), 1, None, **changes), num_generations=EACH, max_completion_length=LONGEST, beta=KL,
        epsilon_high=HIGH, temperature=TEMPERATURE, num_iterations=2,
    )  # fmt: skip
    found: dict[str, Any] = {}
    with launched(), pytest.warns(UserWarning, match="rollout_func"):
        trainer = trl.GRPOTrainer(
            str(folder / "model"), lambda completions, **_: REWARDS, args=args, processing_class=tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": "w3"}] * GROUPS), rollout_func=rollout,
        )  # fmt: skip
        other(trainer.ref_model)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "w3"}] * (GROUPS * EACH))
        nudged(trainer.model, 0.03)
        for loss in LOSSES:
            trainer.loss_type = loss
            trainer.model.zero_grad()
            trainer._metrics["train"].clear()
            value = trainer.compute_loss(trainer.model, inputs)
            value.backward()
            grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
            found[loss] = float(value.detach()), grads, {n: v[0] for n, v in trainer._metrics["train"].items()}
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    old = torch.zeros(GROUPS * EACH, length)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        old[row, len(prompt) : len(prompt) + len(completion)] = inputs["old_per_token_logps"][row, : len(completion)]
    return found | {"old": old}


def step(stack: dict[str, Any], old: Tensor) -> dict[str, Any]:
    """By loss, what a run computes: as docs/guides/trainers.md has it."""
    prompts, completions = rollouts()
    ids, labels = torch.zeros(old.shape, dtype=torch.long), torch.full(old.shape, -100)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = ids[row, len(prompt) : end]
    run = ithaca.prepare(nudged(small(), 0.03), ithaca.Stack(**stack), device="cpu")
    frozen = other(small()).requires_grad_(False)
    reference = ithaca.prepare(frozen, ithaca.Stack(**stack), device="cpu")
    lengths = torch.tensor([len(completion) for completion in completions])
    groups = torch.arange(GROUPS * EACH) // EACH
    found: dict[str, Any] = {}
    for loss in LOSSES:
        policy = Policy(loss, clip_high=HIGH, kl=KL, longest=LONGEST, temperature=TEMPERATURE)
        batch = run.shard(ids, labels, weights=old)  # what is known of labels travels with them
        with torch.no_grad():
            beside = reference.logprobs(reference.shard(ids, labels), temperature=TEMPERATURE)
        logprobs, entropy = run.logprobs(batch, temperature=TEMPERATURE, entropy=True)
        completion = batch.document_of_tokens(run.mesh)
        advantage = advantages(torch.tensor(REWARDS), groups, policy)[completion]
        weights = weights_of_tokens(lengths, policy, completions=len(lengths), tokens=int(lengths.sum()))[completion]
        losses, numbers = token_losses(logprobs, batch.weights, beside, advantage, policy)  # pyright: ignore
        labelled = batch.labels != -100
        value = run.by_document(batch, torch.where(labelled, losses * weights, 0.0)).sum()
        run.model.zero_grad()
        value.backward()
        means = {
            name: float(run.by_document(batch, torch.where(labelled, number, 0.0)).sum() / lengths.sum())
            for name, number in (numbers | {"entropy": entropy.detach()}).items()
        }
        found[loss] = float(value.detach()), gradients(run), means
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, dict()),
    "2 ring": (2, dict(ring=2)),
    "4 = 2 ulysses × 2 data": (4, dict(ulysses=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_policy_step_is_trls(workers: Workers, theirs: dict[str, Any], name: str):
    world, stack = LAYOUTS[name]
    names = {
        "kl": "kl",
        "entropy": "entropy",
        "clip_ratio/low_mean": "clipped_low",
        "clip_ratio/high_mean": "clipped_high",
    }
    for answers in workers.run(step, stack, theirs["old"], world=world):
        for loss in LOSSES:
            value, grads, numbers = answers[loss]
            right, slopes, said = theirs[loss]
            assert value == pytest.approx(right, rel=1e-5), loss
            assert worst(grads, slopes) <= 1e-5, loss
            for key, number in names.items():
                assert said[key] > 0 and numbers[number] == pytest.approx(said[key], rel=1e-5), key
    assert len({theirs[loss][0] for loss in LOSSES}) == 3  # with one micro-batch bnpo is dapo


# -- the trainer ------------------------------------------------------------------------------------------------------------

NUMBERS = (
    "loss",
    "grad_norm",
    "reward",
    "kl",
    "entropy",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "eval_loss",
)


def sampled(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Elsewhere: other completions at every step."""
    if hasattr(trainer, "run"):
        torch.rand(3)  # on rank 0 alone, and all shuffle completions behind it
    random = torch.Generator().manual_seed(trainer.state.global_step)

    def ids() -> list[int]:
        length = int(torch.randint(1, LONGEST + 1, (), generator=random))
        return torch.randint(2, VOCABULARY, (length,), generator=random).tolist()

    asked = trainer.processing_class(prompts)["input_ids"]
    completions = [ids() for _ in prompts]
    return {"prompt_ids": asked, "completion_ids": completions, "logprobs": [[0.0] * len(ids) for ids in completions]}


def few_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / len(ids) / VOCABULARY for ids in completion_ids]


def trainer_of(folder: str, world: int, stack: dict[str, Any] | None, **changes: Any) -> Any:
    from datasets import Dataset

    from ithaca.integrations import GRPOTrainer

    lora = changes.pop("lora", False)
    given = settings(folder, world, stack, max_steps=4, learning_rate=5e-4, gradient_checkpointing=False) | changes
    args = trl.GRPOConfig(**given, num_generations=2, max_completion_length=LONGEST, beta=KL, num_iterations=2)
    common: dict[str, Any] = dict(
        model=str(Path(folder).parent / "model"), reward_funcs=few_words, args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{2 * i} w7"[: 3 * i]} for i in range(2, 8)]),
        eval_dataset=Dataset.from_list([{"prompt": f"w{i}"} for i in range(2, 6)]), rollout_func=sampled,
    )  # fmt: skip
    if lora:
        from peft import LoraConfig

        common["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return trl.GRPOTrainer(**common) if stack is None else GRPOTrainer(**common, stack=ithaca.Stack(**stack))


def train(folder: str, stack: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    with launched() as world, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using 'rollout_func'")
        trainer = trainer_of(folder, world, stack, **changes)
        trainer.train()
        trainer.evaluate()
        return {name: logged(trainer, name) for name in NUMBERS} | {"weights": parameters(trainer)}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ulysses, dapo": (2, dict(ulysses=2, store="host"), {}),
    "ulysses × data, dapo": (4, dict(ulysses=2, store="host"), {}),
    "ring, adapters, grpo by sequences": (
        2, dict(ring=2), dict(lora=True, loss_type="grpo", importance_sampling_level="sequence", optim="sgd"),
    ),
}  # fmt: skip


LONG = os.environ.get("ITHACA_LOSSES") == "long"  # make losses


@pytest.mark.parametrize("name", [name for name, (world, _, _) in CASES.items() if LONG or world < 4])
def test_a_stack_changes_nothing(workers: Workers, tmp_path: Path, name: str):
    world, stack, changes = CASES[name]
    small().save_pretrained(tmp_path / "model")
    (theirs,) = workers.run(train, str(tmp_path / "without"), None, world=1, **changes)
    for ours in workers.run(train, str(tmp_path / "with"), stack, world=world, **changes):
        for number in NUMBERS:
            assert len(theirs[number]) == {"eval_loss": 1, "reward": 2, "completions/mean_length": 2}.get(number, 4), (
                number
            )
            assert ours[number] == pytest.approx(theirs[number], rel=1e-4, abs=1e-4), number
        assert ours["weights"].keys() == theirs["weights"].keys()
        furthest = max(float((ours["weights"][n] - v).norm() / v.norm()) for n, v in theirs["weights"].items())
        assert furthest < 1e-3
