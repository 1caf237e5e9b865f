"""Sizes of what a step of one rank works with, in bytes, and what its layers keep: the vocabulary of the walk in memory.py."""

from __future__ import annotations

from itertools import accumulate
from math import lcm

from ..attention.head_schedule import Stage, head_schedule
from .job import FULL, HALF, HOLD_BYTES, OVERLAP_BYTES, PROJECTION_TILES, TABLE_BYTES, TILES_PER_PIECE, Job


class Sizes:
    def __init__(self, job: Job) -> None:
        self.job, m, stack = job, job.model, job.stack
        self.m, self.stack = m, stack
        self.ranks = stack.ulysses
        groups = max(1, job.world // (stack.ulysses * stack.ring))
        self.rows = max(1, job.rows // groups)
        step = stack.ulysses if stack.ring == 1 else lcm(2 * stack.ring, stack.ring * stack.ulysses)
        self.tokens = -(-job.context // step) * step // (stack.ulysses * stack.ring)
        self.bs = self.rows * self.tokens
        self.x = self.bs * m.hidden * HALF
        self.attended = self.bs * m.heads * m.head_dim * HALF
        self.tile = min(stack.tile or self.tokens, self.tokens)
        self.projected = min((stack.tile or self.tokens) * PROJECTION_TILES, self.tokens)
        self.piece = min((stack.tile or self.tokens) * TILES_PER_PIECE, self.tokens)
        self.rotary = 2 * self.tokens * m.head_dim * HALF  # cos and sin of every position
        self.schedule = head_schedule(m.heads, m.kv_heads, stack.ulysses, stack.heads_per_stage)
        self.shards = job.world // stack.replicate if stack.shard_parameters else 1
        self._heads = {id(stage): self._count(stage) for stage in self.schedule}  # asked for thousands of times
        later = (self.head(self.heads(stage, "all")) for stage in reversed(self.schedule))
        self._behind = list(accumulate(later, initial=0))[::-1]
        biggest = max(self.heads(stage, "all") for stage in self.schedule) * self.head(1)
        self.ahead = self.ranks > 1 and biggest <= OVERLAP_BYTES

    def head(self, heads: int) -> int:
        """Bytes of so many heads of this rank's tokens."""
        return heads * self.bs * self.m.head_dim * HALF

    def heads(self, stage: Stage, which: str) -> int:
        """which: "all" query heads that attend on some rank, those that are "mine", "fresh" KV heads that are sent, or my "kv"."""
        return self._heads[id(stage)][which]

    def _count(self, stage: Stage) -> dict[str, int]:
        return {
            "all": sum(len(each) for each in stage.queries),
            "mine": self.ranks * len(stage.queries[0]),
            "fresh": sum(len(each) for each in stage.fresh),
            "kv": self.ranks * len(stage.kv[0]),
        }

    def behind(self, t: int) -> int:
        """Bytes of the query heads of stage t and all later ones."""
        return self._behind[min(t, len(self.schedule))]

    def lse(self, stage: Stage) -> int:
        return FULL * self.bs * self.ranks * len(stage.queries[0])

    def parts(self, heads: int) -> int:
        """Tensors that hold what arrives: what was received, and, where heads or rows must be put in order, a copy of that."""
        if self.ranks == 1:
            return 1 if self.rows > 1 else 0
        return 2 if heads > 1 or self.rows > 1 else 1

    # -- weights --------------------------------------------------------------------------------------------------------

    @property
    def after_weights(self) -> int:
        """Weights of o_proj, MLP and their norms that are trained."""
        if self.job.lora:
            m = self.m
            return self.job.lora * (m.heads * m.head_dim + m.hidden + 3 * (m.hidden + m.intermediate))
        return self.m.heads * self.m.head_dim * self.m.hidden + self.m.mlp_weights + self.m.norm_weights

    @property
    def layer_trained(self) -> int:
        if not self.job.lora:
            return self.m.layer_weights
        m = self.m
        qkv = 3 * m.hidden + (m.heads + 2 * m.kv_heads) * m.head_dim
        return self.after_weights + self.job.lora * qkv

    @property
    def trained(self) -> int:
        outside = 0 if self.job.lora else self.m.weights - self.m.layers * self.m.layer_weights
        return self.m.layers * self.layer_trained + outside

    def gathered(self) -> dict[str, int]:
        """FSDP2: the weights of this layer, and of the one before or after it."""
        if not self.stack.shard_parameters:
            return {}
        each = self.m.layer_weights * HALF
        return {"fsdp": 2 * each if self.shards > 1 else each}

    # -- what layers keep -----------------------------------------------------------------------------------------------

    def walked(self) -> list[int]:
        """The layers that tell: where all are alike, those in the middle hold what their neighbours do."""
        layers = self.m.layers
        if layers <= 4 or not self.stack.uniform:
            return list(range(layers))
        return [0, 1, layers - 2, layers - 1]

    @property
    def holds(self) -> bool:
        """Whether what a streamed layer reads again stays on the device."""
        if self.stack.far == "gpu":
            return True
        return self.x <= HOLD_BYTES if self.stack.hold is None else self.stack.hold

    def offloads(self, index: int) -> bool:
        """Whether what a layer keeps leaves the device."""
        return self.stack.store_of(index) != "gpu"

    def kept_of(self, index: int) -> int:
        """What a layer keeps, wherever that is."""
        recompute = self.stack.recompute_of(index)
        if recompute == "layer":
            return self.x
        kept = self.x + self.attended + sum(self.lse(stage) for stage in self.schedule)
        return kept + self.graph_bytes() if recompute == "none" else kept

    def kept_below(self, index: int) -> int:
        """Bytes on the device that the layers below this one keep."""
        return sum(self.kept_of(each) for each in range(index) if not self.offloads(each))

    def graph_bytes(self) -> int:
        """recompute="none": q, k, v of every stage; and, untiled, what autograd keeps of both halves."""
        kept = sum(sum(self.buffers(t, "kept").values()) for t, _ in enumerate(self.schedule))
        if self.stack.tile is None:
            m = self.m
            kept += self.after_graph
            if len(self.schedule) == 1:
                kept += self.bs * (HALF * (m.hidden + (m.heads + 2 * m.kv_heads) * m.head_dim) + FULL)
                kept += self.rotary if self.rotary > TABLE_BYTES else 0  # of its own, where no table serves all layers
        return kept

    @property
    def after_graph(self) -> int:
        """What autograd keeps of the untiled half behind attention."""
        return self.bs * (HALF * (4 * self.m.intermediate + 3 * self.m.hidden) + FULL)

    def stored(self) -> int:
        """The most that waits in the store: what layers keep, and a little of the one that runs."""
        kept = most = 0
        for index in range(self.m.layers):
            kept += self.kept_of(index) if self.offloads(index) else 0
            passing = 0
            if self.stack.engine_of(index) == "streamed" and not self.holds:
                # in backward: the gradient of its attention output, and that output where it is computed again
                passing = (2 if self.stack.recompute_of(index) == "layer" else 1) * self.attended
                if not self.offloads(index):
                    # later; of a layer that does, the store has by then given back much of what it kept
                    passing = max(passing, self.parked)
            most = max(most, kept + passing)
        return most

    @property
    def parked(self) -> int:
        """Sums of KV gradients that wait for the next stage, and the gradients of the output that the stages behind it need."""
        most = 0
        for t, stage in enumerate(self.schedule[:-1]):
            if not any(self.schedule[t + 1].fresh):
                waiting = self.behind(t + (3 if self.ahead else 2))
                most = max(most, 4 * self.head(self.heads(stage, "kv")) + waiting)
        return most

    # -- what they work with --------------------------------------------------------------------------------------------

    def buffers(self, t: int, when: str) -> dict[str, int]:
        """What a stage of forward has on its way or in use. when: "bring" (sent, not yet used), "attend" or "kept"."""
        stage = self.schedule[t]
        q, k = self.head(self.heads(stage, "all")), self.head(self.heads(stage, "fresh"))
        mine, kv = self.head(self.heads(stage, "mine")), self.head(self.heads(stage, "kv"))
        own, shared = self.parts(len(stage.queries[0])), self.parts(len(stage.kv[0]))
        if when == "kept":
            return {"attention": mine + 2 * kv}
        if self.ranks == 1:
            return {"exchange": q + 2 * kv, "attention": own * mine + 2 * shared * kv}
        if self.ahead:
            sets = min(2, len(self.schedule), t + 2)
            fresh = min(2, sum(any(each.fresh) for each in self.schedule[: t + 2]))
            return {"exchange": sets * q + 2 * fresh * kv, "attention": own * sets * mine + 2 * shared * fresh * kv}
        if when == "bring":
            old = 2 * kv if t else 0
            return {"exchange": q + 2 * k, "attention": own * mine + (2 * shared * kv if k else 0) + old}
        return {"attention": mine + 2 * kv}

    def after_tile(self, backward: bool) -> int:
        m, t = self.m, self.rows * self.tile
        wide = m.intermediate * (m.active_experts or 1)
        more = 1 if self.job.lora else 0  # what an adapter adds to a projection
        return t * HALF * ((6 if backward else 3) * wide + more * wide + 3 * m.hidden)
