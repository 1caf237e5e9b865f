"""Plans of models without arithmetic here: a dry run of their own code counts, and is the judge of a short list of stacks."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.base.processes import worker
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.engine.job import Job, Memory
from ithaca.engine.model.presets import PRESETS, preset_config
from ithaca.engine.model.shrink import shrink_config, smallest
from ithaca.engine.model.sizes import ModelSizes, read_sizes
from ithaca.engine.parallelize import prepare
from ithaca.planner.dry_run.kernels import DryMixers
from ithaca.planner.dry_run.run import DryRun, NotCounted, dry_run, shortened
from ithaca.planner.hardware import parse_gpus
from ithaca.planner.ladder import ladder
from ithaca.planner.own import _first, attention_of, longest, own_sizes, own_stacks
from ithaca.planner.plan import Plan
from ithaca.planner.search import plan
from ithaca.planner.text import describe
from ithaca.stack import Stack
from ithaca.training import automatic
from ithaca.training.automatic import planned_apart

APART = Stack(engine="module", tile=None, store="host", ulysses=2, recompute="layer")


@pytest.fixture(scope="module")
def oss() -> Any:
    """gpt-oss: experts, sinks, and a window in all layers but one."""
    config = shrink_config(preset_config("gpt_oss_20b"), layers=6)
    config.layer_types = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3
    return config


@pytest.fixture(scope="module")
def glm() -> Any:
    """GLM-4, five layers that are alike."""
    return shrink_config(preset_config("glm4_9b"), layers=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "small_glm"
    shrink_config(preset_config("glm4_9b"), layers=2).save_pretrained(path)
    return path


def job_of(config: Any, stack: Stack, world: int = 1, context: int = 256) -> Job:
    return Job(own_sizes(config, "small"), stack, context, world, kernel="cudnn", windowed="flash")


@pytest.mark.skipif(
    os.environ.get("ITHACA_PLANS") != "long", reason="every layer of a model executed, 14 s: make plans"
)
def test_layers_that_are_alike_hold_what_was_executed(oss: Any):
    job = job_of(oss, APART, 2)
    some, every = dry_run(job, oss), dry_run(job, oss, every=True)
    assert (some.executed, some.layers, every.executed) == (5, 6, 6), "one of them has four others of its kind"
    assert some.phases == every.phases and (some.host, some.snapshot) == (every.host, every.snapshot)
    states = some.phases["forward"]["optimizer"]
    assert abs(some.snapshot - states * 3 // 2) < 0.01 * states, "the trained weights and two averages of them, in fp32"


def test_layers_below_all_adapters_run():
    """An ordinary forward: they are not like those of their kind above, which keep what backward wants."""
    config = shrink_config(preset_config("glm4_9b"), 8)
    job = replace(job_of(config, Stack(engine="module", tile=64)), lora=2, targets=("layers.2.self_attn.q_proj",))
    some = dry_run(job, config)
    assert (some.executed, some.layers) == (7, 8)
    if os.environ.get("ITHACA_PLANS") == "long":
        assert some.phases == dry_run(job, config, every=True).phases


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="every tile of a model executed, 20 s: make plans")
@pytest.mark.parametrize(
    ("kind", "heads"), [("qwen3_5_text", None), ("qwen3_5_text", 1), ("glm4_moe", None), ("bamba", None)]
)
def test_tiles_that_are_alike_hold_what_was_executed(kind: str, heads: int | None):
    """By tiles of its mixers and MLPs, a short one last, and by a scan's heads; every tile and stage against some."""
    config = smallest(kind)
    stack = Stack(engine="module", tile=64, heads_per_stage=heads, recompute="keep_attention", store="gpu")
    some, every = (dry_run(job_of(config, stack, 1, 8 * 64 + 20), config, every=each) for each in (False, True))
    assert {p: sum(by.values()) for p, by in some.phases.items()} == {
        p: sum(by.values()) for p, by in every.phases.items()
    }


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="scans walked chunk by chunk, 20 s: make plans")
@pytest.mark.parametrize("recompute", ["layer", "keep_attention"])
def test_the_stand_in_of_a_scan_takes_what_its_formula_does(recompute: str, monkeypatch: pytest.MonkeyPatch):
    config = smallest("qwen3_5_text")
    job = job_of(config, Stack(engine="module", ulysses=2, recompute=recompute, tile=512), 2, 2048)
    stood_in = dry_run(job, config)
    monkeypatch.setattr(DryMixers, "scan", lambda self, call, tensors: inspect.unwrap(call.function))
    walked = dry_run(job, config)
    for phase in ("forward", "backward"):
        a, b = (sum(run.phases[phase].values()) for run in (stood_in, walked))
        assert -0.01 * b < a - b < 0.1 * b, (phase, a, b, "no less, and little more")


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="a dry run, a proof and a step, 6 s: make plans")
def test_a_store_holds_what_was_counted(glm: Any):
    """On the CPU the module engine is the same code, and what waits in a store is what it will be."""
    stack = Stack(engine="module", tile=128, heads_per_stage=2, store="host", shard_parameters=False)
    counted = dry_run(job_of(glm, stack), glm)
    assert (counted.executed, counted.layers) == (4, 5)
    model = AutoModelForCausalLM.from_config(glm, dtype=torch.bfloat16, trust_remote_code=False)
    run = prepare(model, stack, device="cpu", dtype=torch.bfloat16)
    run.loss(run.shard(torch.zeros(1, 256, dtype=torch.int64))).backward()
    assert counted.host == run.report()["store"].bytes_out


