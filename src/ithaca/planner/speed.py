"""How long a step takes, by arithmetic, and what bounds it.

    attention   operations of the causal triangle at the kernel's rate; once more where backward computes it again
    matmul      2 operations for each weight and token forward, 4 backward, and 2 again where backward recomputes
    other       norms, rotations, copies between layouts, sums of gradients: bound by memory, by the token and layer
    pcie, disk  what the store moves, as far as computation waits for it
    links       all-to-alls, ring and FSDP2, as far as they are longer than the computation beside them
    optimizer   AdamW on the host, where weights and states wait there (train.offload_optimizer); on a GPU it takes milliseconds

Rates are those of whole steps measured on one H200 (benchmarks/results/2026-11-15-h200.md), as shares of the GPU's peak. Links
between GPUs have not been measured at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.kernels import rates_of
from ..engine.limits import HOLD_BYTES, PROJECTION_TILES
from .flops import visible_pairs
from .hardware import Hardware
from .job import FULL, HALF, Job

MATMUL = 0.70
# Seconds a token and layer of 2,048 wide spends in everything else, on a memory of 4.8 TB/s: in tiles, and whole.
OTHER = {True: 0.45e-6, False: 0.25e-6}
PROJECTED, TILED = 150e-6, 100e-6  # seconds to launch what a tile of a stage's projections, and of an MLP, takes
# Share of the copies from the host that is waited for: pieces read once, and pieces read again by every stage.
WAITED = {True: 0.9, False: 0.7}
LINK = 0.75  # of the makers' bandwidth that a collective reaches
# AdamW on the host reads and writes weight, gradient and averages in fp32, and the gradient once more to clip it: bytes for each
# weight, and bytes a second of all ranks of a machine together (57e9 were measured with 16 cores; other hosts differ, so it is an
# assumption). A gradient that is added to another on the host is waited for: bytes a second of a rank, measured there too.
UPDATED, HOST_RATE, ADDED_RATE = 40, 50e9, 1e9


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
    m, stack, gpu = job.model, job.stack, hardware.gpu
    ranks = stack.ulysses * stack.ring
    groups = max(1, job.world // ranks)
    rows = max(1, job.batch // groups)
    tokens = rows * job.context / ranks
    layers = range(m.layers)
    none = sum(stack.recompute_of(i) == "none" and stack.tile is None for i in layers)
    pairs = [visible_pairs(job.context, window) for window in m.windows]
    attention = 0.0
    for i, each in enumerate(pairs):
        forward, backward = rates_of(job.kernel_of(i), m.head_dim, older=not gpu.hopper)
        times = 2 if stack.recompute_of(i) == "layer" else 1
        attention += 4 * each * rows * m.heads * m.head_dim / ranks * (times / forward + 2.5 / backward)
    attention *= _idle(m.heads, stack.ulysses) / gpu.peak
    active = m.attention_weights + (
        m.mlp_weights if not m.experts else 3 * m.hidden * m.intermediate * m.active_experts
    )
    passes = 4 if job.lora else 6
    weights = active * (m.layers * passes + 2 * (m.layers - none)) + m.embedding_weights * (4 if job.lora else 6)
    weights += 8 * job.trained if job.lora else 0
    matmul = weights * tokens / (gpu.peak * MATMUL)
    tiled = stack.tile is not None and stack.tile < job.context
    other = OTHER[tiled] * tokens * m.layers * (m.hidden / 2048) * (4.8e12 / gpu.bandwidth)
    other += m.layers * _tiles(job, tokens, gpu.bandwidth)
    compute = attention + matmul + other
    parts = dict.fromkeys(("attention", "matmul", "other", "pcie", "disk", "links", "optimizer"), 0.0)
    parts |= {"attention": attention, "matmul": matmul, "other": other}
    kept, read, waited = _store(job, tokens)
    if stack.far == "disk":
        parts["disk"] = max(0.0, 2 * kept * hardware.ranks_per_node / hardware.disk_rate - compute)
    if job.offload:  # weights are gathered for forward and for backward, and waited for; gradients go back meanwhile
        shards = job.world // stack.replicate
        gathered, gradients = 2 * (FULL * job.trained + HALF * job.frozen) / shards, FULL * job.trained / shards
        kept, waited = kept + gathered + gradients, waited + gathered
        update = UPDATED * job.trained / shards * hardware.ranks_per_node / HOST_RATE
        parts["optimizer"] = (update + (job.accumulation - 1) * gradients / ADDED_RATE) / job.accumulation
    parts["pcie"] = waited / gpu.pcie + max(0.0, (kept + read) / gpu.pcie - compute)
    parts["links"] = _links(job, hardware, tokens, compute)
    parts = {name: job.accumulation * seconds for name, seconds in parts.items()}
    return Speed(parts, job.accumulation * tokens / sum(parts.values()))


def _store(job: Job, tokens: float) -> tuple[float, float, float]:
    """Bytes that go to the store, that are read back, and of these those that are waited for."""
    m, stack = job.model, job.stack
    if stack.far == "gpu":
        return 0.0, 0.0, 0.0
    x, attended = tokens * m.hidden * HALF, tokens * m.heads * m.head_dim * HALF
    away = [i for i in range(m.layers) if stack.store_of(i) != "gpu"]
    kept = len(away) * x + sum(stack.recompute_of(i) != "layer" for i in away) * attended
    holds = x <= HOLD_BYTES if stack.hold is None else stack.hold
    read = kept if holds or stack.engine == "composed" else len(away) * (x * (2 + 2 * _stages(job)) + 4 * attended)
    if not holds and stack.engine != "composed":  # the other layers' gradients of attention pass through it
        read += (m.layers - len(away)) * 2 * attended
    return kept, read, WAITED[holds] * read


def _stages(job: Job) -> int:
    """At least one; heads that do not divide leave a rank idle in some of them."""
    m, stack = job.model, job.stack
    return -(-m.heads // (stack.ulysses * (stack.heads_per_stage or m.heads)))


def _tiles(job: Job, tokens: float, bandwidth: float) -> float:
    """What a layer pays for being cut into tiles: launches, and the fp32 sums of weight gradients that every tile adds to."""
    m, tile = job.model, job.stack.tile
    if tile is None or tile >= tokens:
        return 0.0
    count = tokens / tile
    sums = 0 if job.lora else 12 * (m.mlp_weights + m.heads * m.head_dim * m.hidden) / bandwidth
    return _stages(job) * count / PROJECTION_TILES * PROJECTED + count * (TILED + sums)


def _links(job: Job, hardware: Hardware, tokens: float, compute: float) -> float:
    """Seconds of communication that computation cannot hide."""
    m, stack, gpu = job.model, job.stack, hardware.gpu
    inside, between = gpu.nvlink * LINK, hardware.network * LINK
    heads = tokens * m.head_dim * HALF
    exchange = 0.0
    if stack.ulysses > 1:
        link = inside if stack.ulysses <= hardware.ranks_per_node else between
        exchange = m.layers * heads * (8 * m.heads + 6 * m.kv_heads) * (1 - 1 / stack.ulysses) / link
    if stack.ring > 1:
        link = between if job.world > hardware.per_node else inside
        exchange += m.layers * heads * stack.ulysses * m.kv_heads / max(stack.ulysses, 1) * 8 * (stack.ring - 1) / link
    sharding = 0.0
    if job.world > 1 and stack.shard_parameters:
        link = between if job.world > hardware.per_node else inside
        sharding = (m.weights * 2 * HALF + job.trained * FULL) * (1 - 1 / job.world) / link
    exposed = 0.1 * (exchange + sharding)  # the first and the last of a layer have nothing to hide behind
    return exposed + max(0.0, exchange + sharding - compute)


def _idle(heads: int, ranks: int) -> float:
    """Where heads do not divide by ranks, the busiest rank sets the pace."""
    return -(-heads // ranks) * ranks / heads
