"""The dry run: real code on fake tensors allocates what the same code allocates on real ones, and counts it right."""

from __future__ import annotations

import gc
from dataclasses import replace
from threading import Thread
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ithaca
from ithaca.config.schema import Lora
from ithaca.planner.categories import CATEGORIES, category
from ithaca.planner.dry_run import run as dry
from ithaca.planner.dry_run.run import Case, DryKernel, dry_run
from ithaca.planner.dry_run.tracker import LiveBytes
from ithaca.stack import Stack

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=1024,
    num_hidden_layers=3, max_position_embeddings=2**20,
)  # fmt: skip


def config(family: str = "llama", **changes):
    return AutoConfig.for_model(family, **{**SIZES, **changes})


def peak_of(stack: Stack, context: int = 4096, world: int = 1, **more) -> dry.DryRun:
    return dry_run(Case(config(), stack, context, world=world, **more))


def test_the_tracker_counts_what_lives():
    tracker = LiveBytes()
    tracker.begin("forward")
    with tracker.watching():
        a = torch.empty(1000, dtype=torch.uint8)  # 1,024 as the allocator rounds
        view = a[10:20]
        b = torch.empty(512, dtype=torch.uint8)
        assert tracker.total == 1536
        del a
        assert tracker.total == 1536, "a view holds its storage"
        del view
        assert tracker.total == 512
        b.untyped_storage().resize_(2048)
        assert tracker.total == 2048
        b.untyped_storage().resize_(0)
        assert tracker.total == 0
        tracker.begin("backward")
        c = torch.empty(100)
        tracker.see(c, "kept")
        assert tracker.live["kept"] == 512 and tracker.peaks["backward"] == {"kept": 512}
    del b, c
    assert tracker.total == 0 and sum(tracker.peaks["forward"].values()) == 2048


def test_an_allocation_is_told_by_the_code_that_made_it():
    frames = [
        ("/x/torch/nn/functional.py", "linear"),
        ("/y/ithaca/engine/layer/tokens.py", "after"),
        ("/y/ithaca/engine/run.py", "loss"),
    ]
    assert category(frames) == "tile"
    assert (
        category(
            [("/y/ithaca/engine/attention/stages.py", "buffer"), ("/y/ithaca/engine/attention/stages.py", "to_heads")]
        )
        == "attention"
    )
    assert (
        category(
            [("/y/ithaca/engine/attention/stages.py", "buffer"), ("/y/ithaca/engine/attention/stages.py", "_bring")]
        )
        == "exchange"
    )
    assert category([("/somewhere/else.py", "main")]) == "other"


def test_a_thread_of_autograd_is_told_by_who_waits_for_it():
    """On a GPU derivatives run in another thread, without frames of ours."""
    tracker, tensor = LiveBytes(), torch.empty(1 << 20, dtype=torch.uint8)
    asks = compile(
        "def ask():\n    worker = Thread(target=see)\n    worker.start()\n    worker.join()",
        "/x/ithaca/engine/objective/cross_entropy.py", "exec",
    )  # fmt: skip
    names = {"Thread": Thread, "see": lambda: tracker.see(tensor)}
    exec(asks, names)
    names["ask"]()
    (line,) = tracker.lines["load"]
    assert tracker.live["loss"] == tracker.lines["load"][line] == 1 << 20 and line.startswith(
        "engine/objective/cross_entropy.py:"
    )


STACKS = [
    Stack(),
    Stack(engine="composed", recompute="none", tile=None),
    Stack(engine="composed", recompute="layer", tile=1024),
    Stack(heads_per_stage=1, tile=512),
    Stack(heads_per_stage=2, tile=512, recompute=("layer", "keep_attention", "layer")),
]


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_fake_tensors_take_what_real_ones_take(stack: Stack):
    """Byte for byte, phase by phase: the same functions on real CPU memory, with the same stand-ins for GPU kernels."""
    stack = replace(stack, shard_parameters=False)
    faked = dry_run(Case(config(), stack, 2048, kernel="fa4", optimizer_bytes=0.0))
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    run = ithaca.prepare(model, stack, device="cpu", dtype=torch.bfloat16)
    run.kernels.chosen = {need: DryKernel("fa4") for need in run.kernels.chosen}
    batch = run.shard(torch.zeros(1, 2048, dtype=torch.int64))
    tracker = LiveBytes()
    for tensor in (*run.model.parameters(), *run.model.buffers(), batch.input_ids, batch.labels, batch.positions):
        tracker.see(tensor, "other")
    gc.collect()
    with dry._fused(), tracker.watching():
        tracker.begin("forward")
        with dry.loss_phase(run, tracker):
            loss = run.loss(batch)
        tracker.begin("backward")
        loss.backward()
    for phase in ("forward", "loss", "backward"):
        assert sum(faked.phases[phase].values()) == sum(tracker.peaks[phase].values()), phase


