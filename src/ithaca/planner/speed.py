"""How long a step takes, by arithmetic, and what bounds it.

    attention   operations of the causal triangle at the kernel's rate; once more where backward computes it again
    matmul      2 operations for each weight and token forward, 4 backward, and 2 again where backward recomputes
                (objectives dpo and policy: the head's too; a reference that is the base: 2 more of every weight)
    other       norms, rotations, copies between layouts, sums of gradients: bound by memory, by the token and layer; and weights
                that are unpacked from NF4
    pcie, disk  what the store moves, as far as computation waits for it
    links       all-to-alls, ring and FSDP2, as far as they are longer than the computation beside them
    optimizer   what it moves: through the GPU's memory, or over the link, where weights and states wait on the host
                (train.offload_optimizer). A tenth of a step at 8K tokens, nothing at 1M. Muon: products of whole matrices, the
                same ones on every rank, and the links that gather them

Rates are those of whole steps measured on one H200 (benchmarks/results/2026-11-15-h200.md), as shares of the GPU's peak. Links
between GPUs are the makers' figures, unless they were measured on this machine (links.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..base.kernels import rates_of
from ..engine.cost import RankCost
from ..engine.job import Job
from ..engine.limits import BF16, FP32, HOLD_BYTES, HOST_CACHE, NEWTON_SCHULZ, NF4, PROJECTION_TILES
from .flops import visible_pairs
from .gpus import INFINITY, NVLINK
from .hardware import Hardware
from .links import Links

# Operations for each weight and token that it is multiplied with: forward; backward, for the input and for the weight.
FORWARD, BY_INPUT, BY_WEIGHT = 2, 2, 2
# Products of attention for each visible pair of a head: scores and weighted sum; backward, the scores again, dv, dp, dq and dk.
PRODUCTS, BACKWARD_PRODUCTS = 2, 5
MATMUL = 0.70  # share of the peak
# Seconds a token and layer of 2,048 wide spends in everything else, on a memory of 4.8 TB/s: in tiles, and whole; and for each
# expert that it goes to (benchmarks/results/2026-11-18-h200.md, "kernels of tokens").
OTHER, COPIED = {True: 0.25e-6, False: 0.13e-6}, 0.027e-6
PROJECTED, TILED = 150e-6, 100e-6  # seconds to launch what a tile of a stage's projections, and of an MLP, takes
# Share of the copies from the host that is waited for: pieces read once, and pieces read again by every stage.
WAITED = {True: 0.9, False: 0.7}
LINK = 0.75  # of the makers' bandwidth that a collective reaches
# States on the host come to the GPU by blocks (engine/host_adamw.py): bytes of a weight that come and that go back meanwhile. For
# the norm its gradient; for the update weight, averages and gradient; for each further micro-batch the sum and what is added.
NORM, UPDATE, SUM = (4, 0), (16, 12), (8, 4)
FP64, REACHED = 8, 0.85  # share of a memory's bandwidth that a kernel reaches which does little with much
BOTH_WAYS = 0.9  # share of the link each way where both are busy: 0.91 and 0.92 on an H200, 3.2 and 4.1 billion weights
HOST_RATE = 200e9  # bytes a second that a machine's memory gives and takes, all its ranks together: an assumption


@dataclass(frozen=True)
class Speed:
    parts: dict[str, float]
    tokens_per_second: float  # per GPU

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def order(self) -> tuple[float, float]:
        """Sorts the fastest first; where links alone set the pace, the one that computes least."""
        return round(self.seconds, 9), sum(self.parts[part] for part in ("attention", "matmul", "other"))

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def estimate(job: Job, hardware: Hardware) -> Speed:
    model, stack, gpu, rank = job.model, job.stack, hardware.gpu, RankCost(job)
    tokens = rank.rows * job.context / (stack.ulysses * stack.ring)
    parts = dict.fromkeys(("attention", "matmul", "other", "pcie", "disk", "links", "optimizer"), 0.0)
    parts["attention"] = _attention(job, rank.rows, older=not gpu.hopper) / gpu.peak
    parts["matmul"] = _products(job, tokens) / (gpu.peak * MATMUL)
    tiled = stack.tile is not None and stack.tile < job.context
    # beside layers that compute nothing again, which are not in tiles, the others cost what tiles do
    again = sum(kind != "none" for kind in stack.recompute) if isinstance(stack.recompute, tuple) else 0
    other = model.layers * (OTHER[tiled] + model.active_experts * COPIED) + again * (OTHER[True] - OTHER[tiled])
    parts["other"] = other * tokens * (model.hidden / 2048) * (4.8e12 / gpu.bandwidth)
    parts["other"] *= 1 + job.reference / 4  # forward, backward, and what is computed again
    parts["other"] += model.layers * (_tiles(job, tokens, gpu.bandwidth) + _unpacking(job) / gpu.bandwidth)
    compute = parts["attention"] + parts["matmul"] + parts["other"]
    kept, read, waited = _store(job, tokens)
    if stack.offload == "disk":
        # what was put last is still near, and not read back
        written_and_read = (kept + max(0.0, kept - HOST_CACHE)) * hardware.ranks_per_node
        parts["disk"] = max(0.0, written_and_read / hardware.disk_rate - compute)
    if job.offload:  # weights are gathered for forward and for backward, and waited for; gradients go back meanwhile
        gathered = 2 * (FP32 * job.trained + BF16 * job.frozen) / rank.shards
        gradients = FP32 * job.trained / rank.shards
        kept, waited = kept + gathered + gradients, waited + gathered
        moves = [NORM, UPDATE, *[SUM] * (job.accumulation - 1)]
        moved = sum(_moved(job.trained / rank.shards, *each, hardware) for each in moves)
        parts["optimizer"] = moved / job.accumulation
    else:
        parts["optimizer"] = _update(rank) / (REACHED * gpu.bandwidth) / job.accumulation
    parts["pcie"] = waited / gpu.pcie + max(0.0, (kept + read) / gpu.pcie - compute)
    # where GPUs talk over PCIe too, copies have taken their share of the time that what is sent could hide behind
    beside = compute if gpu.link in (NVLINK, INFINITY) else max(0.0, compute - (kept + read) / gpu.pcie)
    parts["links"] = _links(rank, hardware, beside)
    if job.optimizer == "muon":
        parts["optimizer"] += _muon(rank, hardware) / job.accumulation
    parts = {name: job.accumulation * seconds for name, seconds in parts.items()}
    return Speed(parts, job.accumulation * tokens / sum(parts.values()))


def _moved(weights: float, come: int, go: int, hardware: Hardware) -> float:
    """Seconds that so many bytes of each weight take to the GPU and back; all ranks of a machine do it at once."""
    link = hardware.gpu.pcie * (BOTH_WAYS if go else 1)
    return weights * max(come / link, (come + go) * hardware.ranks_per_node / HOST_RATE)


def _update(rank: RankCost) -> float:
    """Bytes that an update on the GPU reads and writes: gradients for their norm, with a copy in float64, and as they are clipped;
    weights, states and, once more, gradients."""
    gradients, weights = rank.shard_gradients, rank.job.trained / rank.shards
    return gradients + 2 * FP64 * weights + 2 * gradients + 2 * (gradients + rank.states) + gradients


def _muon(rank: RankCost, hardware: Hardware) -> float:
    """Seconds of an update: a product with the matrix on either side of the square of its Gram matrix, in each iteration."""
    operations = gathered = 0
    for rows, columns in rank.job.matrices:
        short, long = min(rows, columns), max(rows, columns)
        operations += NEWTON_SCHULZ * (4 * short * short * long + 2 * short**3)
        gathered += BF16 * rows * columns
    links = gathered * (1 - 1 / rank.shards) / _beyond(rank.job, hardware).gather
    return operations / (hardware.gpu.peak * MATMUL) + links


def _attention(job: Job, rows: int, older: bool) -> float:
    """Operations of a rank at the peak, each kernel's at its share of it. older: on a GPU before Hopper."""
    model, stack = job.model, job.stack
    operations = 0.0
    for layer, window in enumerate(model.windows):
        forward, backward = rates_of(job.kernel_of(layer), model.head_dim, older)
        again = 2 if stack.recompute_of(layer) == "layer" else 1
        product = 2 * visible_pairs(job.context, window) * rows * model.heads * model.head_dim
        operations += (
            product
            / (stack.ulysses * stack.ring)
            * ((again + job.reference) * PRODUCTS / forward + BACKWARD_PRODUCTS / backward)
        )
    return operations * _idle(model.heads, stack.ulysses)


