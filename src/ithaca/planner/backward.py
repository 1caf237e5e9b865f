"""Moments of a layer's backward, for the walk in memory.py."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..base.kernels import backward_workspace
from .job import FULL, HALF

if TYPE_CHECKING:
    from .memory import Walk


def backward(w: Walk, index: int) -> None:
    m, stack = w.m, w.stack
    streamed, offloads = stack.engine_of(index) == "streamed", w.offloads(index)
    recompute = stack.recompute_of(index)
    last = index == m.layers - 1
    w.kept = w.kept_below(index + 1)
    above = (m.layers - 1 - index) * w.job.layer_trained
    head = w.job.head_trained
    here: Counter[str] = Counter({**w.left(above + head), **w.gathered()})
    x = w.x
    if last and w.fsdp:  # the head's gradient on its way to its shards
        # copied once more; or its weights are still there, and those of the last layer
        beside = head * FULL if w.shards == 1 else (head + m.layer_weights) * HALF
        moving = {"fsdp": head * FULL + beside + FULL * head // w.shards}
        w.moment("backward", moving, {"residual": 2 * x, "kept": w.flight.bytes})
    w.land()
    if w.fsdp:
        here["fsdp"] += FULL * (head if last else w.job.layer_trained)
        if index == 0 and not m.tied and w.shards > 1:
            # not a layer below is there beside this one, but the embedding, gathered ahead of its turn
            here["fsdp"] += HALF * max(0, m.embedding_weights - m.layer_weights)
    if m.tied and not w.job.lora:
        here["gradients"] += HALF * m.embedding_weights  # of the head, until the embedding's joins it
    lses = sum(w.lse(stage) for stage in w.schedule)
    if streamed:
        here["residual"] += x if stack.far != "gpu" else 2 * x
        here["kept"] += lses if offloads else 0
        if offloads and w.holds:
            here["kept"] += x
        inputs = 0 if w.holds or not offloads else 3 * w.rows * w.piece * m.hidden * HALF
    else:
        here["residual"] += 2 * x + w.attended  # dy, dx and the gradient of the attention output
        if offloads:
            here["kept"] += w.kept_of(index)
            below = next((each for each in reversed(range(index)) if w.offloads(each)), None)
            if below is not None:  # on its way
                here["kept"] += w.kept_of(below)
        if recompute == "layer":
            here["kept"] += w.attended
        inputs = 0
    count = -(-w.tokens // w.tile)
    trained = w.job.after_trained
    sums = trained * (FULL if count > 1 else HALF)
    before = trained * (0 if count == 1 else HALF if count == 2 else FULL)  # while the last tile is computed
    piece = 2 * w.rows * w.piece * m.heads * m.head_dim * HALF if streamed else 0
    mlp = 0 if w.job.lora else m.hidden * m.intermediate * HALF
    graph = recompute == "none" and stack.tile is None
    tile = max(mlp + (2 * w.bs * m.intermediate * HALF if graph else w.after_tile(True)), trained * HALF)
    waiting = 0
    beside = offloads or recompute == "layer"  # the attention output is not among what was kept here
    if streamed and w.holds:  # output, and its gradient but for the piece at hand
        waiting = (2 if beside else 1) * w.attended - piece // 2
    w.moment("backward", here, {"kept": inputs + piece + waiting, "tile": before + tile})
    _attend(w, index, here, sums, inputs, streamed, beside, recompute)
    # gradients of the layer on their way to their shards
    layer = w.job.layer_trained
    if w.fsdp:
        total = {"fsdp": (FULL + HALF) * layer + FULL * layer // w.shards, "residual": x}
        w.moment("backward", {**w.gathered(), "gradients": here["gradients"]}, total)
        w.moment("backward", here, w.arriving(m.hidden * m.intermediate, m.layer_weights))


def _attend(
    w: Walk, index: int, here: Counter[str], sums: int, inputs: int, streamed: bool, beside: bool, recompute: str
) -> None:
    m = w.m
    accumulator = w.x if streamed else 2 * w.x
    adapted = w.job.adapters.keys() & {"q_proj", "k_proj", "v_proj"}
    qkv = 0 if w.job.lora else (m.heads + 2 * m.kv_heads) * m.head_dim * m.hidden
    wide = qkv * (FULL if len(w.schedule) > 1 else HALF)
    before = 0  # dq of the stage before, while it is on its way home
    graph = recompute == "none" and w.stack.tile is None
    if graph:
        w.kept -= w.after_graph - w.x  # done with, but for its result
    for t, stage in enumerate(w.schedule):
        q, mine = w.head(w.heads(stage, "all")), w.head(w.heads(stage, "mine"))
        kv, k = w.head(w.heads(stage, "kv")), w.head(w.heads(stage, "fresh"))
        own, shared = w.parts(len(stage.queries[0])), w.parts(len(stage.kv[0]))
        follows = t > 0 and not any(stage.fresh)  # its KV heads were used before
        adds = 0 if not follows or (streamed and not w.holds) else 4 * kv
        done = Counter(here)
        delivered = t >= (2 if w.ahead else 1)  # whether an earlier stage's gradients have reached the layer
        done["tile"] += sums + (wide if delivered else 0)
        done["residual"] += accumulator if delivered else 0
        waiting = w.behind(t + (2 if w.ahead else 1))
        if streamed and w.holds:  # output and gradient of the stages to come
            done["kept"] += (2 if beside else 1) * waiting
        if streamed and not beside:  # what was kept here of the stages that were
            done["kept"] -= w.attended - waiting
        shape = (w.rows, len(stage.queries[0]), w.tokens * w.ranks, m.head_dim)
        inside = backward_workspace(w.job.kernel_of(index), shape, max(len(stage.kv[0]), 1), w.job.processors)
        inside //= 1 if w.stack.ring == 1 else 2  # a ring attends in halves
        grads = {"attention": mine + 2 * kv + adds, "workspace": inside, "exchange": before}
        if w.stack.ring > 1:
            grads = {"attention": 3 * mine + 9 * kv + adds, "workspace": inside, "exchange": 6 * kv + before}
        if recompute == "none":
            bufs = {"exchange": 2 * q, "attention": 2 * own * mine}
        elif w.ranks == 1:
            bufs = {"exchange": 3 * q + 2 * kv, "attention": 3 * own * mine + 2 * shared * kv}
        elif w.ahead:
            sets = min(2, len(w.schedule), t + 2)
            fresh = min(2, sum(any(each.fresh) for each in w.schedule[: t + 2]))
            homes = min(2, t) * q + (2 * kv if any(any(each.done) for each in w.schedule[:t]) else 0)
            bufs = {
                "exchange": 3 * sets * q + 2 * fresh * kv + homes,
                "attention": 3 * own * sets * mine + 2 * shared * fresh * kv,
            }
            before = mine
        else:
            bufs = {"attention": 3 * mine + 2 * kv}
            bring = {"exchange": 3 * q + 2 * k, "attention": 3 * own * mine + 2 * (shared if k else 1) * kv}
            w.moment("backward", done, bring, {"kept": inputs})
        w.moment("backward", done, bufs, grads, {"kept": inputs})
        if follows and streamed and not w.holds and (w.ahead or w.ranks == 1):
            # the sums of KV gradients are back from where they were parked
            w.moment("backward", done, bufs, {"attention": mine + 2 * kv, "kept": inputs + 4 * kv})
        token = w.rows * w.projected * HALF
        heads = w.heads(stage, "all") + 2 * w.heads(stage, "fresh")
        each = token * heads * m.head_dim
        wider = 1 if w.ranks == 1 else 0
        tile = (5 + wider) * token * m.hidden // 2 + 3 * each
        if w.job.lora:
            q_tile = token * w.heads(stage, "all") * m.head_dim
            scaled = q_tile if adapted else 0  # the gradient of q's adapter before its scale
            normed = q_tile if m.traits.qk_norm else 0
            tile = max(tile + scaled + normed, tile - 3 * each + 5 * scaled)
        else:
            tile += wider * each
        if graph and len(w.schedule) == 1:  # nothing is projected again: q's rotation is undone
            tile = 7 * q // 2 + w.x
            if w.heads(stage, "kv") > m.kv_heads:  # ranks that share KV heads: their gradients are added
                tile += 2 * w.head(m.kv_heads)
        tile += 2 * heads * m.head_dim * m.hidden * HALF
        if not delivered and w.projected < w.tokens:  # made with the first tile's gradient
            done["residual"] += accumulator
        home = q + 2 * kv if w.ranks > 1 or graph else mine
        live = bufs if w.ahead or w.ranks == 1 else {}
        leaving = 0  # gradients of this stage, on their way home while the layer takes those of the stage before
        if w.ahead and t > 0:
            leaving = mine + (2 * kv if any(stage.done) else 0)
        w.moment("backward", done, live, {"exchange": home, "attention": leaving, "tile": tile, "kept": inputs})
