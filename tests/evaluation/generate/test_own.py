"""Generation by a model's own code: the tokens of transformers' `generate`, on one rank and on several."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.parallelize import prepare
from ithaca.evaluation.generate.greedy import generate
from ithaca.stack import Stack

LONG = os.environ.get("ITHACA_FAMILIES") == "long"
MOST = 12 if LONG else 5
FOUR = Stack(ulysses=2, ring=2, tile=8)
# sinks and windows; a soft cap; keys that later layers share; values of another size
KINDS = {"gpt_oss": FOUR, "gemma2": Stack(ring=2, tile=8), "gemma4_text": Stack(ulysses=2, tile=8), "deepseek_v3": FOUR}


def both(kind: str, stack: Stack, length: int) -> tuple[list[int], list[int]]:
    """Ours, and transformers'."""
    from transformers import AutoModelForCausalLM

    config = smallest(kind)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    randomize(model, 3)
    own = copy.deepcopy(model).eval()
    own.generation_config.eos_token_id = None
    run = prepare(model, replace(stack, engine="module"), device="cpu")
    prompt = torch.randint(0, TEXT, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    ours = generate(run, prompt, most=MOST)
    theirs = own.generate(torch.tensor([prompt]), max_new_tokens=MOST, do_sample=False, pad_token_id=0)
    return ours, theirs[0, length:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_on_several_ranks(workers, kind: str):
    stack = FOUR if LONG else KINDS[kind]
    results = workers.run(both, kind, stack, 61, world=stack.context_ranks)
    ours, theirs = results[0]
    assert all(result[0] == ours for result in results)
    assert ours == theirs and len(ours) == MOST


@pytest.mark.parametrize("length", [1, 40])
def test_alone(length: int):
    ours, theirs = both("cohere2", Stack(shard_parameters=False), length)
    assert ours == theirs


def test_a_state_that_goes_from_token_to_token_is_not_kept():
    with pytest.raises(ValueError, match=r"carries a state from token to token.*let transformers generate"):
        both("qwen3_next", Stack(shard_parameters=False), 5)