def _products(job: Job, tokens: float) -> float:
    """Operations of a rank that multiply weights."""
    model, stack = job.model, job.stack
    experts = 3 * model.hidden * model.intermediate * model.active_experts + model.shared_weights
    layer = model.attention_weights + (experts if model.experts else model.mlp_weights)
    passes = FORWARD + BY_INPUT + (0 if job.lora else BY_WEIGHT)
    kept = sum(stack.recompute_of(index) == "none" and stack.tile is None for index in range(model.layers))
    again = FORWARD * (model.layers - kept) * (layer - _unread(job))
    adapters = (FORWARD + BY_INPUT + BY_WEIGHT + FORWARD) * job.trained if job.lora else 0
    head = passes + (FORWARD if job.units else 0)  # logits are made again in backward
    base = FORWARD * (layer * model.layers + model.embedding_weights) if job.reference else 0
    return tokens * (layer * model.layers * passes + again + model.embedding_weights * head + adapters + base)


def _unread(job: Job) -> int:
    """Weights of a layer by which nothing is multiplied again: nobody reads the last product (engine/model/unread.py)."""
    model, traits = job.model, job.model.traits
    alone = not traits.after_mlp and len(traits.mlp) > 2 and (model.silu or not traits.fused_mlp)
    if not alone or (model.experts and traits.clamped_experts):
        return 0
    return model.hidden * model.intermediate * (model.active_experts if model.experts else 1)


