"""What a decoder layer holds, in bytes: the terms of tokens.py, composed.py and streamed.py. No torch; tested against the dry run.

`forward` and `backward` walk through a layer in the order of the code and yield the snapshots at which it holds most: each is a
list of parts, bytes by category, to be added to what is there all the time. The planner takes the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...base.kernels import KERNELS
from ..attention.cost import KV, Bytes
from ..cost import RankCost
from ..limits import BF16, FP32, HOST_CACHE, IN_FLIGHT, TABLE_BYTES
from ..offload.cost import InFlight

Snapshot = list[Bytes]
SUM = FP32  # bytes of a weight's gradient that several tiles or stages add to


# -- what a layer keeps for backward -------------------------------------------------------------------------------------


def kept(rank: RankCost, layer: int) -> int:
    """Wherever that is: its input; with the attention output and log-sum-exp, unless they are computed again."""
    recompute = rank.stack.recompute_of(layer)
    if recompute == "layer":
        return rank.hidden
    attention = rank.attended + rank.attention.lse
    return rank.hidden + attention + (graph(rank) if recompute == "none" else 0)


def kept_below(rank: RankCost, layer: int) -> int:
    """On the device, of all layers below this one."""
    return sum(kept(rank, index) for index in range(layer) if not rank.offloads(index))


def graph(rank: RankCost) -> int:
    """recompute="none": q, k, v of every stage; and, untiled, what autograd keeps of both halves of a layer."""
    if rank.stack.tile is not None:
        return rank.attention.kept_qkv()
    model, one_stage = rank.model, len(rank.attention.stages) == 1
    normed_heads = model.heads + model.kv_heads if model.traits.qk_norm else 0
    norms = 0
    if not model.fused_norms:  # in fp32 the input of every norm, and where its weight is trained the output
        width = model.norms * model.hidden + normed_heads * model.head_dim
        norms = (1 if rank.job.lora else 2) * FP32 * rank.vectors * width
    projections = 0
    if one_stage:  # the normed input and its rms; q, k, v as they were made, and around their own norms
        made = 0 if in_place(rank) else model.heads + 2 * model.kv_heads  # in place they are those that are attended
        heads = made + normed_heads
        projections = rank.vectors * (BF16 * (model.hidden + heads * model.head_dim) + FP32)
        projections += rank.rotary if rank.rotary > TABLE_BYTES else 0  # of its own, where no table serves all layers
    return rank.attention.kept_qkv() + graph_after(rank) + norms + projections


def in_place(rank: RankCost) -> bool:
    """Whether heads are attended where they were made (attention/stages.py), by a layer whose graph is kept."""
    stack = rank.stack
    return stack.ulysses == stack.ring == len(rank.attention.stages) == 1 and KERNELS[rank.job.kernel].strided


def graph_after(rank: RankCost) -> int:
    """What autograd keeps of the untiled half behind attention."""
    model = rank.model
    if model.experts:
        narrow = rank.vectors * (BF16 * (2 * model.hidden + 4 * model.shared) + FP32)
        return experts(rank, rank.vectors)["kept"] + narrow
    *inner, outer = model.traits.mlp
    wide = 3 if len(inner) > 1 else 1  # gate, up, the activation; or what the activation keeps
    wide += 1 if rank.learns(outer) else 0  # and down's input
    if _gated(rank):
        wide = 2  # the others are computed again
    narrow = 2 if rank.learns(*inner) else 1  # the residual, gate's input
    if model.fused_norms:  # what the norms behind attention and MLP are of
        narrow += sum(name is not None for name in (model.traits.after_attention, model.traits.after_mlp))
    rms = FP32
    return rank.vectors * (BF16 * (wide * model.intermediate + narrow * model.hidden) + rms)


def _gated(rank: RankCost) -> bool:
    """Whether a dense MLP whose graph is kept computes activation and product again (model/gated.py)."""
    traits = rank.model.traits
    return len(traits.mlp) > 2 and (rank.model.silu or not traits.fused_mlp)


def _fused(rank: RankCost) -> bool:
    """Whether a kernel makes its product, and another both gradients (model/token_kernels.py)."""
    return _gated(rank) and rank.model.silu


def _turned(rank: RankCost) -> bool:
    """Whether a kernel rotates heads (model/token_kernels.py)."""
    traits = rank.model.traits
    return not (traits.wide_rope or traits.interleaved_rope or rank.model.rotary)


def stored(rank: RankCost) -> Bytes:
    """The most that waits in host memory and on disk: what layers keep, and a little of the one that runs. Beside a disk, what the
    last layer keeps and what a layer needs for itself waits in host memory."""
    kind, layers = rank.stack.offload, rank.model.layers
    host = "host" if kind == "disk" else kind
    waiting, most = {"host": 0, "disk": 0}, {"host": 0, "disk": 0}
    for layer in range(layers):
        if rank.offloads(layer):
            waiting[host if layer == layers - 1 else kind] += kept(rank, layer)
        scratch = 0
        if rank.streamed(layer) and not rank.holds:
            # in backward: the gradient of its attention output, and that output where it is computed again
            scratch = (2 if rank.stack.recompute_of(layer) == "layer" else 1) * rank.attended
            if not rank.offloads(layer):
                # later; of a layer that does, the store has by then given back much of what it kept
                scratch = max(scratch, rank.attention.stashed())
        for place, nbytes in waiting.items():
            most[place] = max(most[place], nbytes + (scratch if place == host else 0))
    return most


def near(rank: RankCost, on_disk: int) -> int:
    """Of so much on disk, the most that its store keeps in host memory, where that is free: what it was given last, or of streamed
    layers the one at hand, unless its pieces stay on the device, and the one below, read ahead (offload/host_cache.py)."""
    kept_there = [
        kept(rank, layer) for layer in range(rank.model.layers) if rank.streamed(layer) and rank.offloads(layer)
    ]
    ahead = (1 if rank.holds else 2) * max(kept_there, default=0)
    return min(on_disk, max(HOST_CACHE, ahead))


# -- tiles ---------------------------------------------------------------------------------------------------------------


def experts(rank: RankCost, vectors: int) -> dict[str, int]:
    """What experts hold of so many tokens: in forward at most, for backward, and in backward at most. Each token is copied for each
    expert that it goes to (model/experts.py)."""
    model = rank.model
    hidden, wide = (BF16 * vectors * model.active_experts * size for size in (model.hidden, model.intermediate))
    if model.traits.clamped_experts:
        # by transformers: biases for each copy; gate and up before and behind the clamp, and what is made of them
        return {"forward": hidden + 9 * wide, "kept": 2 * hidden + 7 * wide, "backward": 4 * hidden + 7 * wide}
    # gate and up; their product; copies before or behind; in backward the gradients of all of these
    return {"forward": hidden + 3 * wide, "kept": 2 * wide, "backward": hidden + 6 * wide}


def tile_after(rank: RankCost, backward: bool) -> int:
    """A tile of the half behind attention: o_proj, residual, norm, MLP."""
    model, vectors = rank.model, rank.rows * rank.tile
    *inner, _ = model.traits.mlp
    # where PEFT's own code runs, up's adapter is beside gate, up and their product
    adapted = 1 if rank.adapts(inner[-1]) and not _gated(rank) else 0
    if model.experts:
        grouped = experts(rank, vectors)
        if backward:  # the graph of the shared expert beside that of the others
            return grouped["backward"] + vectors * BF16 * (3 * model.hidden + 4 * model.shared)
        narrow = 4 if model.shared else 3  # what the shared expert has made waits for the others
        shared = vectors * BF16 * (3 + adapted) * model.shared
        return max(grouped["forward"], shared) + narrow * vectors * BF16 * model.hidden
    wide = model.intermediate
    if backward:
        wider = 6 * wide if len(inner) > 1 else 4 * wide  # gate, up, activation, and their gradients
        # gate, up, their gradients, and the product; where gate and up are one, its gradient too
        wider = (6 if model.traits.fused_mlp else 5) * wide if _fused(rank) else wider
        narrow = 3 if rank.learns(*inner) else 2  # the input of gate and up is kept for their gradients
        narrow += 1 if model.fused_norms and model.traits.after_mlp else 0  # and what the norm behind the MLP is of
        return vectors * BF16 * (wider + narrow * model.hidden)
    if model.traits.fused_mlp and not _gated(rank):  # gate stays beside its activation; an adapter's product is of both
        adapted = 1 + 2 * adapted
    return vectors * BF16 * ((3 + adapted) * wide + 3 * model.hidden)


def tile_project(rank: RankCost, t: int) -> int:
    """A tile of a stage's projections in forward."""
    model, stage = rank.model, rank.attention.stages[t]
    token = rank.rows * rank.projection_tile * BF16
    normed = token * model.hidden
    q, k = token * stage.heads * model.head_dim, token * stage.distinct_kv_heads * model.head_dim
    chosen = 0  # rows of the weights, where a stage takes some of them
    cut = 0  # where all heads are normed together, all of them are projected, normed, and then cut
    if len(rank.attention.stages) > 1:
        whole = model.traits.qk_norm == "whole"
        rows = 2 * stage.new_kv_heads + stage.heads if not whole else stage.new_kv_heads
        chosen = rows * model.head_dim * model.hidden * BF16
        cut = 2 * token * model.heads * model.head_dim if whole else 0
    # a projection and the result; and, where operators turn it, its two halves (in fp32, if wide)
    rotating = 7 if model.traits.wide_rope else 2 if _turned(rank) else 4
    return normed + max(rotating * q, q + rotating * k, cut) + chosen  # k beside q, which is done


