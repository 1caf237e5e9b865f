"""The dry run: real code on fake tensors allocates what the same code allocates on real ones, and counts it right."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.base.holding import CALLER, CATEGORIES, category, holds, module_holds, word_of
from ithaca.engine.attention.stages import Exchange, StagedAttention
from ithaca.engine.job import Job
from ithaca.engine.layer.tokens import after
from ithaca.engine.mesh import build_mesh
from ithaca.engine.model.sizes import sizes_of
from ithaca.engine.run import Run
from ithaca.planner.dry_run import run as dry
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.dry_run.tracker import LiveBytes
from ithaca.stack import Stack

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=1024,
    num_hidden_layers=3, max_position_embeddings=2**20,
)  # fmt: skip
LONG = os.environ.get("ITHACA_PLANS") == "long"


def config(family: str = "llama", **changes):
    return AutoConfig.for_model(family, **{**SIZES, **changes})


def job_of(hf, stack: Stack, context: int, **more) -> Job:
    return Job(sizes_of(hf.to_dict(), "small"), stack, context, **more)


def peak_of(stack: Stack, context: int = 4096, documents: list[int] | None = None, **more) -> dry.DryRun:
    return dry_run(job_of(config(), stack, context, **more), config(), documents=documents)


def frame_of(function: Callable[..., Any], code: CodeType | None = None) -> FrameType:
    return cast(FrameType, SimpleNamespace(f_code=code or function.__code__, f_globals=function.__globals__))


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
    assert category(map(frame_of, (torch.nn.functional.softmax, after, Run.loss))) == "tile"
    assert category(map(frame_of, (Exchange.buffer, Exchange.to_heads))) == "attention"
    assert category(map(frame_of, (Exchange.buffer, StagedAttention._bring))) == "exchange"
    assert category(map(frame_of, (pytest.importorskip,))) == "other"


def test_a_declaration_is_about_the_function_itself():
    @holds("loss")
    @torch.no_grad()
    def tile():
        return (lambda: torch.empty(1))()

    inside = cast(Any, tile).__wrapped__
    (nested,) = (each for each in inside.__code__.co_consts if isinstance(each, CodeType))
    assert category([frame_of(inside)]) == category([frame_of(inside, nested)]) == "loss"
    assert category([frame_of(tile)]) == "other", "not of torch's wrapper, which others have too"


def test_a_misspelt_category_is_refused():
    with pytest.raises(ValueError, match="'atention' is no category of memory; known: parameters, "):
        holds("atention")
    with pytest.raises(ValueError, match="'tiles' is no category"):
        module_holds("somewhere", "tiles")


@pytest.mark.parametrize(
    ("family", "stack", "world"),
    [
        ("gemma3_text", Stack(ulysses=2, ring=2, heads_per_stage=2, tile=512, store="disk", hold=False), 4),
        ("llama", Stack(engine="composed", recompute="layer", tile=512, store="host", heads_per_stage=2), 1),
        ("llama", Stack(engine="composed", recompute="none", tile=None), 1),
        ("qwen3", Stack(ulysses=2, tile=512, shard_parameters=False), 2),
    ][: None if LONG else 1],
    ids=str,
)
def test_all_code_that_allocates_says_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, family: str, stack: Stack, world: int
):
    """In a step: the innermost function of the engine, behind those that serve their callers."""
    silent: set[str] = set()

    class Asking(LiveBytes):
        def _change(self, storage: Any, nbytes: int, name: str, line: str, module: str) -> None:
            for frame in self._frames() if nbytes and self.phase != "load" else ():
                ours = frame.f_globals.get("__name__", "").startswith("ithaca.engine.")
                if ours and word_of(frame) is None:
                    silent.add(f"{frame.f_code.co_filename} {frame.f_code.co_name}")
                if (ours and word_of(frame) != CALLER) or word_of(frame) not in (None, CALLER):
                    break
            super()._change(storage, nbytes, name, line, module)

    monkeypatch.setattr(dry, "LiveBytes", Asking)
    hf = config(family)
    counted = dry_run(job_of(hf, stack, 4096, world=world), hf)
    assert not silent
    for by in counted.phases.values():
        assert by["other"] < 0.01 * sum(by.values())  # the batch
    check_whole(counted, stack)


def check_whole(found: dry.DryRun, stack: Stack) -> None:
    assert found.peak > 0
    assert sum(found.phases["backward"].values()) > sum(found.phases["load"].values())
    if (
        stack.store == "disk"
    ):  # of three layers the last waits in host memory, and pieces that do not stay pass through it
        assert found.host == found.disk // 2 > 0 or (stack.hold is False and found.host > found.disk // 2 > 0)


def test_a_thread_of_autograd_is_told_by_who_waits_for_it():
    """On a GPU derivatives run in another thread, without frames of ours."""
    tracker, tensor = LiveBytes(), torch.empty(1 << 20, dtype=torch.uint8)
    asks = compile(
        "def ask():\n    worker = Thread(target=see)\n    worker.start()\n    worker.join()",
        "/x/ithaca/engine/objective/cross_entropy.py", "exec",
    )  # fmt: skip
    names = {
        "__name__": "ithaca.engine.objective.cross_entropy", "Thread": Thread, "see": lambda: tracker.see(tensor),
    }  # fmt: skip
    exec(asks, names)
    names["ask"]()
    (line,) = tracker.lines["load"]
    assert tracker.live["loss"] == tracker.lines["load"][line] == 1 << 20 and line.startswith(
        "engine/objective/cross_entropy.py:"
    )


STACKS = [Stack(engine="composed", recompute="none", tile=None), Stack()]
if LONG:
    STACKS += [Stack(heads_per_stage=2, tile=1024, recompute=("layer", "keep_attention", "layer"))]
    STACKS += [Stack(heads_per_stage=1, tile=512), Stack(engine="composed", recompute="layer", tile=1024)]


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_fake_tensors_take_what_real_ones_take(stack: Stack):
    """Byte for byte, phase by phase: the same functions on real CPU memory, with the same stand-ins for GPU kernels."""
    stack = replace(stack, shard_parameters=False)
    job = job_of(config(), stack, 2048, kernel="fa4")
    faked = dry_run(job, config(), optimizer_bytes=0.0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    tracker = LiveBytes()
    run = dry.assembled(model, job, build_mesh(stack, dry.CPU), tracker, torch.bfloat16)
    batch = run.shard(torch.zeros(1, 2048, dtype=torch.int64))
    for tensor in (*run.model.parameters(), *run.model.buffers(), batch.input_ids, batch.labels, batch.positions):
        tracker.see(tensor, "other")
    gc.collect()
    with tracker.watching():
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


@pytest.mark.skipif(not LONG, reason="two dry runs, 9 s: make plans")
def test_what_a_rank_keeps_is_where_it_belongs():
    found = peak_of(Stack(ulysses=4, store="host", tile=1024), 8192, world=4)
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config()).parameters())
    for phase in ("load", "forward", "loss", "backward", "step"):
        assert found.phases[phase]["parameters"] == pytest.approx(4 * weights / 4, rel=0.01)
        assert set(found.phases[phase]) <= set(CATEGORIES)
    assert found.phases["backward"]["optimizer"] == pytest.approx(8 * weights / 4, rel=0.01)
    assert found.phases["step"]["gradients"] == pytest.approx(4 * weights / 4, rel=0.01)
    hf = config(vocab_size=8192)  # worth a line of its own
    large = dry_run(job_of(hf, Stack(shard_parameters=False, tile=2048), 8192), hf)
    assert {"the weights", "the optimizer's states"} <= set(large.lines["backward"])
    tokens = 8192 // 4
    kept = (
        3 * tokens * (256 * 2 + 8 * 32 * 2 + 8 * 4)
    )  # input, attention output, lse (8/4 heads of all tokens) per layer
    assert found.host == pytest.approx(kept, rel=0.01) and found.disk == 0
    assert found.peak == max(sum(by.values()) for by in found.phases.values())


@pytest.mark.skipif(not LONG, reason="seven dry runs of many tiles: make plans")
def test_each_technique_takes_something_away():
    composed: dict[str, Any] = dict(engine="composed", ulysses=4)
    ladder = [
        Stack(engine="composed", recompute="none", tile=None, shard_parameters=False),
        Stack(**composed, recompute="none", tile=None),
        Stack(**composed, recompute="layer", tile=None),
        Stack(**composed, recompute="layer", tile=None, store="host"),
        Stack(**composed, recompute="layer", tile=None, store="host", heads_per_stage=1),
        Stack(**composed, recompute="layer", tile=1024, store="host", heads_per_stage=1),
        Stack(tile=1024, ulysses=4, store="host", heads_per_stage=1, hold=False),
    ]
    peaks = [peak_of(stack, 2**15, world=stack.ulysses).peak for stack in ladder]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


@pytest.mark.skipif(not LONG, reason="a dry run each, 5 s: make plans; Gemma has one above")
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3_text"])
def test_families(family: str):
    stack = Stack(ulysses=2, ring=2, heads_per_stage=2, tile=512, store="disk")
    check_whole(dry_run(job_of(config(family), stack, 4096, world=4), config(family)), stack)


@pytest.mark.skipif(not LONG, reason="three dry runs, 7 s: make plans")
def test_adapters_and_documents():
    whole = peak_of(Stack(tile=2048))
    adapted = peak_of(Stack(tile=2048), lora=4)
    assert adapted.phases["step"].get("gradients", 0) < 0.1 * whole.phases["step"]["gradients"]
    assert adapted.phases["load"]["parameters"] < 0.6 * whole.phases["load"]["parameters"], (
        "a frozen base stays in bf16"
    )
    packed = peak_of(Stack(tile=2048), documents=[1000, 3000, 96])
    assert packed.phases["backward"]["kept"] == whole.phases["backward"]["kept"]


def test_it_leaves_no_process_group_and_refuses_to_share_one():
    peak_of(Stack(), 256)
    assert not dist.is_initialized()
    with mock.patch.object(dist, "is_initialized", lambda: True), pytest.raises(RuntimeError, match="has one already"):
        peak_of(Stack())
