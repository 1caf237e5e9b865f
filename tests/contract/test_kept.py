"""What forward keeps, what backward computes again, and what is left when a graph is dropped: by exact counts."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca.engine.objective.cross_entropy
import ithaca.engine.run
from ithaca.base.processes.pool import Workers
from ithaca.engine.run import Run

from .tiny import gradients, prepared, tiny, tokens, worst

STORES = ["gpu", "host", "disk"]
ENGINES = ["composed", "streamed"]
LAYERS = 2
LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families: every setting with every other
HOLDING = [("composed", None), ("streamed", False), ("streamed", True)]


def handles(run: Run) -> int:
    """How many handles the layers of one forward hold: the streamed layer keeps input, attention and lse apart."""
    apart = run.stack.engine_of(0) == "streamed" and run.stack.recompute_of(0) == "keep_attention"
    return LAYERS * (3 if apart else 1)


def calls(run: Run) -> tuple[int, int]:
    counted = run.kernels.made["cpu"].calls
    return counted.forward, counted.backward


# How often attention runs.


def attention_calls(stack: dict[str, Any], documents: list[list[int]] | None) -> list[tuple[int, int]]:
    """Forward and backward calls of the kernel: after an evaluation, after forward, after backward."""
    run = prepared(**stack)
    batch, counted = run.shard(tokens(), documents=documents), []
    with torch.no_grad():
        run.loss(batch)
    counted.append(calls(run))
    loss = run.loss(batch)
    counted.append(calls(run))
    loss.backward()
    counted.append(calls(run))
    return counted


@pytest.mark.parametrize(
    ("heads_per_stage", "documents"),
    [(None, None), (1, [[17, 1, 30]]), *([(1, None), (None, [[17, 1, 30]])] if LONG else [])],
    ids=["whole", "stages, packed", *(["stages", "packed"] if LONG else [])],
)
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("keep_attention", 0), ("layer", 1)])
def test_backward_runs_the_attention_forward_as_often_as_asked(recompute, again, heads_per_stage, documents):
    stack = dict(recompute=recompute, heads_per_stage=heads_per_stage, shard_parameters=False)
    (once, _), forward, backward = attention_calls(stack, documents)
    assert once >= LAYERS * (8 if heads_per_stage else 1)
    assert forward == (2 * once, 0)
    assert backward == ((2 + again) * once, once)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_layer_recomputes_as_it_was_told(engine: str):
    stack = dict(recompute=("layer", "keep_attention"), shard_parameters=False, engine=engine)
    (once, _), _, (forward, backward) = attention_calls(stack, None)
    assert forward == 2 * once + once // LAYERS and backward == once


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("keep_attention", 0), ("layer", 1)])
def test_also_around_a_ring_and_between_heads(workers: Workers, recompute: str, again: int):
    stack = dict(recompute=recompute, heads_per_stage=1, ulysses=2, ring=2)
    for (once, _), forward, backward in workers.run(attention_calls, stack, [[17, 1, 30]], world=4):
        assert once > 0 and forward == (2 * once, 0) and backward == ((2 + again) * once, once)


def test_tiles_do_not_change_how_often_attention_runs():
    counted = [attention_calls(dict(tile=tile, shard_parameters=False), None) for tile in (None, 5, 48)]
    assert counted[0] == counted[1] == counted[2]


@pytest.mark.parametrize("tile", [7, 48, 4096])
def test_logits_of_one_tile_at_a_time(tile: int, monkeypatch: pytest.MonkeyPatch):
    run = prepared(tile=tile, shard_parameters=False)
    seen, plain = [], ithaca.engine.objective.cross_entropy.cross_entropy_sum

    def watched(logits: Tensor, *args):
        seen.append(tuple(logits.shape))
        return plain(logits, *args)

    monkeypatch.setattr(ithaca.engine.objective.cross_entropy, "cross_entropy_sum", watched)
    run.loss(run.shard(tokens(2, 48))).backward()
    assert seen == [(2, min(tile, 48 - start), 257) for start in range(0, 48, tile)]


# What waits in the store.


@pytest.mark.parametrize(
    ("store", "fsdp"),
    [("gpu", True), ("host", True), ("disk", False), *((s, s == "disk") for s in STORES if LONG)],
    ids=lambda each: each if isinstance(each, str) else "fsdp" if each else "plain",
)
@pytest.mark.parametrize(("engine", "hold"), HOLDING)
def test_each_layer_is_kept_once_and_taken_once(engine: str, hold: bool | None, store: str, fsdp: bool):
    run = prepared(store=store, shard_parameters=fsdp, engine=engine, hold=hold)
    loss = run.loss(run.shard(tokens()))
    assert len(run.store) == handles(run)
    loss.backward()
    assert len(run.store) == 0
    report = run.report()["store"]
    # the streamed layer puts the gradient of the attention output too unless it stays, and reads pieces without taking them
    passing = 0 if hold and store != "gpu" else 1
    # of a layer that waits on disk, the attention output is also kept near until its forward ends
    cached = LAYERS - 1 if store == "disk" and hold is False else 0
    assert report.puts == (LAYERS if engine == "composed" else (3 + passing) * LAYERS + cached)
    assert report.takes == LAYERS
    assert run.report()["store"].puts == 0, "a report starts the counts again"


def test_pieces_are_fetched_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    """Of a pass over the pieces of a tensor only the first is not on its way already."""
    run = prepared(store="host", tile=1, heads_per_stage=4, shard_parameters=False, hold=False)
    plain, reads = run.store.peek, []
    monkeypatch.setattr(run.store, "peek", lambda handle, then=None: reads.append(handle) or plain(handle, then))
    run.loss(run.shard(tokens(1, 48))).backward()
    stages = len(run.schedule)
    # forward: attention output. Backward: input and attention output; in each stage the input to project and again to
    # differentiate, dout and out; at last the input for the norm.
    passes = LAYERS * (1 + 2 + 4 * stages + 1)
    assert stages == 2 and len(reads) > 5 * passes
    assert run.report()["store"].prefetched == len(reads) - passes


def test_pieces_that_stay_come_back_once(monkeypatch: pytest.MonkeyPatch):
    """With hold=True forward reads nothing, and backward each piece of the input and of the attention output once."""
    run = prepared(store="host", tile=1, heads_per_stage=4, shard_parameters=False, hold=True)
    plain, reads = run.store.peek, []
    monkeypatch.setattr(run.store, "peek", lambda handle, then=None: reads.append(id(handle)) or plain(handle, then))
    loss = run.loss(run.shard(tokens(1, 48)))
    assert not reads
    report = run.store.report()
    loss.backward()
    pieces = 48 // 8
    assert len(reads) == LAYERS * pieces * (1 + len(run.schedule))
    assert run.store.report().bytes_in == report.bytes_out, "all that left came back, and nothing twice"


def test_sums_of_kv_gradients_wait_in_the_store_while_the_next_stage_attends(monkeypatch: pytest.MonkeyPatch):
    """A stage leaves a sum behind unless it is the last of those that share its KV head. Not where pieces stay."""
    grads = {}
    for hold in (True, False):
        run = prepared(store="host", heads_per_stage=1, shard_parameters=False, hold=hold)
        loss = run.loss(run.shard(tokens(1, 48)))
        plain, sums = run.store.put, []
        monkeypatch.setattr(
            run.store, "put", lambda kept, plain=plain, sums=sums: sums.append(len(kept)) or plain(kept)
        )
        loss.backward()
        heads = run.decoder.layers[0].projector
        waiting = 0 if hold else LAYERS * (heads.heads - heads.kv_heads)
        assert sums.count(2) == waiting, "pieces go one by one, k and v together"
        assert len(run.store) == 0
        grads[hold] = [p.grad for p in run.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads[True], grads[False], strict=True))


@pytest.mark.parametrize("recompute", ["layer", "keep_attention"])
@pytest.mark.parametrize(("engine", "hold"), HOLDING)
def test_what_is_kept_is_the_input_and_on_request_the_attention(engine: str, hold: bool | None, recompute: str):
    run = prepared(store="host", recompute=recompute, shard_parameters=False, engine=engine, hold=hold)
    loss = run.loss(run.shard(tokens(1, 48)))
    x, attended, lse = 48 * 64 * 4, 48 * 64 * 4, 48 * 8 * 4
    kept = x if recompute == "layer" else x + attended + lse
    assert run.store.held_bytes - run.store.idle_bytes == LAYERS * kept  # pyright: ignore[reportAttributeAccessIssue]
    # the attention output of a streamed layer passes through the store even where it is not kept, unless it stays
    passing = attended if hold is False and recompute == "layer" else 0
    assert run.report()["store"].bytes_out == LAYERS * (kept + passing)
    del loss


# Host and disk, either layer first, kept and computed again
PLACES = [(("host", "gpu"), "keep_attention"), (("gpu", "host"), "layer")]
MORE_PLACES = [(("host", "gpu"), "layer"), (("gpu", "host"), "keep_attention"), (("disk", "gpu"), "keep_attention")]


@pytest.mark.parametrize(("store", "recompute"), [*PLACES, (("disk", "gpu"), "layer"), *(MORE_PLACES if LONG else [])])
@pytest.mark.parametrize(("engine", "hold"), HOLDING)
def test_each_layer_keeps_where_it_was_told(engine: str, hold: bool | None, store: tuple[str, str], recompute: str):
    stack = dict(recompute=recompute, engine=engine, shard_parameters=False, heads_per_stage=4, tile=3)
    alone = prepared(**stack)
    alone.loss(alone.shard(tokens())).backward()
    run = prepared(**stack, store=store, hold=hold)
    loss = run.loss(run.shard(tokens()))
    assert run.store.kind == run.stack.offload != "gpu"
    assert len(run.store) == len(run.on_device) > 0, "each has what one layer keeps"
    loss.backward()
    assert len(run.store) == len(run.on_device) == 0
    for (name, ours), theirs in zip(run.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("store", "layers"), [("host", 2), (("host", "gpu"), 1), (("gpu", "gpu"), 0)])
def test_room_is_asked_for_what_leaves_the_gpu(store: Any, layers: int, monkeypatch: pytest.MonkeyPatch):
    run, asked = prepared(store=store, recompute="layer", engine="composed", shard_parameters=False), []
    monkeypatch.setattr(run.store, "reserve", asked.append)
    run.loss(run.shard(tokens(1, 48)))
    assert asked == ([layers * 48 * 64 * 4] if layers else [])


@pytest.mark.parametrize("store", STORES)
def test_evaluation_stores_nothing(store: str):
    run = prepared(store=store)
    batch = run.shard(tokens())
    learning = run.loss(batch).detach()
    run.report()
    with torch.no_grad():
        loss, logits = run.loss(batch), run.logits(batch)
    assert not loss.requires_grad and not logits.requires_grad and torch.equal(loss, learning)
    assert len(run.store) == 0 and run.report()["store"].puts == 0


DROPPED = [("gpu", "none"), ("gpu", "keep_attention"), ("host", "layer"), ("disk", "keep_attention")]
MORE_DROPPED = [("gpu", "layer"), ("host", "keep_attention"), ("disk", "layer")]


@pytest.mark.parametrize(("store", "recompute"), [*DROPPED, *(MORE_DROPPED if LONG else [])])
def test_a_forward_that_is_dropped_leaves_nothing(store: str, recompute: str):
    run = prepared(store=store, recompute=recompute)
    loss = run.loss(run.shard(tokens()))
    assert len(run.store) == handles(run)
    del loss
    gc.collect()
    assert len(run.store) == 0
    loss = run.loss(run.shard(tokens()))
    loss.backward()
    assert len(run.store) == 0


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
def test_a_forward_that_fails_leaves_nothing_and_the_next_is_right(fsdp: bool, monkeypatch: pytest.MonkeyPatch):
    run = prepared(store="host", shard_parameters=fsdp)
    batch, plain = run.shard(tokens()), ithaca.engine.run.run_layer

    def fail_in_the_last(x: Tensor, call):
        if call.layer.index == LAYERS - 1:
            raise RuntimeError("out of memory")
        return plain(x, call)

    with monkeypatch.context() as patch:
        patch.setattr(ithaca.engine.run, "run_layer", fail_in_the_last)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.loss(batch)
    gc.collect()
    assert len(run.store) == 0
    run.loss(batch).backward()
    assert worst(gradients(run), reference([tokens()])) <= 1e-5


def fail_in_backward(stack: dict[str, Any]) -> tuple[str, Any, int]:
    """A backward that fails in its first layer, as out of memory would, and then a whole new step."""
    from ithaca.engine.layer import composed, streamed

    run, plain = prepared(**stack), streamed.after_backward

    def fail_in_the_first(call, *args):
        if call.layer.index == 0:
            raise RuntimeError("out of memory")
        return plain(call, *args)

    composed.after_backward = streamed.after_backward = fail_in_the_first
    try:
        run.loss(run.shard(tokens(seed=1))).backward()
        raised = "nothing"
    except RuntimeError as error:
        raised = str(error)
    finally:
        composed.after_backward = streamed.after_backward = plain
    gc.collect()
    left = len(run.store)
    run.model.zero_grad()
    run.loss(run.shard(tokens(seed=2))).backward()
    return raised, gradients(run), left


@pytest.mark.parametrize("stack", [dict(), dict(store="host", recompute="layer"), dict(shard_parameters=False)])
def test_after_a_backward_that_fails_the_next_step_is_right(workers: Workers, stack: dict[str, Any]):
    """FSDP2 by itself would leave the gradients of the root group unreduced from here on."""
    theirs = reference([tokens(seed=2)])
    for raised, ours, left in workers.run(fail_in_backward, dict(ulysses=2, **stack), world=2):
        assert raised == "out of memory" and left == 0
        assert worst(ours, theirs) <= 1e-5


# Several graphs at once.


def reference(batches: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the sum of the untouched model's mean losses."""
    model = tiny()
    for ids in batches:
        model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def two_graphs(stack: dict[str, Any], order: str) -> tuple[Any, int]:
    run = prepared(**stack)
    losses = [run.loss(run.shard(tokens(seed=seed))) for seed in (1, 2)]
    assert len(run.store) == 2 * handles(run)
    if order == "together":
        (losses[0] + losses[1]).backward()
    else:
        for loss in losses if order == "in order" else reversed(losses):
            loss.backward()
    return gradients(run), len(run.store)


