"""TRL's DPOTrainer with a stack on several ranks follows the same trainer on one process without: losses, rewards, weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.processes.pool import Workers

from .runs import dpo_trainer, launched, logged, parameters, small

pytest.importorskip("trl")
STEPS = 3
NUMBERS = (
    "loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
    "logps/rejected", "entropy", "num_tokens", "eval_loss", "eval_rewards/margins", "learning_rate",
)  # fmt: skip


def train(folder: str, stack: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    with launched() as world:
        trainer = dpo_trainer(folder, world, stack, max_steps=STEPS, eval_strategy="steps", eval_steps=STEPS, **changes)
        trainer.train()
        return {name: logged(trainer, name) for name in NUMBERS} | {"weights": parameters(trainer)}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ulysses, a reference": (2, dict(ulysses=2), {}),
    "ulysses × data, before the first step, by length": (
        4, dict(ulysses=2, store="host"), dict(reference="before", loss_type=["sigmoid_norm"], beta=2.0),
    ),
    "ring, adapters, ipo": (2, dict(ring=2), dict(reference="adapters", loss_type=["ipo"], optim="sgd")),
    "data, hinge": (2, dict(), dict(reference="again", loss_type=["hinge"])),
}  # fmt: skip
if os.environ.get("ITHACA_LOSSES") == "long":  # make losses
    CASES["one, robust"] = (1, dict(), dict(loss_type=["robust"], label_smoothing=0.1))


@pytest.mark.parametrize("name", CASES)
def test_a_stack_changes_nothing(workers: Workers, tmp_path: Path, name: str):
    world, stack, changes = CASES[name]
    if changes.get("reference") == "again":
        small().save_pretrained(tmp_path / "model")
        changes = changes | {"saved": str(tmp_path / "model")}
    (theirs,) = workers.run(train, str(tmp_path / "without"), None, world=1, **changes)
    for ours in workers.run(train, str(tmp_path / "with"), stack, world=world, **changes):
        for number in NUMBERS:
            assert len(theirs[number]) == (1 if number.startswith("eval_") else STEPS), number
            assert ours[number] == pytest.approx(theirs[number], rel=1e-4, abs=1e-4), number
            assert ours[number][0] == pytest.approx(theirs[number][0], rel=1e-5, abs=1e-5) or "eval_" in number, number
        assert ours["weights"].keys() == theirs["weights"].keys()
        furthest = max(float((ours["weights"][n] - v).norm() / v.norm()) for n, v in theirs["weights"].items())
        assert furthest < 1e-3
