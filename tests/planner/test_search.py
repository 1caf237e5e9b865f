"""The search: the fastest stack that fits, the nearest that would, and words for both."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import ithaca
from ithaca.base.units import format_bytes, parse_tokens
from ithaca.cli.main import main
from ithaca.engine.job import Job
from ithaca.planner.candidates import candidates
from ithaca.planner.gpus import GPUS
from ithaca.planner.hardware import parse_gpus
from ithaca.planner.memory import predict
from ithaca.planner.plan import HOST_SHARE
from ithaca.planner.search import AT_EASE, LEANER, NEARLY, _Asked, _families, max_context, plan
from ithaca.planner.speed import estimate
from ithaca.planner.text import beside, describe
from ithaca.stack import Stack

EIGHT = dict(gpus="8xH100-80GB", host="2TB", disk="20TB")


def test_it_is_the_fastest_of_all_that_fit():
    found = plan("llama3_8b", context="1M", **EIGHT)
    hardware = found.hardware
    asked = _Asked(found.job, hardware)
    others = [asked.look(stack) for stack in candidates(found.model, hardware, found.context, 1, {})]
    fitting = [each for each in others if each.fits]
    assert found.fits and 1 < len(fitting) <= len(others)
    assert found.speed.seconds == min(each.speed.seconds for each in fitting)


@pytest.mark.parametrize("disk", [None, "20TB"])
@pytest.mark.parametrize(
    ("model", "gpus"), [("llama3_8b", "8xH100"), ("qwen3_32b", "2x8xH100"), ("llama32_1b", "1xH200")]
)
def test_the_last_candidate_asks_least_of_the_gpu(model: str, gpus: str, disk: str | None):
    """What lets the search give up early."""
    found = plan(model, context="2M", gpus=gpus, disk=disk, advise=False)
    asked = _Asked(found.job, found.hardware)
    others = [asked.look(stack) for stack in candidates(found.model, found.hardware, found.context, 1, {})]
    assert others[-1].peak <= NEARLY * min(each.peak for each in others)


@pytest.mark.parametrize(
    ("model", "gpus", "context"),
    [("llama32_1b", "8xH100", "4M"), ("qwen3_32b", "8xH100", "64K"), ("llama3_8b", "2x8xH100", "4M")],
)
def test_a_family_is_judged_by_its_leanest(model: str, gpus: str, context: str):
    """What lets the search leave out a family unseen: none in it needs much less, and all keep the same elsewhere."""
    found = plan(model, context=context, gpus=gpus, disk="20TB", advise=False)
    asked = _Asked(found.job, found.hardware)
    families = _families(list(candidates(found.model, found.hardware, found.context, 1, {})))
    assert len(families) == 11 and max(map(len, families)) > 4
    for family in families:
        looks = [asked.look(stack) for stack in family]
        assert asked.leanest(family).peak <= LEANER * min(each.peak for each in looks)
        assert len({(each.memory.host, each.memory.disk) for each in looks}) == 1


@pytest.mark.parametrize("rows", [1, 16])
def test_few_tokens_a_gpu_may_be_computed_again_too(rows: int):
    """At 8K eight GPUs have 1,024 tokens each, fewer than the shortest tile."""
    for recompute in ("keep_attention", "layer"):
        found = plan("llama3_8b", context="8K", rows=rows, recompute=recompute, **EIGHT)
        assert found.fits and found.stack.recompute == recompute and found.stack.tile is not None
    assert plan("llama3_8b", context="8K", rows=rows, **EIGHT).fits


def test_where_links_set_the_pace_nothing_is_computed_twice():
    found = plan("llama3_8b", context="8K", gpus="2x8xH100-80GB")
    assert found.speed.bound_by == "links" and found.stack.recompute == "none"


def test_longer_needs_more_techniques():
    short, middle, long = (
        plan("llama3_8b", context=context, gpus="8xH100-80GB", host="1TB", disk="20TB")
        for context in ("32K", "1M", "8M")
    )
    assert short.stack.recompute == "none" and short.stack.store == "gpu"
    assert middle.stack.recompute == "keep_attention" and middle.stack.store == "host" and middle.stack.ulysses == 8
    assert long.stack.store == "disk" and long.stack.heads_per_stage in (1, 2)
    for each in (short, middle, long):
        assert each.fits and each.peak <= each.budget
        assert {name for name, _, _ in each.reasons} >= {"recompute", "store", "attention"}
        assert not each.stack.violations(8)


def test_as_many_layers_keep_attention_as_there_is_room_for():
    options = dict(gpus="1xH200", context="1M", host="134GB", store="host")
    found = plan("llama32_1b", **options)
    kept = found.stack.recompute
    assert isinstance(kept, tuple) and len(kept) == 16 and kept == tuple(sorted(kept, reverse=True))
    one_more = ("layer",) * (kept.count("layer") - 1) + ("keep_attention",) * (kept.count("keep_attention") + 1)
    assert found.fits and not plan("llama32_1b", **options, stack=replace(found.stack, recompute=one_more)).fits
    for recompute in ("layer", "keep_attention"):  # any uniform choice is slower or does not fit
        other = plan("llama32_1b", **options, recompute=recompute)
        assert not other.fits or other.speed.seconds > found.speed.seconds
    assert Stack(recompute=found.stack.words("recompute")) == Stack(recompute=kept)


def test_as_many_layers_compute_nothing_again_as_there_is_room_for():
    options = dict(gpus="1xH200", context="128K", host="1TB")
    found, uniform = plan("llama32_1b", **options), plan("llama32_1b", **options, recompute="keep_attention")
    assert found.fits and found.speed.seconds < 0.96 * uniform.speed.seconds
    some = found.stack.recompute.count("none")
    assert list(found.stack.recompute) == ["keep_attention"] * (16 - some) + ["none"] * some and 8 <= some < 16
    one_more = ("keep_attention",) * (15 - some) + ("none",) * (some + 1)
    other = plan("llama32_1b", **options, stack=replace(found.stack, recompute=one_more))
    assert found.peak <= AT_EASE * found.budget < other.peak
    assert "room for all activations of" in "\n".join(describe(found, explain=True))


def test_fewer_heads_at_a_time_where_that_lets_more_layers_keep_attention():
    found = plan("llama3_8b", context="2M", gpus="8xH100-80GB", host="625GB")
    assert found.fits and found.stack.heads_per_stage is not None and "keep_attention" in found.stack.recompute
    asked, layers = _Asked(found.job, found.hardware), found.model.layers
    for heads in (None, 2, 1):
        for keep in range(1, layers):
            mixed = ("layer",) * (layers - keep) + ("keep_attention",) * keep
            other = asked.fit(replace(found.stack, heads_per_stage=heads, recompute=mixed, store="host"))
            assert not other.fits or other.speed.seconds >= found.speed.seconds


def test_upper_layers_stay_on_the_gpu_where_the_host_is_too_small():
    options = dict(gpus="1xH200", context="1M", host="64GB")
    found = plan("llama32_1b", **options)
    store = found.stack.store
    assert found.fits and isinstance(store, tuple) and len(store) == 16 and store == tuple(sorted(store, reverse=True))
    one_less = ("host",) * (store.count("host") + 1) + ("gpu",) * (store.count("gpu") - 1)
    other = plan("llama32_1b", **options, stack=replace(found.stack, store=one_less))
    assert other.shares["host memory"] > 1 >= found.shares["host memory"], "as few as it takes"
    assert found.memory.host < other.memory.host and found.memory.peak > other.memory.peak
    for alone in ("gpu", "host"):
        other = plan("llama32_1b", **options, store=alone)
        assert not other.fits or other.speed.seconds > found.speed.seconds
    assert Stack(store=found.stack.words("store")) == Stack(store=store)
    assert "pinned host memory; there is no room for the others" in "\n".join(describe(found))
    longer = dict(gpus="1xH200", context="2M", host="128GB", advise=False)
    assert plan("llama32_1b", **longer).fits and not plan("llama32_1b", **longer, store="host").fits


def test_what_the_host_and_the_gpu_have_room_for_together():
    """Too little for all attention outputs: both fields differ from layer to layer."""
    options = dict(gpus="1xH200", context="1536K", host="128GB")
    found = plan("llama32_1b", **options)
    assert found.fits and isinstance(found.stack.recompute, tuple) and isinstance(found.stack.store, tuple)
    assert found.speed.seconds < plan("llama32_1b", **options, store="host").speed.seconds


def test_one_for_each_layer_is_one_for_each_layer():
    with pytest.raises(ValueError, match=r"store='1 host [+] 2 gpu' names 3 layers, but the model has 16"):
        plan("llama32_1b", gpus="1xH200", context="64K", store="1 host + 2 gpu")
    with pytest.raises(ValueError, match="recompute='2 layer' names 2 layers"):
        plan("llama32_1b", gpus="1xH200", context="64K", stack=Stack(recompute=("layer", "layer")))


def test_what_is_given_stays():
    found = plan("llama3_8b", context="1M", **EIGHT, heads_per_stage=2, store="disk", ring=2, ulysses=4)
    assert (found.stack.heads_per_stage, found.stack.store, found.stack.ring) == (2, "disk", 2)
    assert dict((name, why) for name, _, why in found.reasons)["store"] == "given"


def test_the_longest_context():
    step = 2**19
    found = max_context("llama3_8b", step=step, **EIGHT)
    assert found.fits and found.context >= 10 * 2**20
    assert not plan("llama3_8b", context=found.context + step, advise=False, **EIGHT).fits
    older = max_context("llama3_8b", step=step, **EIGHT, engine="composed", recompute="layer", heads_per_stage=1)
    assert 5 * 2**20 <= older.context < found.context, "rungs 1 to 6 reach 5M; the streamed layer goes past that"


def test_a_model_that_no_context_is_short_enough_for():
    none = max_context("llama31_70b", gpus="1xRTX4090", offload_optimizer=False)
    assert not none.fits and "nothing that was tried" in none.advice[0]


def test_host_memory_that_is_short_is_named():
    found = plan("llama3_8b", gpus="8xH100-80GB", context="5M", host="1.1TB")
    assert not found.fits and found.peak < found.budget  # of those that do not fit, the nearest
    assert len(found.shortages) == 1 and found.shortages[0].startswith(f"host memory ({format_bytes(found.host)} a")
    need = next(line for line in found.advice if "of host memory a machine" in line).split(" of ")[0]
    assert plan("llama3_8b", gpus="8xH100-80GB", context="5M", host="1.7TB").fits and need == "1.7 TB"


def test_host_memory_that_nobody_named_is_assumed_and_said():
    """A card of 24 GB does not stand in a machine with 300 GB."""
    options = dict(gpus="1xRTX4090", lora=16, advise=False)
    unsaid, said = (plan("llama32_3b", context="832K", host=host, **options) for host in (None, "1TB"))
    assert unsaid.hardware.assumed == ("host",) and unsaid.hardware.host == GPUS["rtx4090"].host
    assert not unsaid.fits and said.fits and said.host > 3e11 and said.hardware.assumed == ()
    assert any("an assumed" in each for each in unsaid.shortages if each.startswith("host memory"))
    longest = max_context("llama32_3b", gpus="1xRTX4090", lora=16)
    assert longest.fits and longest.context < 832 * 2**10 and longest.host <= HOST_SHARE * longest.hardware.host
    condition = f"if a machine has {format_bytes(longest.host / HOST_SHARE)} of host memory (assumed "
    assert condition in describe(longest)[0] and "give --host)" in describe(longest)[0]
    assert longest.json()["assumed"] == longest.assumed and "of host memory a machine" in longest.assumed[0]
    assert not plan("llama3_8b", gpus="8xH100-80GB", context="1M", host=0, store="host", advise=False).fits
    node = plan("llama3_8b", gpus="8xH100-80GB", context="1M")
    assert node.fits and 2e12 < node.hardware.host < 2.3e12, "as such nodes have"
    given = plan("llama3_8b", gpus="8xH100-80GB", context="1M", host="2TB")
    assert " if " not in describe(given)[0] and not any("host memory" in each for each in given.assumed)


def test_scratch_space_that_nobody_named_is_assumed_and_said():
    stack = Stack(ulysses=8, heads_per_stage=1, store="disk")
    found = plan("llama3_8b", gpus="8xH100-80GB", context="1M", stack=stack)
    assert found.fits and "disk" in found.hardware.assumed and found.disk > 4e11
    assert f"{format_bytes(found.disk)} of scratch space (assumed " in describe(found)[0]
    assert not plan("llama3_8b", gpus="8xH100-80GB", context="32M", stack=stack).shares["disk"] < 1
    assert "disk" not in plan("llama3_8b", gpus="8xH100-80GB", context="1M").shares, "no disk is used that nobody named"


def test_a_context_the_model_was_not_made_for_is_said():
    found = plan("llama3_8b", gpus="8xH100-80GB", context="1M")
    remedy = "--model.rope.rope_type yarn --model.rope.factor 128 --model.rope.original_max_position_embeddings 8192"
    assert found.too_long is not None and remedy in found.too_long and found.json()["too_long"] == found.too_long
    assert any("was made for 8,192 positions" in line and remedy in line for line in describe(found))
    short = plan("llama3_8b", gpus="8xH100-80GB", context="8K")
    assert short.too_long is None and not any("was made for" in line for line in describe(short))


def test_the_advice_can_be_typed_back(capsys: pytest.CaptureFixture[str]):
    """Rotary settings that a plan names are options of it; a name on the Hub is its preset; --lora has a usual rank."""
    asked = ["Qwen/Qwen3-8B", "--gpus", "1xH200", "--context", "512K", "--host", "512GB", "--lora"]
    code, out, err = run(capsys, *asked)
    assert code == 0 and err == "ithaca: Qwen/Qwen3-8B is planned as the preset qwen3_8b has it\n"
    assert out.startswith("qwen3_8b (8.19B parameters), LoRA rank 16 in bf16, at 512K tokens on 1xH200-141GB: fits")
    assert "85% may be pinned" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  rotary"))
    advice = line.partition(" needs ")[2].partition(",")[0].split()
    assert advice[-1] == "32768" and advice[-3] == "16", "what Qwen3 was pretrained at; its config has room for 40,960"
    code, out, _ = run(capsys, *asked, *advice)
    assert code == 0 and "rotary" not in out
    code, _, err = run(capsys, *asked, *advice[:-3], "2", *advice[-2:])
    assert code == 2 and "model.rope.factor" in err


def test_the_rows_of_memory_add_up():
    found = plan("llama3_8b", context="1M", **EIGHT)
    _, head, *rows = describe(found)
    amounts = [row.split()[:2] for row in rows if row.startswith(" " * 12)]
    assert head.startswith("  GPU") and "everything else" in rows[len(amounts) - 1]
    assert sum(float(number) for number, _ in amounts) == pytest.approx(found.peak / 1e9, abs=0.05 * len(amounts))


def test_where_nothing_fits_it_says_what_would():
    found = plan("llama31_70b", context="128K", gpus="8xH100", host="1TB")
    assert not found.fits
    text = "\n".join(found.advice)
    assert "32xH100" in text and "LoRA" in text
    tight = plan("llama32_1b", context="4M", gpus="1xH200", host="64GB")
    assert not tight.fits and any("store: disk with" in each for each in tight.advice)
    shorter = next(each for each in tight.advice if each.startswith("a context of")).split()[3].rstrip(":")
    assert plan("llama32_1b", context=shorter, gpus="1xH200", host="64GB").fits
    assert not plan("llama32_1b", context=parse_tokens(shorter) * 5 // 4, gpus="1xH200", host="64GB").fits


def test_the_published_ladder():
    """Llama3-8B, 8 GPUs, 3M tokens: Untied Ulysses takes a third off plain Ulysses' attention (published: 33.0 to 19.5 GiB)."""
    base = dict(ulysses=8, engine="composed", recompute="layer", store="host", tile=4096)
    sizes = plan("llama3_8b", context="3M", **EIGHT).model
    plain, untied = (predict(Job(sizes, Stack(**base, heads_per_stage=heads), 3 * 2**20, 8)) for heads in (None, 1))
    assert untied.peak < 0.85 * plain.peak


