"""Log-probabilities under any gradient from above, and TRL's DPO and GRPO trainers with a stack, on NCCL ranks: in float32 what one
process computes without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.base.processes.pool import Workers

from ..contract import test_log_probs as log_probs
from ..contract.tiny import worst
from ..integrations.runs import small

pytestmark = pytest.mark.ranks
EXACT = dict(attention="math")  # the kernel that computes in float32
SCORED = (
    "2 ring", "4 = 2 ulysses × 2 ring", "4 = 2 ulysses × 2 data", "8 = 4 ulysses × 2 ring", "adapters", "experts",
    "own code, sinks",
)  # fmt: skip


@pytest.mark.parametrize("name", SCORED)
def test_log_probs(ranks: Workers, name: str):
    kind, world, stack, packed = log_probs.CASES[name]
    loss, theirs = log_probs.reference(kind, packed)
    answers = ranks.run(log_probs.step, kind, EXACT | stack, packed, "cuda", world=world)
    assert all(torch.equal(value, answers[0][0]) for value, _ in answers)
    assert abs(float(answers[0][0] - loss)) <= 1e-5 * abs(float(loss))
    assert len(theirs) > 8 and worst(answers[0][1], theirs) <= 1e-5


@pytest.mark.parametrize("name", ["ulysses, a reference", "ring, adapters, ipo", "data, hinge"])
def test_dpo_trainer(ranks: Workers, tmp_path: Path, name: str):
    pytest.importorskip("trl")
    from ..integrations import test_dpo

    world, stack, changes = test_dpo.CASES[name]
    if changes.get("reference") == "again":
        small().save_pretrained(tmp_path / "model")
        changes = changes | {"saved": str(tmp_path / "model")}
    _compared(ranks, test_dpo.train, test_dpo.NUMBERS, tmp_path, world, stack, changes)


@pytest.mark.parametrize("name", ["ulysses × data, dapo", "ring, adapters, grpo by sequences"])
def test_grpo_trainer(ranks: Workers, tmp_path: Path, name: str):
    pytest.importorskip("trl")
    from ..integrations import test_grpo

    world, stack, changes = test_grpo.CASES[name]
    small().save_pretrained(tmp_path / "model")
    _compared(ranks, test_grpo.train, test_grpo.NUMBERS, tmp_path, world, stack, changes)


def _compared(
    ranks: Workers, train: Any, numbers: tuple[str, ...], folder: Path, world: int, stack: dict[str, Any],
    changes: dict[str, Any],
) -> None:  # fmt: skip
    (theirs,) = ranks.run(train, str(folder / "without"), None, world=1, use_cpu=False, **changes)
    for ours in ranks.run(train, str(folder / "with"), EXACT | stack, world=world, use_cpu=False, **changes):
        for number in numbers:
            assert theirs[number] and ours[number] == pytest.approx(theirs[number], rel=1e-4, abs=1e-4), number