def test_a_slice_keeps_what_the_whole_keeps_in_the_same_shares():
    stack = Stack(recompute=("layer",) * 6 + ("keep_attention",) * 18)
    assert dry.shortened_stack(stack, 4).recompute == ("layer", *["keep_attention"] * 3)
    assert dry.shortened_stack(stack, 24) == stack and dry.shortened_stack(Stack(), 4) == Stack()


def test_what_a_rank_keeps_is_where_it_belongs():
    found = dry_run(Case(config(), Stack(ulysses=4, store="host", tile=1024), 8192, world=4))
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config()).parameters())
    for phase in ("load", "forward", "loss", "backward", "step"):
        assert found.phases[phase]["parameters"] == pytest.approx(4 * weights / 4, rel=0.01)
        assert set(found.phases[phase]) <= set(CATEGORIES)
    assert found.phases["backward"]["optimizer"] == pytest.approx(8 * weights / 4, rel=0.01)
    assert found.phases["step"]["gradients"] == pytest.approx(4 * weights / 4, rel=0.01)
    large = Case(config(vocab_size=8192), Stack(shard_parameters=False, tile=2048), 8192)  # worth a line of its own
    assert {"the weights", "the optimizer's states"} <= set(dry_run(large).lines["backward"])
    tokens = 8192 // 4
    kept = (
        3 * tokens * (256 * 2 + 8 * 32 * 2 + 8 * 4)
    )  # input, attention output, lse (8/4 heads of all tokens) per layer
    assert found.host == pytest.approx(kept, rel=0.01) and found.disk == 0
    assert found.peak == max(sum(by.values()) for by in found.phases.values())


def test_each_technique_takes_something_away():
    ladder = [
        Stack(engine="composed", recompute="none", tile=None, shard_parameters=False),
        Stack(engine="composed", recompute="none", tile=None, ulysses=4),
        Stack(engine="composed", recompute="layer", tile=None, ulysses=4),
        Stack(engine="composed", recompute="layer", tile=1024, ulysses=4),
        Stack(engine="composed", recompute="layer", tile=1024, ulysses=4, store="host"),
        Stack(engine="composed", recompute="layer", tile=1024, ulysses=4, store="host", heads_per_stage=1),
        Stack(tile=1024, ulysses=4, store="host", heads_per_stage=1, hold=False),
    ]
    peaks = [peak_of(stack, 2**15, world=stack.ulysses).peak for stack in ladder]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3_text"])
def test_families(family: str):
    found = dry_run(
        Case(config(family), Stack(ulysses=2, ring=2, heads_per_stage=2, tile=512, store="disk"), 4096, world=4)
    )
    assert found.peak > 0 and found.host == found.disk // 2 > 0, "of three layers the last waits in host memory"
    assert sum(found.phases["backward"].values()) > sum(found.phases["load"].values())


def test_adapters_and_documents():
    whole = peak_of(Stack(tile=2048))
    adapted = peak_of(Stack(tile=2048), lora=Lora(rank=4))
    assert adapted.phases["step"].get("gradients", 0) < 0.1 * whole.phases["step"]["gradients"]
    assert adapted.phases["load"]["parameters"] < 0.6 * whole.phases["load"]["parameters"], (
        "a frozen base stays in bf16"
    )
    packed = peak_of(Stack(tile=2048), documents=[1000, 3000, 96])
    assert packed.phases["backward"]["kept"] == whole.phases["backward"]["kept"]


def test_it_leaves_no_process_group_and_refuses_to_share_one():
    peak_of(Stack())
    assert not dist.is_initialized()
    with mock.patch.object(dist, "is_initialized", lambda: True), pytest.raises(RuntimeError, match="has one already"):
        peak_of(Stack())