def _store(job: Job, tokens: float) -> tuple[float, float, float]:
    """Bytes that go to the store, that are read back, and of these those that are waited for."""
    model, stack = job.model, job.stack
    if stack.offload == "gpu":
        return 0.0, 0.0, 0.0
    hidden, attended = tokens * model.hidden * BF16, tokens * model.heads * model.head_dim * BF16
    away = [layer for layer in range(model.layers) if stack.store_of(layer) != "gpu"]
    kept = len(away) * hidden + sum(stack.recompute_of(layer) != "layer" for layer in away) * attended
    holds = hidden <= HOLD_BYTES if stack.hold is None else stack.hold
    if holds or stack.engine == "composed":
        return kept, kept, WAITED[holds] * kept
    # the input for both halves and, in backward, again by every stage; the output and its gradient, put together and taken apart
    read = len(away) * (hidden * (2 + 2 * _stages(job)) + 4 * attended)
    read += (model.layers - len(away)) * 2 * attended  # the other layers' gradients of attention pass through it
    return kept, read, WAITED[holds] * read


def _stages(job: Job) -> int:
    """At least one; heads that do not divide leave a rank idle in some of them."""
    model, stack = job.model, job.stack
    return -(-model.heads // (stack.ulysses * (stack.heads_per_stage or model.heads)))


def _tiles(job: Job, tokens: float, bandwidth: float) -> float:
    """What a layer pays for being cut into tiles: launches, and the fp32 sums of weight gradients that every tile adds to."""
    model, tile = job.model, job.stack.tile
    if tile is None or tile >= tokens:
        return 0.0
    count = tokens / tile
    read_add_write = 3 * FP32
    weights = 0 if job.lora else model.mlp_weights + model.heads * model.head_dim * model.hidden
    return _stages(job) * count / PROJECTION_TILES * PROJECTED + count * (TILED + read_add_write * weights / bandwidth)


def _unpacking(job: Job) -> float:
    """Bytes that NF4 moves for a layer: copied into place, read and written as bf16, for forward and for backward."""
    return (2 + job.reference) * job.packed * (3 * NF4 + BF16)


def _links(rank: RankCost, hardware: Hardware, beside: float) -> float:
    """Seconds of communication that cannot hide behind so many seconds of computation."""
    job, stack, model, attention = rank.job, rank.stack, rank.model, rank.attention
    inside, between = _rates(hardware.gpu.nvlink, hardware.links), _rates(hardware.network, hardware.fabric)
    beyond = _beyond(job, hardware)
    recompute = Counter(stack.recompute_of(layer) for layer in range(model.layers))
    exchange = ring = sharding = 0.0
    if stack.ulysses > 1:
        link = inside if stack.ulysses <= hardware.ranks_per_node else between
        sent = sum(attention.exchanged(kind) * times for kind, times in recompute.items())
        exchange = sent * (1 - 1 / stack.ulysses) / link.all_to_all
    if stack.ring > 1:
        ring = sum(attention.passed_around(kind) * times for kind, times in recompute.items()) / beyond.ring
    moved = sharded_bytes(rank)
    sharding = (moved["gathered"] / beyond.gather + moved["reduced"] / beyond.reduce) * (1 - 1 / rank.shards)
    replicas = job.world // rank.shards
    sharding += (
        moved["summed"] * (1 / beyond.reduce + 1 / beyond.gather) * (1 - 1 / replicas)
    )  # as a ring sums: there and back
    # With nothing to hide behind: of a layer's stages, what the first waits for and what the last brings home; of a ring, the sums
    # of gradients on their last hop; of weights, those of the first layer, and of gradients those of the last to be done.
    exposed = exchange / (len(attention.stages) if attention.overlaps else 1)
    exposed += model.layers * attention.last_hop() / beyond.ring
    exposed += sharding / model.layers
    return exposed + max(0.0, exchange + ring + sharding - exposed - beside)


def sharded_bytes(rank: RankCost) -> dict[str, int]:
    """What FSDP2 moves in a step. gathered: weights, for forward and again for backward; the embedding once (backward does not need
    it, or the head has kept it), and so the last norm, which is kept. reduced: gradients, to their shards. summed: those of a
    shard, over its replicas."""
    job, model = rank.job, rank.model
    bytes_of: dict[str, int] = {"gathered": 0, "reduced": 0, "summed": 0}
    if job.world > 1 and rank.shards > 1:
        once = model.embedding_weights + model.hidden
        again = model.weights if job.reference else 0
        spared = (2 + job.reference) * model.layers * rank.spared
        bytes_of |= {"gathered": BF16 * (2 * model.weights - once + again) - spared, "reduced": FP32 * job.trained}
    if job.world > rank.shards:
        bytes_of["summed"] = FP32 * job.trained // rank.shards
    return bytes_of


def _beyond(job: Job, hardware: Hardware) -> Links:
    """What all ranks together talk over."""
    if job.world > hardware.per_node:
        return _rates(hardware.network, hardware.fabric)
    return _rates(hardware.gpu.nvlink, hardware.links)


def _rates(figure: float, measured: Links | None) -> Links:
    """What was measured here, or the share of the makers' figure that a collective reaches."""
    reached = LINK * figure
    return measured or Links("", 1, 1, reached, reached, reached, reached, "", "")


def _idle(heads: int, ranks: int) -> float:
    """Where heads do not divide by ranks, the busiest rank sets the pace."""
    return -(-heads // ranks) * ranks / heads