ORDERS = ["in order", "in reverse", "together"]


@pytest.mark.parametrize(
    ("store", "order"), [(s, o) for i, s in enumerate(STORES) for j, o in enumerate(ORDERS) if LONG or i == j]
)
def test_two_forwards_before_a_backward(workers: Workers, store: str, order: str):
    theirs = reference([tokens(seed=1), tokens(seed=2)])
    for ours, left in workers.run(two_graphs, dict(ulysses=2, store=store), order, world=2):
        assert left == 0 and worst(ours, theirs) <= 1e-5


def backward_twice(stack: dict[str, Any], retain: bool) -> tuple[str, Any]:
    """The second backward of one loss, and then a whole new step."""
    run = prepared(**stack)
    loss = run.loss(run.shard(tokens(seed=1)))
    loss.backward(retain_graph=retain)
    try:
        loss.backward()
        raised = "nothing"
    except RuntimeError as error:
        raised = str(error)
    run.model.zero_grad()
    run.loss(run.shard(tokens(seed=1))).backward()
    return raised, gradients(run)


@pytest.mark.parametrize(
    ("store", "retain"), [("gpu", True), ("host", False), *([("gpu", False), ("host", True)] if LONG else [])]
)
def test_a_second_backward_is_an_error_that_says_so(workers: Workers, store: str, retain: bool):
    theirs = reference([tokens(seed=1)])
    for raised, ours in workers.run(backward_twice, dict(ulysses=2, store=store), retain, world=2):
        assert (
            raised == "this loss was already differentiated; call run.loss (or run.logprobs) again for another backward"
        )
        assert worst(ours, theirs) <= 1e-5, "the step after must be right"