def test_a_slice_has_the_first_layers_and_their_lists():
    smol = shortened(preset_config("smollm3_3b"), 5)
    assert smol.num_hidden_layers == 5 and smol.no_rope_layers == [1, 1, 1, 0, 1] and smol.no_rope_layer_interval == 4
    assert shortened(preset_config("olmo3_7b"), 4).layer_types == ["sliding_attention"] * 3 + ["full_attention"]


def test_layers_with_heads_of_their_own_count_with_the_largest():
    config = smallest("gemma4_text")
    sizes = {layer["head_dim"] for layer in config.to_dict()["per_layer_config"].values()} | {
        config.to_dict()["head_dim"]
    }
    assert len(sizes) > 1 and attention_of(config)[0] == max(sizes)


# -- the plan ------------------------------------------------------------------------------------------------------------


def test_the_answer_says_how_it_was_counted(folder: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch):
    workers.run(os.getpid, world=1)
    # a fork of the pool's template, which has done the imports
    monkeypatch.setattr(automatic, "Worker", partial(automatic.Worker, template=worker._template))
    config = AutoConfig.from_pretrained(folder)
    found = planned_apart(
        "small_glm", config=config, gpus=parse_gpus("2xH100-80GB"), context=512, rows=1
    )  # its own process
    assert found.fits and found.stack.engine == "module" and found.stack.ulysses == 2 and found.executed == 2
    (counted,) = [line for line in describe(found) if "counted" in line]
    assert (
        "by a dry run of the model's own code (2 of 2 layers executed" in counted and "no time is predicted" in counted
    )
    whole = found.json()
    assert whole["time"] is None and whole["counted_by"].startswith("a dry run of its own code")
    assert found.model.weights == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    with pytest.raises(ValueError, match="small_glm has no arithmetic here, so no time is predicted"):
        _ = found.speed


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="a whole profile, 7 s: make plans")
def test_the_command_and_a_profile(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # by its own code, which it would not run by itself: GLM-4 has arithmetic
    given = [str(folder), "--gpus", "1xH100", "--context", "256", "--stack.recompute", "layer", "--stack.tile", "128"]
    more = ["--stack.engine", "module", "--cpu", "--steps", "1", "--layers", "1", "--out", str(tmp_path), "--json"]
    code = main(["profile", *given, *more])
    out = capsys.readouterr()
    assert code == 0 and "dry run at 256, recompute=layer" in out.err
    profile = json.loads(out.out)
    assert profile["layers"] == 1 and profile["planned"]["step"] is None
    assert profile["phases"]["load"]["parameters"] == profile["planned"]["phases"]["load"]["parameters"]


def test_what_cannot_be_run_is_refused_with_the_reason(oss: Any, tmp_path: Path):
    smallest("mamba").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"MambaForCausalLM has no arithmetic of its own here, .* so it is refused: "):
        plan(str(tmp_path), gpus="1xH100", context=512)
    with pytest.raises(ValueError, match="the config of mamba names no attention heads"):
        attention_of(AutoConfig.from_pretrained(tmp_path))
    smallest("exaone4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no arithmetic for model_type 'exaone4'"):
        ladder(str(tmp_path), gpus="1xH100", context=512)
    assert main(["bench", str(tmp_path), "--cpu", "1"]) == 2
    one_by_one = shortened(oss, 2)
    one_by_one._experts_implementation = "eager"
    with pytest.raises(NotCounted, match=r"the code of gpt_oss asks for numbers .* a stack"):
        dry_run(job_of(one_by_one, APART, 2), one_by_one)


# -- which stack ---------------------------------------------------------------------------------------------------------

SIZES = ModelSizes("x", "glm4", 4, 64, 96, 32, 2, 16, 257, False, (None,) * 4, parameters=1000)


def stacks(gpus: str, context: int = 2**20, rows: int = 1, **pinned: Any) -> list[Stack]:
    hardware = parse_gpus(gpus)
    return list(own_stacks(Job(SIZES, Stack(), context, hardware.count, rows), hardware, pinned))


