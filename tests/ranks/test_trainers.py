"""Real trainers with a stack on NCCL ranks follow the same trainers on one GPU without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ithaca.base.processes.pool import Workers

from ..integrations.runs import hf_trainer, sft_trainer, train

pytestmark = pytest.mark.ranks
EXACT = dict(attention="math", store="host")  # the kernel that computes in float32
CASES: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    "trainer, ulysses": (hf_trainer, 2, dict(ulysses=2), {}),
    "trainer, ulysses × data": (hf_trainer, 4, dict(ulysses=2), {}),
    "sft, ring, packed": (sft_trainer, 2, dict(ring=2), dict(packing=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stack_changes_nothing(ranks: Workers, tmp_path: Path, name: str):
    make, world, stack, changes = CASES[name]
    if make is sft_trainer:
        pytest.importorskip("trl")
    (theirs,) = ranks.run(train, make, str(tmp_path / "without"), None, world=1, use_cpu=False, **changes)
    assert len(theirs["loss"]) == 20 and theirs["loss"][-1] < theirs["loss"][0]
    for ours in ranks.run(train, make, str(tmp_path), EXACT | stack, world=world, use_cpu=False, **changes):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-3)
        assert ours["eval"] == pytest.approx(theirs["eval"], abs=1e-4)


def test_bf16(ranks: Workers, tmp_path: Path):
    """No further from float32 than transformers' own bf16, up to noise."""
    exact, theirs = (
        ranks.run(train, hf_trainer, str(tmp_path / str(bf16)), None, world=1, use_cpu=False, bf16=bf16)[0]["loss"]
        for bf16 in (False, True)
    )
    saving = dict(save_strategy="steps", save_steps=10)
    folder = str(tmp_path / "ours")
    ours = ranks.run(train, hf_trainer, folder, dict(ulysses=2), world=2, use_cpu=False, bf16=True, **saving)
    far, limit = (max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (ours[0]["loss"], theirs))
    assert ours[0]["loss"] == ours[1]["loss"] and far <= 2 * limit, (far, limit)
    assert ours[0]["files"] == ["checkpoint-10", "checkpoint-20"]