# A store that was asked for and never called.


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_layer_that_stores_nothing_is_an_error(store: str, monkeypatch: pytest.MonkeyPatch):
    run = prepared(store=store, shard_parameters=False)
    plain = ithaca.engine.run.run_layer
    monkeypatch.setattr(
        ithaca.engine.run, "run_layer", lambda x, call: (x * 1.0,) if call.layer.index else plain(x, call)
    )
    with pytest.raises(RuntimeError, match=f"store='{store}' was asked for, but layer 1 stored nothing"):
        run.loss(run.shard(tokens()))
    with torch.no_grad():
        run.loss(run.shard(tokens()))  # nothing to store


@pytest.mark.parametrize("trained", ["nothing", "lm_head", "the last layer"])
def test_a_layer_without_anything_to_learn_below_it_need_not_store(trained: str):
    model = tiny()
    model.requires_grad_(False)
    if trained == "lm_head":
        model.lm_head.requires_grad_(True)
    elif trained == "the last layer":
        model.model.layers[-1].requires_grad_(True)
    run = prepared(model, store="host")
    loss = run.loss(run.shard(tokens()))
    assert len(run.store) == (handles(run) // LAYERS if trained == "the last layer" else 0)
    if trained != "nothing":
        loss.backward()
        assert gradients(run).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
