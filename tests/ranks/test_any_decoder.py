"""Models by their own code on real NCCL ranks, in float32 by plain products: loss and every gradient of the untouched model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ithaca.engine.proof import LIMIT

from ..parity.test_any_decoder import TRIALS, Trial, errors_of

pytestmark = pytest.mark.ranks

SOME = [trial for trial in TRIALS if trial.kind in ("gpt_oss", "glm4", "olmo3", "deepseek_v3")]


@pytest.mark.parametrize("trial", SOME, ids=lambda trial: trial.kind)
def test_parity(ranks, trial: Trial):
    world = max(2, trial.stack.context_ranks * trial.stack.replicate)
    trial = replace(trial, stack=replace(trial.stack, attention="math"))
    errors = ranks.run(errors_of, trial, "cuda", world=world)[0]
    assert len(errors) > 8
    assert {name: error for name, error in errors.items() if not error <= 2 * LIMIT} == {}
