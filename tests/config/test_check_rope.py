"""Rotary settings that contradict lengths are refused with the number that would fit."""

from __future__ import annotations

import pytest

from ithaca.config import load
from ithaca.config.schema import Model, Rope
from ithaca.engine.build import model_config

YARN = ["model.rope.rope_type=yarn", "model.rope.original_max_position_embeddings=1K"]
BASE = ["launch.cpu=1", "stack=auto"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([*YARN, "model.rope.factor=4", "data.context=8K"], r"1,024 positions to 4,096, .* context is 8,192; use factor 8"),
        ([*YARN, "model.rope.factor=0.5", "data.context=1K"], r"factor=0.5 would squeeze positions"),
        ([*YARN, "data.context=2K"], r"rope_type=yarn also needs model.rope.factor"),
        (
            [*YARN, "model.rope.factor=4", "data.context=2K", "model.rope.beta_fast=1", "model.rope.beta_slow=32"],
            "needs beta_slow=32 below",
        ),
        (
            ["phases=[{context: 1K, steps: 2}, {context: 4K, steps: 2, rope: {rope_type: yarn, factor: 2.0, "
             "original_max_position_embeddings: 1K}}]", "train.steps=4", "data.context=4K"],
            r"phases\[1\].rope: yarn with factor 2 .* use factor 4",
        ),
    ],
)  # fmt: skip
def test_contradictions(given: list[str], words: str):
    with pytest.raises(ValueError, match=words):
        load(None, [*BASE, *given], "tiny_cpu")


def test_a_length_the_model_was_never_trained_with():
    rope = Rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=8192)
    with pytest.raises(ValueError, match="8,192 is longer than the 4,096 positions that tiny_llama"):
        model_config(Model(folder="tiny_llama", rope=rope), 16384)
    shorter = Rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=2048)  # as Qwen3's model card has it
    assert model_config(Model(folder="tiny_llama", rope=shorter), 16384).rope_parameters["factor"] == 8.0
