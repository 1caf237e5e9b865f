"""Layers that are alike are added up: the same bytes as if they had run, and the longest context by that count."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from random import Random

import pytest
from transformers import AutoConfig

from ithaca.cli.main import main
from ithaca.engine.job import Job, Memory
from ithaca.engine.limits import IN_FLIGHT
from ithaca.engine.model.sizes import read_sizes, sizes_of
from ithaca.planner import memory
from ithaca.planner.confirm import confirmed
from ithaca.planner.dry_run.alike import Gap, chosen
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.search import plan
from ithaca.stack import Stack

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=1024,
    num_hidden_layers=6, max_position_embeddings=2**24,
)  # fmt: skip
MORE = os.environ.get("ITHACA_PLANS") == "long"  # make plans
LONG = 2**20  # tokens of a rank whose input a store takes longer to take than a layer


CASES = {
    "on the GPU": (Stack(tile=1024), 2048, 1, {}, (6, 4)),
}  # fmt: skip
if MORE:
    CASES |= {
        "host": (Stack(ulysses=4, store="host", heads_per_stage=1, tile=LONG // 2), 4 * LONG, 4, {}, (6, 4)),
        "three blocks": (
            Stack(recompute="5 layer + 2 keep_attention", store="6 host + 1 gpu", tile=LONG // 2), LONG, 1, {}, (7, 6)
        ),
        "nothing recomputed": (Stack(recompute="none", tile=None, shard_parameters=False), 2048, 1, {}, (6, 4)),
        "GPU and host": (Stack(store="5 gpu + 1 host", tile=LONG // 2), LONG, 1, {}, (6, 5)),
        "offloaded, two micro-batches": (Stack(tile=2048), 2048, 1, dict(offload=True, accumulation=2), (6, 4)),
        "disk, composed, LoRA": (
            Stack(ulysses=2, store="disk", engine="composed", recompute="layer", tile=LONG // 2), 2 * LONG, 2, dict(lora=8), (6, 4)
        ),
        "host and GPU": (Stack(store="5 host + 5 gpu", tile=LONG // 2), LONG, 1, {}, (10, 8)),
    }  # fmt: skip


@pytest.mark.parametrize(("stack", "context", "world", "more", "layers"), CASES.values(), ids=CASES)
def test_what_is_added_up_is_what_runs(stack: Stack, context: int, world: int, more: dict, layers: tuple[int, int]):
    config = AutoConfig.for_model("llama", **{**SIZES, "num_hidden_layers": layers[0]})
    job = Job(sizes_of(config.to_dict(), "small"), stack, context, world, **more)
    every, some = dry_run(job, config, every=True), dry_run(job, config)
    assert (every.executed, some.executed) == layers and every.layers == some.layers == layers[0]
    assert (some.host, some.disk) == (every.host, every.disk)
    for phase, by in every.phases.items():  # single gradients are rounded up, their sum is not
        assert sum(some.phases[phase].values()) == pytest.approx(sum(by.values()), rel=1e-3), phase


def test_of_each_block_the_first_and_the_last_two_run():
    whole = [0, 1, 30, 31], [Gap(1, 28)]
    assert chosen(32, Stack(), 0) == whole
    assert chosen(32, Stack(store="host"), IN_FLIGHT // 2) == whole
    every = list(range(32)), []
    assert chosen(32, Stack(store="host"), IN_FLIGHT // 4) == every  # still on its way when the last layer begins
    assert chosen(3, Stack(), 0) == ([0, 1, 2], [])
    stack = Stack(store="7 host + 9 gpu", recompute="6 layer + 10 keep_attention")
    assert chosen(16, stack, 2**40) == ([0, 1, 4, 5, 6, 7, 8, 14, 15], [Gap(1, 2), Gap(6, 5)])
    upper = [*range(9), 14, 15], [Gap(8, 5)]
    assert chosen(16, stack, 0) == upper  # nothing is on its way to the GPU


@pytest.mark.parametrize("off", [0.9, 1.0, 1.07])
def test_the_longest_context_is_where_the_count_says(off: float):
    """The judge sees `off` times what arithmetic sees."""
    found = plan("llama3_8b", gpus="8xH100-80GB", context="1M", host="4TB")
    asked: list[int] = []

    def counted(tokens: int) -> Memory:
        asked.append(tokens)
        return Memory({"backward": {"kept": int(off * (10e9 + 60e9 * tokens / 2**20))}})

    context, tried = confirmed(found, counted, step=2**16)
    assert context is not None and len(asked) == len(set(asked)) <= 7
    by_length = {each.context: each for each in tried}
    assert not by_length[context].excess and by_length[context + 2**16].excess
    assert confirmed(found, lambda tokens: Memory({"backward": {"kept": 10**12}}))[0] is None
    assert replace(found, memory=counted(context)).excess == 0


@pytest.mark.skipif(not MORE, reason="a search by dry runs, 6 s: make plans")
def test_the_command_finds_it(tmp_path, capsys):
    AutoConfig.for_model("llama", **{**SIZES, "hidden_size": 1024, "head_dim": 128}).save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--gpus", "1xRTX4090-4.5GB", "--max-context", "--dry-run", "--json"]
    assert main([*command, "--set", "store=gpu,recompute=layer,tile=65536"]) == 0
    shown = json.loads(capsys.readouterr().out)
    fits = {each["context"]: each["fits"] for each in shown["tried"]}
    assert fits[shown["context"]] and not fits[shown["context"] + 2**16]
    assert shown["dry_run"]["executed"] == 4 and shown["dry_run"]["layers"] == 6


def test_layers_of_two_kinds_as_if_all_were_walked(monkeypatch: pytest.MonkeyPatch):
    """Where copies are large those beside a change tell; where they are small, all are walked."""
    model, random, shorter = read_sizes("llama32_1b"), Random(0), 0
    for _ in range(40):
        kept, on_gpu = random.randrange(1, 16), random.randrange(1, 16)
        recompute = random.choice(["keep_attention", ("layer",) * (16 - kept) + ("keep_attention",) * kept])
        store = (random.choice(["host", "disk"]),) * (16 - on_gpu) + ("gpu",) * on_gpu
        stack = Stack(recompute=recompute, store=store, tile=4096, heads_per_stage=random.choice([None, 1, 4]))
        job = Job(model, stack, random.choice([2**14, 2**18, 2**20, 2**22]), 1, 1)
        shorter += len(memory.walked(job)) < 16
        few = memory.predict(job)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "walked", lambda job: list(range(16)))
            assert memory.predict(job) == few, stack
    assert 10 < shorter < 40
