"""Linear mixers on real ranks: loss and every gradient of the untouched model."""

from __future__ import annotations

import os
from functools import partial
from itertools import product

import pytest
import torch

from ithaca.engine.proof import LIMIT, NEAR
from ithaca.stack import Stack

from .test_any_decoder import LENGTH, Trial, errors_of

LONG = os.environ.get("ITHACA_FAMILIES") == "long"
TRIALS = [
    Trial("qwen3_next", Stack(ulysses=2, heads_per_stage=1, store="host"), packed=True),
    Trial("qwen3_5_text", Stack(ulysses=2, ring=2, recompute="layer"), packed=True, lora=True),
    Trial("qwen3_5_text", Stack(tile=64), packed=True, rows=2, length=205),
]
KEPT = [("none", "gpu"), ("layer", "gpu"), ("layer", "host"), ("layer", "disk")]
KEPT += [("keep_attention", store) for store in ("gpu", "host", "disk")]
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
OTHERS = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "olmo_hybrid", "lfm2_moe")
MATRIX = [
    Trial("qwen3_5_moe_text", Stack(ulysses=4, recompute="none"), length=5),
    Trial("bamba", Stack(ring=2, tile=9), length=67),
]
MATRIX += [
    Trial(kind, Stack(ulysses=ulysses, recompute=recompute, store=store), length=length, packed=packed, lora=lora)
    for kind, ulysses, (recompute, store), (length, packed, lora) in product(
        QWEN, (1, 2, 4), KEPT, ((LENGTH, True, False), (LENGTH, False, True), (67, False, False))
    )
]
MATRIX += [
    Trial(kind, stack, packed=packed)
    for kind, stack, packed in product(
        (*QWEN, *OTHERS), (Stack(ring=2), Stack(ulysses=2, ring=2, heads_per_stage=1)), (True, False)
    )
]
MATRIX += [  # by tiles on each rank; PEFT adapts no mixer of Mamba
    Trial(
        kind,
        Stack(tile=tile, heads_per_stage=stage, recompute=recompute, store=store),
        packed,
        lora,
        rows=2,
        length=205,
    )
    for kind, (tile, stage, recompute, store), (packed, lora) in product(
        (*QWEN, *OTHERS),
        ((20, None, "keep_attention", "gpu"), (64, 1, "layer", "host"), (128, None, "none", "gpu")),
        ((True, False), (False, True)),
    )
    if not lora or kind in QWEN
]
MATRIX += [Trial(kind, Stack(ulysses=3, heads_per_stage=2), length=length) for kind in QWEN for length in (4, 7, 101)]


@pytest.mark.parametrize("trial", TRIALS + MATRIX if LONG else TRIALS, ids=lambda trial: trial.kind)
def test_parity(workers, trial: Trial):
    world = max(2, trial.stack.context_ranks * trial.stack.replicate)
    errors = workers.run(errors_of, trial, world=world)[0]
    assert len(errors) > 8
    if trial.kind not in QWEN and LIMIT < max(errors.values()) < NEAR:
        # as a proof does: gradients of decays cancel, and float32 has no more of them, tiles or none
        errors = workers.run(partial(errors_of, dtype=torch.float64), trial, world=world)[0]
    missed = {name: error for name, error in errors.items() if not error <= LIMIT}
    assert not missed, (trial, missed)