def test_the_list_begins_with_what_computes_least():
    found = stacks("8xH100")
    assert {(stack.ulysses, stack.ring, stack.engine) for stack in found} == {(8, 1, "module")}
    assert (found[0].recompute, found[0].store, found[0].tile, found[0].heads_per_stage) == (
        "keep_attention",
        "gpu",
        16384,
        None,
    )
    assert (found[-1].recompute, found[-1].store, found[-1].tile, found[-1].heads_per_stage) == (
        "layer",
        "host",
        2048,
        1,
    )
    assert stacks("8xH100", 2**16)[0] == Stack(ulysses=8, recompute="none", tile=None, engine="module")
    assert {(s.ulysses, s.ring) for s in stacks("2x8xH100")} == {(8, 2)}, "a ring between machines"
    assert {(s.ulysses, s.ring) for s in stacks("8xH100", rows=4)} == {(2, 1)}, "each row with two GPUs"
    assert {s.store for s in stacks("8xH100", store="host", ulysses=4)} == {"host"}
    assert {(s.ulysses, s.ring) for s in stacks("8xH100", ulysses=4)} == {(4, 2)}
    assert stacks("8xH100", ulysses=3) == []


def counted(
    stack: Stack, gpu: int, host: int = 0, kept: int = 0, context: int = 1, states: int = 0, away: int = 0
) -> Plan:
    hardware = replace(parse_gpus("1xH100"), host=100)
    hardware = replace(hardware, gpu=replace(hardware.gpu, memory=100))
    phases = {
        "loss": {"kept": kept},
        "backward": {"kept": gpu},
        "step": {"parameters": states // 2, "gradients": states // 2},
    }
    memory = DryRun(phases, host=host, executed=4, offloaded=away)
    found = Plan(Job(SIZES, stack, context), hardware, memory, None, False, around=False, executed=4)
    found.fits = not found.excess
    return found


@pytest.mark.parametrize(
    ("needs", "asked", "chosen"),
    [
        ([90], [0], 0),
        ([120, 90], [0, 1], 1),
        ([900, 90], [0, 3], 3),  # what is kept is too much for every stack that keeps it on the GPU
        ([120, 110, 105, 102, 90], [0, 1, -1, 2, 3, 4], 4),
        ([120, 110, 105, 102, 101, 101, 101, 101, 101], [0, 1, -1], -1),
    ],
)
def test_no_more_is_counted_than_must_be(needs: list[int], asked: list[int], chosen: int):
    listed, looked = stacks("8xH100"), []

    def look(stack: Stack) -> Plan:
        looked.append(listed.index(stack))
        need = needs[0] if stack == listed[0] else needs[min(looked[-1], len(needs) - 1)]
        return counted(stack, need, kept=need if need > 500 else 0)

    found = _first(listed, look, only_fit=False)
    assert looked == [place % len(listed) for place in asked] and found.stack == listed[chosen]


@pytest.mark.parametrize(("states", "away", "counts"), [(0, 0, 3), (90, 80, 3), (102, 0, 1), (0, 90, 1)])
def test_weights_and_states_that_do_not_fit_are_counted_once(states: int, away: int, counts: int):
    listed, looked = stacks("8xH100"), []

    def look(stack: Stack) -> Plan:
        looked.append(stack)
        return counted(stack, 120, states=states, away=away)

    assert not _first(listed, look, only_fit=False).fits and len(looked) == counts


def test_the_longest_context_takes_few_counts():
    looked: list[int] = []

    def look(tokens: int) -> Plan:
        looked.append(tokens)
        return counted(Stack(), 37 + tokens // 1000, context=tokens)

    assert longest(look, 8, 100).context == 63_900 and len(looked) <= 6
    assert not longest(lambda tokens: counted(Stack(), 101, context=tokens), 4, 100).fits
    assert isinstance(counted(Stack(), 1).memory, Memory)


@pytest.mark.parametrize(
    ("held", "host", "longest_of", "asked"),
    [
        ((37, 13), 10, 87_000, (4, 3)),  # further with states on the host; the lines of the others tell where
        ((37, 37), 10, 63_000, (4, 1)),  # they free nothing
        ((37, 13), 90, 63_000, (4, 1)),  # the host has no room for them
        ((102, 13), 10, 87_000, (1, 4)),  # no length fits with them here
        ((102, 102), 10, 0, (2, 3)),  # nor anywhere
    ],
)
def test_states_move_to_the_host_where_that_reaches_further(
    held: tuple[int, int], host: int, longest_of: int, asked: tuple[int, int]
):
    looked: tuple[list[int], list[int]] = ([], [])

    def look(away: bool, tokens: int) -> Plan:
        looked[away].append(tokens)
        states = 0 if away else held[0] - held[1]
        fits = held[away] + tokens // 1000
        return counted(Stack(), fits, host * away, context=tokens, states=102 if held[away] > 100 else states)

    found = longest(partial(look, False), 8, 1000, partial(look, True))
    assert (found.context if found.fits else 0, tuple(map(len, looked))) == (longest_of, asked)


# -- presets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt_oss_20b", 20.91),
        ("glm4_9b", 9.40),
        ("phi4", 14.66),
        ("granite33_8b", 8.17),
        ("smollm3_3b", 3.08),
        ("olmo3_7b", 7.30),
    ],
)
def test_presets_have_the_published_number_of_weights(name: str, billions: float):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(preset_config(name))
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == billions


def test_the_arithmetic_knows_its_own():
    assert round(read_sizes("qwen3_30b_a3b").weights / 1e9, 1) == 30.5 and "qwen3_30b_a3b" in PRESETS
