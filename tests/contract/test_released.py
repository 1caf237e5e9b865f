"""A model that nobody holds any more is gone, with its memory, its groups and their threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from .tiny import prepared, tiny, tokens

STACKS: dict[str, dict[str, Any]] = {
    "nothing again": dict(recompute="none", tile=None),
    "tiles": dict(tile=10),
    "stages": dict(heads_per_stage=2, recompute="layer", store="host"),
    "whole": dict(shard_parameters=False, tile=10),
}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(tiny("llama3"), LoraConfig(r=2, target_modules=names))


def used(model: Any, stack: dict[str, Any]) -> list[weakref.ref]:
    run = prepared(model, **stack)
    run.loss(run.shard(tokens(2))).backward()
    layer = run.decoder.layers[0].module
    return [weakref.ref(each) for each in (run, run.model, layer, layer.mlp, layer.self_attn.o_proj)]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["llama3", "phi3", "mixtral", "adapted"])
def test_nothing_holds_on_to_it(name: str, stack: str):
    held = used(adapted() if name == "adapted" else tiny(name), STACKS[stack])
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
