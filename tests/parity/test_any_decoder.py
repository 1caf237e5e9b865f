"""Models that no table knows, by their own code, on real ranks: loss and every gradient of the untouched model."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.parallelize import prepare
from ithaca.engine.proof import LIMIT, apart, untouched
from ithaca.stack import Stack
from ithaca.verify.case import full_gradients
from ithaca.verify.presets import add_lora

LENGTH = 101
# By the tokens of a row. In the longer one documents begin where a tile of 64 does and one and two tokens before, and one goes on.
DOCUMENTS = {LENGTH: [[40, 1, 60], [7, 94], [101], [50, 51]], 205: [[62, 1, 1, 141], [63, 142], [205], [128, 77]]}


@dataclass(frozen=True)
class Trial:
    kind: str
    stack: Stack
    packed: bool = False
    lora: bool = False
    rows: int = 1
    length: int = LENGTH


def errors_of(trial: Trial, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Collective; complete on rank 0."""
    from transformers import AutoModelForCausalLM

    config = smallest(trial.kind)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    randomize(model, 1)
    model = (add_lora(model, 2) if trial.lora else model).to(dtype)
    own = copy.deepcopy(model)
    # some of them have a row in the table by now
    run = prepare(model.to(device), replace(trial.stack, engine="module"), device=device, dtype=dtype)
    rows = trial.rows * run.mesh.data.size
    ids = torch.randint(0, TEXT, (rows, trial.length), generator=torch.Generator().manual_seed(3))
    documents = DOCUMENTS[trial.length][:rows] if trial.packed else None
    loss = run.loss(run.shard(ids, documents=documents))
    loss.backward()
    gradients = {name: None if grad is None else grad.cpu() for name, grad in full_gradients(run.model).items()}
    if dist.get_rank():
        return {}
    theirs = untouched(own, ids, documents)
    pairs = [(n, gradients[n], g) for n, g in theirs.gradients.items() if g is not None and bool(g.any())]
    return {"loss": apart(loss.detach().cpu(), theirs.loss)} | {n: apart(a, g) for n, a, g in pairs if a is not None}


TRIALS = [
    Trial("gpt_oss", Stack(ulysses=2, heads_per_stage=1, store="host"), packed=True),
    Trial("glm4", Stack(ulysses=2, ring=2, recompute="layer"), lora=True),
    Trial("phi3", Stack(ulysses=2, replicate=2, tile=None), rows=2),
    Trial("olmo3", Stack(ulysses=2, ring=2, shard_parameters=False, recompute="none", engine="module"), packed=True),
    Trial("gemma2", Stack(ulysses=2, ring=2, heads_per_stage=1, tile=9)),
    Trial("gemma4_text", Stack(ulysses=4, store="disk"), packed=True),
    Trial("deepseek_v3", Stack(ulysses=2, ring=2), packed=True, lora=True),
    Trial("cohere2", Stack(ulysses=2, store=("host", "gpu", "gpu", "host")), lora=True),
]
if os.environ.get("ITHACA_FAMILIES") == "long":  # make families
    TRIALS += [
        Trial("granite", Stack(ring=2, tile=9, engine="module")),
        Trial("smollm3", Stack(ulysses=4, store="disk", engine="module"), packed=True),
        Trial("ministral3", Stack(ulysses=4, ring=2, engine="module"), packed=True),
        Trial("ernie4_5", Stack(ulysses=8, heads_per_stage=1), lora=True),
    ]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.kind)
def test_parity(workers, trial: Trial):
    world = max(2, trial.stack.context_ranks * trial.stack.replicate)
    errors = workers.run(errors_of, trial, world=world)[0]
    assert len(errors) > 8
    # angles are float64 here and float32 there, so twice the limit of a proof, which compares like with like
    missed = {name: error for name, error in errors.items() if not error <= 2 * LIMIT}
    assert not missed, missed