def tile_receive(rank: RankCost, t: int, kept_graph: bool) -> int:
    """A tile of a stage's projections in backward: computed again and differentiated, with the gradients of the weights' rows."""
    model, stage = rank.model, rank.attention.stages[t]
    token = rank.rows * rank.projection_tile * BF16
    heads = stage.heads + 2 * stage.new_kv_heads
    whole = model.traits.qk_norm == "whole"
    if whole:
        heads = model.heads + model.kv_heads + stage.new_kv_heads  # q and k of all heads are made for each stage
    weight_gradients = 2 * heads * model.head_dim * model.hidden * BF16  # and the rows of the weights themselves
    if rank.job.lora:
        weight_gradients = weight_gradients // 2 if len(rank.attention.stages) > 1 else 0
    if kept_graph and len(rank.attention.stages) == 1:  # nothing is projected again: rotations are undone
        both = stage.q_sent + token * stage.new_kv_heads * model.head_dim
        turned = both if _turned(rank) else 7 * stage.q_sent // 2
        shared = (
            2 * model.kv_heads * rank.attention.head if stage.kv_heads_here * rank.stack.ulysses > model.kv_heads else 0
        )
        return turned + rank.hidden + shared + weight_gradients  # ranks that share KV heads add their gradients
    alone = 1 if rank.stack.ulysses == 1 else 0  # gradients come as they were made, and are put in order here
    qkv = token * heads * model.head_dim
    q, kv = token * stage.heads * model.head_dim, token * stage.new_kv_heads * model.head_dim
    if _turned(rank) or whole:
        made = q + 2 * kv if model.traits.qk_norm else 0  # heads behind their projection, where a norm reads them
        # the normed input and its gradient; heads, and those of their gradients that are no views
        meeting = 2 * token * model.hidden + made + qkv + alone * q - (1 - alone) * kv
        if whole:  # of all heads before the norm, of the stage's behind it; k's gradient, and q's around the norm
            every, keys = (token * count * model.head_dim for count in (model.heads, model.kv_heads))
            # of one stage all heads are turned, and so are their gradients; q's also as they were made
            turned = 3 * every + 2 * keys if len(rank.attention.stages) == 1 else 0
            return max(meeting, token * model.hidden + made + 3 * every + 2 * keys + turned) + weight_gradients
        # heads around their own norm; k's gradient, and q's around the norm
        normed = token * model.hidden + made + (3 + alone) * q + 2 * kv
        return max(meeting, normed if model.traits.qk_norm else 0) + weight_gradients
    narrow = 2 * token * model.hidden  # the normed input and its gradient
    # where no norm reads them, heads are not made again before they are turned; turned ones, and a gradient
    projected = (3 if model.traits.qk_norm else 2) * qkv
    return narrow + projected + alone * qkv + weight_gradients