@pytest.mark.parametrize(
    ("context", "stack", "kernel", "measured"),
    [
        ("16K", Stack(recompute="none", tile=None, shard_parameters=False), "fa4", 45_622),
        ("64K", Stack(tile=8192, shard_parameters=False), "fa4", 20_803),
        ("256K", Stack(heads_per_stage=8, store="host", tile=8192, shard_parameters=False), "cudnn", 6_119),
    ],
)
def test_time_beside_what_was_measured(context: str, stack: Stack, kernel: str, measured: float):
    """Llama-3.2-1B shape on one H200 (benchmarks/results/2026-11-15-h200.md). The rates come from there: this guards the sums."""
    found = plan("llama32_1b", gpus="1xH200", context=context, stack=stack, kernel=kernel)
    assert found.speed.tokens_per_second == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("context", "kernel", "measured"), [("1M", "fa4", 603), ("1M", "cudnn", 537), ("3M", "fa4", 205)]
)
def test_time_of_a_rank_of_eight(context: str, kernel: str, measured: float):
    """Llama3-8B shape as rank 0 of 8 on an H200 (seventh round of the results)."""
    stack = Stack(ulysses=8, heads_per_stage=1, store="host")
    tokens = parse_tokens(context)
    job = Job(plan("llama3_8b", context="1M", **EIGHT).model, stack, tokens, 8, kernel=kernel)
    found = estimate(job, parse_gpus("8xH200"))
    assert found.seconds - found.parts["links"] == pytest.approx(tokens / 8 / measured, rel=0.05)
    assert found.bound_by == "attention"


