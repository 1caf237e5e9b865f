"""Moments of a layer's forward, for the walk in memory.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine.attention.head_schedule import Stage
from .job import HALF

if TYPE_CHECKING:
    from .memory import Walk


def forward(w: Walk, index: int) -> None:
    w.kept = w.kept_below(index)
    streamed = w.stack.engine_of(index) == "streamed"
    recompute, offloads = w.stack.recompute_of(index), w.offloads(index)
    here = {"residual": w.x, **w.gathered()}
    w.moment("forward", here, w.arriving(w.m.hidden * w.m.intermediate, w.m.layer_weights))
    if index and offloads != w.offloads(index - 1):
        w.land()  # the store was told to let go
    if streamed and offloads:
        _put_pieces(w, w.x, copied=w.rows > 1)
    lses, outs = 0, 0 if streamed else w.attended
    handed: Stage | None = None  # the stage whose output is still on its way home
    # what stages leave for the layer's second half stays here, or goes to the store, or both
    stays = streamed and (w.holds or (not offloads and recompute == "keep_attention"))
    puts = streamed and ((offloads and recompute == "keep_attention") or not stays)
    for t, stage in enumerate(w.schedule):
        lses += w.lse(stage)
        q, mine = w.head(w.heads(stage, "all")), w.head(w.heads(stage, "mine"))
        leaving = 0 if handed is None else w.head(w.heads(handed, "all") + w.heads(handed, "mine"))
        held = {**here, "kept": outs + w.flight.bytes, "attention": lses}
        if not w.ahead:
            w.moment("forward", held, w.buffers(t, "bring"), _project_tile(w, stage))
        w.moment("forward", held, w.buffers(t, "attend"), _attend(w, stage), {"exchange": leaving})
        if handed is not None:
            outs += _hand_over(w, handed, stays, puts)
        held["kept"] = outs + w.flight.bytes
        home = (q if w.ranks > 1 else 0) + (mine if w.parts(len(stage.queries[0])) > 1 else 0)
        w.moment("forward", held, w.buffers(t, "attend"), {"attention": mine, "exchange": home})
        handed = stage
        if not w.ahead:
            outs += _hand_over(w, stage, stays, puts)
            handed = None
    if handed is not None:
        outs += _hand_over(w, handed, stays, puts)
    w.kept += w.graph_bytes() if recompute == "none" else 0
    attended = {"kept": outs + w.flight.bytes, "attention": lses}
    piece = w.rows * w.piece * w.m.heads * w.m.head_dim * HALF
    if streamed:
        attended["kept"] += piece if stays else piece + 2 * piece // max(len(w.schedule), 1)
    result = 0 if streamed and offloads else w.x
    graph = recompute == "none" and w.stack.tile is None  # counted as kept
    tile = 0 if graph else w.after_tile(False)
    w.moment("forward", here, attended, {"residual": result, "tile": tile})
    if streamed and not w.holds:
        w.land()  # the second half has read it all back
    if offloads and not streamed:
        w.flight.put(w.kept_of(index), True)


def _hand_over(w: Walk, stage: Stage, stays: bool, puts: bool) -> int:
    """The output of a stage goes to the layer. -> bytes that stay on the device for the layer's second half"""
    q = w.head(w.heads(stage, "all"))
    if puts:
        _put_pieces(w, q, copied=w.heads(stage, "all") * w.rows > 1)
    return q if stays else 0


def _attend(w: Walk, stage: Stage) -> dict[str, int]:
    """What a kernel makes in forward; around a ring partial results are merged in fp32."""
    mine, kv = w.head(w.heads(stage, "mine")), w.head(w.heads(stage, "kv"))
    return {"attention": mine} if w.stack.ring == 1 else {"attention": 11 * mine // 2, "exchange": 2 * kv}


def _put_pieces(w: Walk, whole: int, copied: bool) -> None:
    pieces = -(-w.tokens // w.piece)
    w.flight.put(whole // pieces, copied and pieces > 1, pieces)


def _project_tile(w: Walk, stage: Stage) -> dict[str, int]:
    m, t = w.m, w.rows * w.projected
    width = m.head_dim * HALF
    q, k = w.heads(stage, "all") * width * t, len({h for r in stage.fresh for h in r}) * width * t
    chosen = 0
    if len(w.schedule) > 1:
        chosen = (w.heads(stage, "all") + 2 * w.heads(stage, "fresh")) * m.head_dim * m.hidden * HALF
    adapted = w.job.adapters
    of_q, of_kv = (2 if "q_proj" in adapted else 0), (2 if adapted.keys() & {"k_proj", "v_proj"} else 0)
    return {"tile": t * m.hidden * HALF + max((4 + of_q) * q, q + (4 + of_kv) * k) + chosen}