# -- forward -------------------------------------------------------------------------------------------------------------


def forward(rank: RankCost, layer: int, in_flight: InFlight) -> Iterator[Snapshot]:
    attention, model = rank.attention, rank.model
    streamed, offloads, recompute = rank.streamed(layer), rank.offloads(layer), rank.stack.recompute_of(layer)
    below = {"kept": kept_below(rank, layer)}
    here = {"residual": rank.hidden, **rank.gathered_layer()}
    yield [below, here, rank.arriving(model.hidden * model.intermediate, model.layer_weights), rank.unpacking()]
    if layer and offloads != rank.offloads(layer - 1):
        in_flight.flush()
    if streamed and offloads:
        _put_pieces(rank, in_flight, rank.hidden, copied=rank.rows > 1)
    # the output of stages for the layer's second half stays here, or goes to the store, or both
    stays = streamed and (rank.holds or (not offloads and recompute == "keep_attention"))
    puts = streamed and ((offloads and recompute == "keep_attention") or not stays)
    lse, outputs = 0, 0 if streamed else rank.attended

    def hand_over(t: int) -> int:
        """The output of a stage goes to the layer. -> bytes that stay on the device for the layer's second half"""
        stage = attention.stages[t]
        if puts:
            _put_pieces(rank, in_flight, stage.q_sent, copied=stage.heads * rank.rows > 1)
        return stage.q_sent if stays else 0

    homing: int | None = None  # the stage whose output is still on its way home
    for t, stage in enumerate(attention.stages):
        lse += stage.lse
        held = {"kept": outputs + in_flight.copies, "attention": lse}
        if not attention.overlaps:
            yield [below, here, held, attention.bringing(t), {"tile": tile_project(rank, t)}]
        leaving = {"exchange": 0 if homing is None else attention.leaving(homing)}
        yield [below, here, held, attention.attending(t), attention.output(t), leaving]
        if homing is not None:
            outputs += hand_over(homing)
        held = {"kept": outputs + in_flight.copies, "attention": lse}
        yield [below, here, held, attention.attending(t), attention.going_home(t)]
        homing = t
        if not attention.overlaps:
            outputs += hand_over(t)
            homing = None
    if homing is not None:
        outputs += hand_over(homing)
    behind = {"kept": outputs + in_flight.copies + (graph(rank) if recompute == "none" else 0), "attention": lse}
    if streamed:
        piece = rank.rows * rank.piece * model.heads * model.head_dim * BF16  # of all heads, put together
        # read back: of the stage at hand and the next
        behind["kept"] += piece if stays else piece + 2 * piece // max(len(attention.stages), 1)
    written_over = streamed and offloads  # the input has left
    untiled_graph = recompute == "none" and rank.stack.tile is None  # counted as kept
    tile = 0 if untiled_graph else tile_after(rank, backward=False)
    yield [below, here, behind, {"residual": 0 if written_over else rank.hidden, "tile": tile}]
    if streamed and not rank.holds:
        in_flight.flush()  # the second half has read it all back
    if offloads and not streamed:
        in_flight.put(kept(rank, layer), True)