@pytest.mark.parametrize(
    ("text", "count", "memory"),
    [
        ("8xH100-80GB", 8, 84_900_000_000),
        ("H200", 1, GPUS["h200"].memory),
        ("2x8xA100-40GB", 16, 40_000_000_000),
        ("1xRTX4090", 1, 24_000_000_000),
        ("2xA6000", 2, 48_000_000_000),
        ("4 x H100 - 64GiB".replace(" - ", "-"), 4, 64 * 2**30),
        ("1xA40-8e10B".replace("8e10B", "48GB"), 1, 48_000_000_000),
    ],
)
def test_gpus(text: str, count: int, memory: int):
    found = parse_gpus(text)
    assert (found.count, found.gpu.memory) == (count, memory)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("0xH100", "has no GPU"),
        ("8xTPU", "not in the table"),
        ("8xH100-80XB", "is not a number of bytes"),
        ("8xH100-80", "does not name GPUs"),
        ("2x4090", r"does not name GPUs.*did you mean 2xRTX4090\?"),
        ("", "does not name GPUs"),
        ("8xH100-5MB", "less than 1 GB"),
    ],
)
def test_gpus_that_make_no_sense(gpus: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse_gpus(gpus)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(capsys):
    code, out, _ = run(capsys, "llama3_8b", "--gpus", "8xH100-80GB", "--context", "1M", "--host", "1TB")
    assert code == 0 and "fits" in out and "store: host" in out and "tokens/s per GPU; bound by attention" in out
    code, out, _ = run(
        capsys, "llama3_8b", "--gpus", "8xH100", "--context", "1_048_576", "--json", "--set", "tile=8192"
    )
    shown = json.loads(out)
    assert code == 0 and shown["plan"] == 1 and shown["stack"]["tile"] == 8192 and shown["context"] == 2**20
    assert shown["peak"] == max(sum(by.values()) for by in shown["phases"].values())
    code, out, _ = run(capsys, "llama31_70b", "--gpus", "1xH100", "--context", "8K")
    assert code == 5 and "does not fit" in out and "what would fit" in out
    code, out, _ = run(
        capsys,
        "llama3_8b",
        "--gpus",
        "8xH100",
        "--context",
        "3M",
        "--compare",
        "engine=composed,recompute=layer",
        "--disk",
        "9TB",
    )
    assert code == 0 and "this" in out and "composed" in out
    asked = ["llama32_1b", "--gpus", "1xH200", "--context", "8K", "--lora", "8", "--lora-targets", "q_proj,o_proj"]
    code, out, _ = run(
        capsys, *asked, "--offload-optimizer", "--rows", "4", "--accumulation", "2", "--json", "--dry-run"
    )
    shown = json.loads(out)
    assert code == 0 and shown["lora_targets"] == ["q_proj", "o_proj"] and shown["offload_optimizer"] is True
    assert shown["host"] == pytest.approx(shown["dry_run"]["host"], rel=0.02) and shown["accumulation"] == 2
    code, out, _ = run(
        capsys, "llama32_1b", "--gpus", "1xH200", "--context", "8K", "--explain", "--dry-run", "--layers", "2"
    )
    assert code == 0 and "memory by phase" in out and "dry run" in out and "2 layers executed" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothere", "--gpus", "8xH100", "--context", "1M"], "no preset"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1X"], "is not a number of tokens"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1"], "at least 2 tokens"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--set", "tiles=3"], "is not a field of the stack"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--set", "ulysses=3"], "no stack is possible"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--set", "store=tape"], "store='tape' is unknown"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--optimizer", "sgd"], "optimizer='sgd' is unknown"),
        (["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--lora-targets", "q_proj"], "give --lora RANK too"),
        (
            ["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--lora", "8", "--lora-targets", "q"],
            "no linear layer called q",
        ),
        (
            ["llama3_8b", "--gpus", "8xH100", "--context", "1M", "--rows", "3", "--accumulation", "2"],
            "into 2 micro-batches",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and words in err and not out and len(err.splitlines()) == 1


def test_plans_ladders_and_recipes_need_neither_torch_nor_what_draws(tmp_path):
    """An answer within two seconds, says the issue; what costs time is importing torch, so that must not happen. rich is for those
    who watch a run."""
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
sys.meta_path.insert(0, Missing())
from ithaca.cli.main import main
page = {str(tmp_path / "page.html")!r}
for arguments in ("plan llama32_1b --gpus 1xH200 --context 64K --html " + page, "ladder llama32_1b --gpus 1xH200 --context 64K",
                  "recipes ls", "recipes show tiny_cpu"):
    assert main(arguments.split()) == 0, arguments
assert not {{"torch", "rich"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_plan_beside_what_came():
    found = plan("llama32_1b", context="64K", gpus="1xH200")
    peak, took = found.allocated * 11 // 10, found.speed.seconds * 1.5
    said = beside(found, peak, took, longest=found.context)
    assert said.startswith("plan: ") and "(+10.0%)" in said and said.endswith("s (+50.0%)")
    packed = beside(found, peak, took, longest=1000)
    assert packed == said + "; planned for documents of 65,536 tokens, here the longest has 1,000"


def test_a_plan_goes_straight_into_prepare():
    found = ithaca.plan("llama32_1b", gpus="1xH200", context="64K")
    assert isinstance(found, ithaca.Plan) and isinstance(found.stack, ithaca.Stack)


def test_a_host_too_small_for_the_states_alone_is_not_searched_through(monkeypatch: pytest.MonkeyPatch):
    """Where activations wait makes no difference then; every stack was once tried with every number of layers on the GPU."""
    looked, plain = [], _Asked.look
    monkeypatch.setattr(_Asked, "look", lambda self, stack: looked.append(stack) or plain(self, stack))
    found = plan(
        "llama3_8b", gpus="1xRTX4090-24GB", context="64K", host="20GB", disk="100GB", lora=8, offload_optimizer=True
    )
    assert not found.fits and any("host memory" in line for line in found.advice) and len(looked) < 500


@pytest.mark.parametrize("fixed", [{"replicate": 3}, {"replicate": 16}])
def test_what_no_run_would_accept_is_not_planned(fixed: dict[str, int]):
    with pytest.raises(ValueError, match=rf"replicate={fixed['replicate']}"):
        plan("llama32_1b", gpus="8xH100", context="64K", **fixed)
    with pytest.raises(ValueError, match="the world size 8 is not a multiple of"):
        plan("llama32_1b", gpus="8xH100", context="64K", stack=Stack(**fixed))
