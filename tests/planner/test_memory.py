"""The plan's arithmetic against the dry run, which executes the code: within 5%, and never more than 2% below."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ithaca
import ithaca.engine.layer.cost as layer_cost
from ithaca.engine.cost import RankCost
from ithaca.engine.job import Job
from ithaca.engine.limits import IN_FLIGHT
from ithaca.engine.model.families import FAMILIES
from ithaca.engine.model.presets import PRESETS
from ithaca.engine.model.sizes import ModelSizes, read_sizes, sizes_of
from ithaca.engine.offload import host_cache, transfer
from ithaca.engine.offload.cost import InFlight
from ithaca.engine.sequence import Layout
from ithaca.planner.config import hf_config
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.memory import predict
from ithaca.stack import Stack

K, M = 2**10, 2**20
LONG = os.environ.get("ITHACA_PLANS") == "long"  # make plans
CASES = [
    ("llama32_1b", 16 * K, 1, Stack(recompute="none", tile=None, shard_parameters=False), 0, "fa4"),
    ("llama3_8b", 256 * K, 8, Stack(ulysses=8, heads_per_stage=1, store="host", tile=16384), 0, "fa4"),
    # upper layers on the GPU beside a store; and where backward gathers the embedding ahead of its first layer
    ("llama3_8b", 16 * K, 4, Stack(ulysses=4, store="1 host + 2 gpu", hold=False, recompute="layer"), 0, "fa4"),
    ("llama3_8b", 32 * K, 2, Stack(ulysses=2, heads_per_stage=8, store="host", tile=16384), 16, "fa4"),
    # where the embedding's gradient is the largest; where the second tile of the loss is a short one
    ("llama3_8b", 8 * K, 8, Stack(ulysses=8), 0, "fa4"),
    ("qwen3_32b", 64 * K, 16, Stack(ulysses=8, ring=2), 0, "fa4"),
    # every stage projects the heads of all, to norm them together
    ("olmo3_7b", 128 * K, 4, Stack(ulysses=4, heads_per_stage=2, store="host", tile=16384), 0, "fa4"),
    # upper layers compute nothing again
    ("llama32_1b", 32 * K, 2, Stack(ulysses=2, recompute="2 keep_attention + 1 none", tile=None), 0, "fa4"),
    # adapters, with and without FSDP2; of a mixture, whose experts have none
    ("llama32_1b", 32 * K, 1, Stack(recompute="none", tile=None), 16, "fa4"),
    ("llama3_8b", 16 * K, 1, Stack(recompute="none", tile=None, shard_parameters=False), 16, "fa4"),
    ("qwen3_30b_a3b", 16 * K, 1, Stack(recompute="none", tile=None), 16, "fa4"),
    # a layer that does not hold its input: its pieces have gone when attention's gradients are there
    ("llama3_8b", 128 * K, 8, Stack(ulysses=8, heads_per_stage=2, recompute="layer", store="host", tile=2048, hold=False),
     16, "fa4"),
    # one linear for q, k and v, and one for gate and up
    ("phi4", 16 * K, 2, Stack(ulysses=2, tile=None), 0, "fa4"),
]  # fmt: skip
if LONG:
    CASES += [
        ("llama3_8b", 512 * K, 8, Stack(ulysses=8, heads_per_stage=1, store="host", tile=16384), 0, "fa4"),
        ("llama3_8b", 64 * K, 4, Stack(ulysses=4, store="1 host + 2 gpu", hold=False, recompute="layer"), 0, "fa4"),
        ("llama3_8b", 64 * K, 2, Stack(ulysses=2, heads_per_stage=8, store="host", tile=16384), 16, "fa4"),
        ("llama3_8b", 64 * K, 2, Stack(ulysses=2, heads_per_stage=8, store="host", tile=16384), 0, "fa4"),
        ("mistral_7b", 256 * K, 8, Stack(ulysses=8, recompute="layer", tile=16384), 0, "flash"),
        ("llama32_3b", 128 * K, 1, Stack(heads_per_stage=12, store="host", tile=32768), 0, "cudnn"),
        ("llama32_1b", 64 * K, 1, Stack(tile=16384), 0, "fa4"),
        ("llama3_8b", 512 * K, 8,
         Stack(ulysses=8, heads_per_stage=1, tile=16384, store="host", engine="composed", recompute="layer"), 0, "fa4"),
        ("llama3_8b", 128 * K, 4, Stack(ulysses=4, heads_per_stage=4, store="1 disk + 2 gpu"), 0, "fa4"),
        ("llama3_8b", 128 * K, 4, Stack(ulysses=4, heads_per_stage=4, store="disk", hold=False, tile=16384), 0, "fa4"),
        ("llama3_8b", 128 * K, 2, Stack(ulysses=2, heads_per_stage=8, store="host", tile=16384), 16, "fa4"),
        ("qwen3_32b", 512 * K, 16, Stack(ulysses=8, ring=2, heads_per_stage=2, store="host", tile=16384), 0, "fa4"),
        # logits that are divided; layers that turn nothing
        ("granite33_8b", 64 * K, 2, Stack(ulysses=2, tile=None, recompute="none"), 16, "fa4"),
        ("smollm3_3b", 256 * K, 4, Stack(ulysses=4, heads_per_stage=1, store="host", tile=16384), 0, "fa4"),
        ("phi4", 64 * K, 2, Stack(ulysses=2, heads_per_stage=4, store="host", tile=16384), 16, "fa4"),
        # norms behind attention and MLP, all of them kept
        ("glm4_9b", 16 * K, 1, Stack(recompute="none", tile=None, shard_parameters=False), 0, "fa4"),
        ("glm4_9b", 64 * K, 2, Stack(ulysses=2, heads_per_stage=4, store="host", tile=16384), 16, "fa4"),
        # experts, and sinks
        ("qwen3_30b_a3b", 64 * K, 2, Stack(ulysses=2, tile=None), 0, "fa4"),
        ("gpt_oss_20b", 16 * K, 1, Stack(recompute="none", tile=None, shard_parameters=False), 0, "fa4"),
        ("gpt_oss_20b", 512 * K, 8, Stack(ulysses=2, ring=4, heads_per_stage=2, store="host", tile=16384), 0, "fa4"),
        # where attention is the largest, and tiles are many
        ("mistral_7b", 64 * K, 1, Stack(heads_per_stage=8, store="host"), 0, "flash"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "context", "world", "stack", "lora", "kernel"), CASES, ids=lambda each: str(each)[:60]
)
def test_arithmetic_against_the_code(name: str, context: int, world: int, stack: Stack, lora: int, kernel: str):
    layers = 3 if LONG or isinstance(stack.store, tuple) else 2
    config = hf_config(name)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    sizes = replace(read_sizes(name), layers=layers, windows=read_sizes(name).windows[:layers])
    job = Job(sizes, stack, context, world, kernel=kernel, lora=lora)
    said, ran = predict(job), dry_run(job, config)
    assert -0.02 <= said.peak / ran.peak - 1 <= 0.05
    for stored in ("host", "disk"):
        assert getattr(said, stored) == pytest.approx(getattr(ran, stored), rel=0.02)


SMALL = [(64, 4, 4, 1), (256, 8, 2, 2), (256, 4, 1, 1), (512, 8, 1, 1)]


# with its workspace attention is the largest moment, without it a projection
@pytest.mark.parametrize(
    ("hidden", "heads", "rows", "world", "kernel"),
    [(*each, kernel) for each in SMALL for kernel in ("fa4", "cpu")]
    if LONG
    else [(*SMALL[0], "fa4"), (*SMALL[1], "cpu")],
)
def test_nothing_recomputed_and_hardly_a_vocabulary(hidden: int, heads: int, rows: int, world: int, kernel: str):
    """Else the logits of all tokens are the largest thing there is, and hide the layers."""
    config = hf_config("llama32_1b")
    config.num_hidden_layers, config.vocab_size, config.head_dim = 2, 128, 64
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = hidden, heads, 2
    config.intermediate_size = 2 * hidden
    stack = Stack(recompute="none", tile=None, ulysses=world)
    job = Job(sizes_of(config.to_dict(), "small"), stack, 64 * K, world, rows, kernel)
    said, ran = predict(job), dry_run(job, config)
    assert -0.02 <= said.peak / ran.peak - 1 <= 0.05


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (8, 1), (2, 2), (8, 2), (3, 5)])
def test_tokens_of_a_rank_are_those_of_the_code(ulysses: int, ring: int):
    stack = Stack(ulysses=ulysses, ring=ring)
    job = Job(read_sizes("llama32_1b"), stack, 100_003, ulysses * ring)
    assert RankCost(job).tokens == Layout(100_003, ulysses, ring).local


@pytest.mark.parametrize("name", [name for name, said in PRESETS.items() if said["model_type"] in FAMILIES])
def test_presets_have_the_weights_of_their_models(name: str):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(name))
    assert read_sizes(name).weights == sum(p.numel() for p in model.parameters())


def test_layers_that_differ_are_walked_one_by_one():
    sizes = replace(read_sizes("llama32_1b"), layers=6, windows=(None,) * 6)
    job = Job(sizes, Stack(tile=4096), 128 * K)
    alike = predict(job)
    spelled = predict(replace(job, stack=replace(job.stack, recompute=("keep_attention",) * 6)))
    assert spelled.phases == alike.phases
    fewer = predict(replace(job, stack=replace(job.stack, recompute=("keep_attention",) * 3 + ("layer",) * 3)))
    assert fewer.peak < alike.peak


AHEAD, ALL = 0, 2**30
MANY, HALF = (2**13, 256), (2**16, 64)  # chunks of which a put has many, or half of one, and the tile for that


@pytest.mark.parametrize(
    ("recompute", "kept", "hold", "chunk", "tile"),
    [
        ("layer", AHEAD, True, *MANY),
        ("layer", AHEAD, False, *HALF),
        ("keep_attention", AHEAD, True, *HALF),
        ("keep_attention", AHEAD, False, *MANY),
        ("keep_attention", ALL, True, *MANY),
        ("keep_attention", ALL, False, *HALF),
    ],
)
def test_what_a_disk_store_keeps_near(
    recompute: str, kept: int, hold: bool, chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """What it was given last where that is more, else what it reads ahead."""
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    for module in (host_cache, layer_cost):
        monkeypatch.setattr(module, "HOST_CACHE", kept)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )  # fmt: skip
    stack = Stack(store="disk", recompute=recompute, tile=tile, heads_per_stage=2, hold=hold, shard_parameters=False)
    run = ithaca.prepare(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), stack, scratch=tmp_path, dtype=torch.bfloat16
    )
    batch = run.shard(torch.randint(0, 128, (1, 1024)))
    for _ in range(3):  # it does not grow from step to step
        run.loss(batch).backward()
    memory = predict(Job(sizes_of(config.to_dict(), "small"), stack, 1024))
    held = run.store.host_bytes - run.store.scratch_store.held_bytes
    rest = 6 * chunk if (chunk, tile) == HALF else 0  # of a layer's last put
    assert 0.9 * memory.near <= held <= memory.near + rest
    assert memory.near <= memory.disk == run.store.held_bytes
    assert (held >= memory.disk) == (kept == ALL)
    run.store.close()


def test_a_config_says_what_is_missing(tmp_path: Path):
    with pytest.raises(
        ValueError,
        match="no arithmetic for model_type 'gpt2', only for llama",
    ):
        sizes_of({"model_type": "gpt2"}, "x")
    with pytest.raises(ValueError, match="does not say hidden_size, vocab_size"):
        sizes_of({"model_type": "llama", "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}, "x")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a model's config: it holds a list"):
        read_sizes(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_sizes(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match=r"no model on the Hub \(owner/name\) and no preset"):
        read_sizes("Llama-3.1-8B")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids to ask the Hub"):
        read_sizes("meta-llama/Llama-3.1-8B")
    assert isinstance(read_sizes("qwen3_8b"), ModelSizes) and ithaca.plan is not None


def test_many_puts_at_once_are_as_many_single_ones():
    """What is on its way to a store, against the rule said one put at a time."""
    rng = random.Random(0)
    for _ in range(200):
        flight, single = InFlight(), deque()
        for _ in range(rng.randint(1, 6)):
            nbytes, copied = rng.choice([0, 3, IN_FLIGHT // 7, IN_FLIGHT // 2 + 1, 2 * IN_FLIGHT]), rng.random() < 0.5
            times = rng.randint(1, 20)
            flight.put(nbytes, copied, times)
            for _ in range(times):
                while len(single) >= 2 and sum(each for each, _ in single) > IN_FLIGHT:
                    single.popleft()
                single.append((nbytes, copied))
            assert flight.count == len(single) and flight.total == sum(each for each, _ in single)
            assert flight.copies == sum(each for each, counted in single if counted)