def _put_pieces(rank: RankCost, in_flight: InFlight, whole: int, copied: bool) -> None:
    in_flight.put(whole // rank.pieces, copied and rank.pieces > 1, rank.pieces)


# -- backward ------------------------------------------------------------------------------------------------------------


def backward(rank: RankCost, layer: int, in_flight: InFlight) -> Iterator[Snapshot]:
    model, stack, job = rank.model, rank.stack, rank.job
    streamed, offloads, recompute = rank.streamed(layer), rank.offloads(layer), stack.recompute_of(layer)
    last, untiled_graph = layer == model.layers - 1, recompute == "none" and stack.tile is None
    below = {"kept": kept_below(rank, layer + 1)}
    here: Counter[str] = Counter(rank.gradients_of((model.layers - 1 - layer) * job.layer_trained + job.head_trained))
    here.update(rank.gathered_layer())
    if last and rank.fsdp:  # the head's gradient on its way to its shards
        # copied once more; or its weights are still there, and those of the last layer
        beside = job.head_trained * FP32 if rank.shards == 1 else job.head_trained * BF16 + rank.sent_layer
        reducing = {"fsdp": rank.reducing(job.head_trained, beside)}
        yield [below, reducing, {"residual": 2 * rank.hidden, "kept": in_flight.copies}]
    in_flight.flush()
    here.update(_beside_backward(rank, layer))
    inputs = 0  # pieces of the input: read, being read, and the next
    if streamed and offloads and not rank.holds:
        inputs = min(3, rank.pieces) * rank.rows * rank.piece * model.hidden * BF16
    yield [below, here, *_after_backward(rank, layer, inputs)]
    if untiled_graph:
        below = {"kept": below["kept"] - (graph_after(rank) - rank.hidden)}  # done with, but for its result
    yield from ([below, *snapshot] for snapshot in _attend_backward(rank, layer, here, inputs))
    if rank.fsdp:  # gradients of the layer on their way to their shards
        reducing = {"fsdp": rank.reducing(job.layer_trained, BF16 * job.layer_trained), "residual": rank.hidden}
        yield [below, rank.gathered_layer(), {"gradients": here["gradients"]}, reducing]
        yield [below, here, rank.arriving(model.hidden * model.intermediate, model.layer_weights)]


def _beside_backward(rank: RankCost, layer: int) -> Counter[str]:
    """What is there all through the backward of a layer, beside weights and the gradients of layers above."""
    model, stack, job = rank.model, rank.stack, rank.job
    streamed, offloads = rank.streamed(layer), rank.offloads(layer)
    here: Counter[str] = Counter()
    if rank.fsdp:  # gradients of the layer above, in fp32, are being reduced
        here["fsdp"] += FP32 * (job.head_trained if layer == model.layers - 1 else job.layer_trained)
        if layer == 0 and not model.tied and rank.shards > 1:
            # not a layer below is there beside this one, but the embedding, gathered ahead of its turn
            here["fsdp"] += max(0, BF16 * model.embedding_weights - rank.sent_layer)
    if model.tied and not job.lora:
        here["gradients"] += BF16 * model.embedding_weights  # of the head, until the embedding's joins it
    if streamed:
        here["residual"] += (1 if stack.offload != "gpu" else 2) * rank.hidden  # dy becomes dx, in place where it may
        if offloads:
            here["kept"] += rank.attention.lse + (rank.hidden if rank.holds else 0)
        return here
    here["residual"] += 2 * rank.hidden + rank.attended  # dy, dx and the gradient of the attention output
    if offloads:
        here["kept"] += kept(rank, layer)
        below = next((index for index in reversed(range(layer)) if rank.offloads(index)), None)
        here["kept"] += 0 if below is None else kept(rank, below)  # on its way
    if stack.recompute_of(layer) == "layer":
        here["kept"] += rank.attended
    return here


def _output_is_read(rank: RankCost, layer: int) -> bool:
    """Whether the attention output is not among what was kept on the device."""
    return rank.offloads(layer) or rank.stack.recompute_of(layer) == "layer"


def _after_sums(rank: RankCost) -> int:
    """Gradients of o_proj, MLP and norms, of all tiles."""
    return rank.job.after_trained * (SUM if rank.tokens > rank.tile else BF16)


def _after_backward(rank: RankCost, layer: int, inputs: int) -> Snapshot:
    """The half behind attention, while its last tile is computed."""
    model, job, streamed = rank.model, rank.job, rank.streamed(layer)
    count, trained = -(-rank.tokens // rank.tile), job.after_trained
    sums = trained * (0 if count == 1 else BF16 if count == 2 else SUM)
    transposed = 0 if job.lora else model.hidden * model.intermediate * BF16  # the gradient of one linear of the MLP
    if rank.stack.recompute_of(layer) == "none" and rank.stack.tile is None:
        # gradients of gate and up; and the product, or activation and the product's gradient, where those were not kept
        apart = not model.traits.fused_mlp
        work = (3 if _fused(rank) and apart else 4 if _gated(rank) else 2) * rank.vectors * model.intermediate * BF16
        if model.experts:
            work = experts(rank, rank.vectors)["backward"] - experts(rank, rank.vectors)["kept"]
        work += rank.hidden  # the layer's output, in which its graph ends
    else:
        work = tile_after(rank, backward=True)
    tile = max(transposed + work, trained * BF16)
    pieces = waiting = 0
    if not streamed and count == 1:  # the gradients of x and of the attention output come last, when the MLP's are gone
        waiting = -(rank.hidden + rank.attended)
    if streamed:
        piece = rank.rows * rank.piece * model.heads * model.head_dim * BF16
        pieces = 2 * piece  # the attention output of a piece, and its gradient
        if rank.holds:  # output, and its gradient but for the piece at hand
            waiting = (2 if _output_is_read(rank, layer) else 1) * rank.attended - piece
    return [{"kept": inputs + pieces + waiting, "tile": sums + tile}]


def _attend_backward(rank: RankCost, layer: int, beside: Counter[str], inputs: int) -> Iterator[Snapshot]:
    model, job, attention = rank.model, rank.job, rank.attention
    streamed, recompute = rank.streamed(layer), rank.stack.recompute_of(layer)
    untiled_graph, one_stage = recompute == "none" and rank.stack.tile is None, len(attention.stages) == 1
    read = _output_is_read(rank, layer)
    # the sum over stages of the normed input's gradient; composed in fp32, where there are several
    dh = rank.hidden if streamed or one_stage else 2 * rank.hidden
    qkv_sums = 0 if job.lora else (model.heads + 2 * model.kv_heads) * model.head_dim * model.hidden
    qkv_sums *= BF16 if one_stage else SUM
    lag = 2 if attention.overlaps else 1  # stages until a stage's gradients have reached the layer
    stashes = streamed and not rank.holds  # sums of KV gradients wait outside
    scattered = stashes  # whether gradients of the output may still leave for their store; a stash waits for them
    leaving = 0  # gradients of the stage before, while they are on their way home
    after_sums, kernel = _after_sums(rank), job.kernel_of(layer)
    for t, stage in enumerate(attention.stages):
        delivered = t >= lag
        here = {"tile": 0, "residual": 0, "kept": 0, **beside}  # a Counter's copy takes five times as long
        here["tile"] += after_sums + (qkv_sums if delivered else 0)
        here["residual"] += dh if delivered else 0
        to_come = attention.behind(t + lag)
        if streamed and rank.holds:  # output and gradient of the stages to come
            here["kept"] += (2 if read else 1) * to_come
        if streamed and not read:  # what was kept here of the stages that were
            here["kept"] -= rank.attended - to_come
        sums = attention.kv_sums(t) if attention.shares_kv(t) and not stashes else 0
        workspace = attention.workspace(t, kernel, job.processors)
        gradients = attention.gradients(t, sums, leaving, workspace)
        pieces = {"kept": inputs}
        # of the last piece of the output's gradient, what stages to come will read
        scattered = scattered and not attention.shares_kv(t)
        out_there = {"kept": min(attention.behind(t + lag) // rank.pieces, IN_FLIGHT) if scattered else 0}
        if recompute == "none":
            buffers = {} if untiled_graph and in_place(rank) else attention.kept_backward(t)
        else:
            buffers = attention.attending_backward(t)
            if attention.overlaps:
                leaving = stage.q_here + (KV * stage.k_here if stage.ends_kv else 0)
            elif attention.ulysses > 1:
                # the input is read before the output and its gradient come
                yield [here, attention.bringing(t), {"tile": tile_project(rank, t)}, pieces, out_there]
                yield [here, attention.bringing_backward(t), out_there]
        yield [here, buffers, gradients, out_there]
        if attention.shares_kv(t) and stashes and (attention.overlaps or attention.ulysses == 1):
            # the sums of KV gradients are back from where they were stashed
            added = {"attention": stage.q_here + 2 * stage.k_here, "kept": attention.kv_sums(t)}
            yield [here, buffers, added]
        if not delivered and rank.projection_tile < rank.tokens:  # made with the first tile's gradient
            here["residual"] += dh
        in_buffers = 0  # from the third stage on gradients come home into buffers that are counted already
        if streamed and attention.overlaps and recompute != "none" and t > 1:
            in_buffers = stage.q_sent + (KV * stage.k_here if attention.kv_homes(t) > 1 else 0)
        yield [
            here,
            buffers if attention.overlaps or attention.ulysses == 1 else {},
            {"exchange": attention.delivered(t, untiled_graph) - in_buffers, "attention": attention.departing(t)},
            {"tile": tile_receive(rank, t, untiled_graph)},
            pieces,
            out_there,
        ]
