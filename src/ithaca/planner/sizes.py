"""Sizes of what a step of one rank works with, in bytes, and what its layers keep: the vocabulary of the walk in memory.py."""

from __future__ import annotations

from itertools import accumulate
from math import lcm

from ..engine.attention.head_schedule import Stage, head_schedule
from ..engine.limits import HOLD_BYTES, OVERLAP_BYTES, PROJECTION_TILES, TABLE_BYTES, TILES_PER_PIECE
from .job import FULL, HALF, Job
from .workspace import pinned


class Sizes:
    def __init__(self, job: Job) -> None:
        self.job, m, stack = job, job.model, job.stack
        self.m, self.stack = m, stack
        self.ranks = stack.ulysses
        groups = max(1, job.world // (stack.ulysses * stack.ring))
        self.rows = max(1, job.batch // groups)
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
        self.fsdp = (
            stack.shard_parameters or job.world > 1
        )  # whole weights on every rank of several are shards of one each
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
    def here(self) -> int:
        """1 where weights, gradients and states stay on the GPU, 0 where they wait on the host."""
        return 0 if self.job.offload else 1

    @property
    def wide(self) -> int:
        """Bytes of a trained weight, and of its gradient, in a shard: fp32 wherever FSDP2 is."""
        return FULL if self.fsdp else HALF

    def learns(self, *linears: str) -> bool:
        """Whether any of these linears has a gradient: then their input is kept for it."""
        return not self.job.lora or bool(self.job.adapters.keys() & set(linears))

    def left(self, weights: int) -> dict[str, int]:
        """Gradients of so many weights, in shards. With several micro-batches all of them are there all the time."""
        return {"gradients": self.here * (weights // self.shards * self.wide) if self.job.accumulation == 1 else 0}

    @property
    def offloaded(self) -> int:
        """Weights and gradients of a rank in pinned host memory, and the optimizer's states beside them."""
        m, job, rank = self.m, self.job, self.job.lora
        tables = [(m.vocabulary, m.hidden)] * (1 if m.tied else 2)
        base = [(m.layers, m.layer_tensors), (1, [*tables, (m.hidden, 1)])]
        added = []
        for name in job.adapters:
            rows, columns = m.linears[name]
            added.append((1 if name == "lm_head" else m.layers, [(rank, columns), (rows, rank)]))
        trained, frozen = (added, base) if rank else (base, [])

        def held(groups: list[tuple[int, list[tuple[int, int]]]], size: int) -> int:
            return sum(
                times * pinned(-(-rows // self.shards) * columns * size)
                for times, shapes in groups
                for rows, columns in shapes
            )

        return 2 * held(trained, self.wide) + held(frozen, HALF) + self.states

    @property
    def states(self) -> int:
        """AdamW's averages are of the weights' type."""
        return int(self.job.trained // self.shards * min(self.job.optimizer_bytes, 2 * self.wide))

    def arriving(self, largest: int, weights: int) -> dict[str, int]:
        """Shards of a group on their way from the host: one of them as it is (the `largest`), and all as layers compute."""
        if self.here:
            return {}
        first = largest * FULL if not self.job.lora else 0  # frozen ones are small already
        gathered = (
            weights * HALF if self.shards == 1 else 0
        )  # where there is nobody to gather from, it is copied all the same
        return {"fsdp": (max(first, gathered) + weights * HALF) // self.shards}

    def gathered(self) -> dict[str, int]:
        """FSDP2: the weights of this layer, and of the one before or after it."""
        if not self.fsdp:
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
            if not m.fused_norms:  # the input of every norm, and where its weight is trained the output
                heads = (m.heads + m.kv_heads) * m.head_dim if m.traits.qk_norm else 0
                kept += (1 if self.job.lora else 2) * FULL * self.bs * (m.norms * m.hidden + heads)
            if len(self.schedule) == 1:
                normed = m.heads + m.kv_heads if m.traits.qk_norm else 0  # the input of that norm, and its output
                heads = m.heads + 2 * m.kv_heads + normed
                kept += self.bs * (HALF * (m.hidden + heads * m.head_dim) + FULL)
                kept += self.rotary if self.rotary > TABLE_BYTES else 0  # of its own, where no table serves all layers
        return kept

    @property
    def after_graph(self) -> int:
        """What autograd keeps of the untiled half behind attention."""
        learns = self.learns
        wide, hidden = 4 if learns("down_proj") else 3, 3 if learns("gate_proj", "up_proj") else 2
        return self.bs * (HALF * (wide * self.m.intermediate + hidden * self.m.hidden) + FULL)

    def stored(self) -> dict[str, int]:
        """The most that waits in the store: what layers keep, and a little of the one that runs. Beside a disk, what the last layer
        keeps and what a layer needs for itself waits in host memory."""
        kept = {"host": 0, "disk": 0}
        most = dict(kept)
        near = "host" if self.stack.far == "disk" else self.stack.far
        for index in range(self.m.layers):
            where = near if index == self.m.layers - 1 else self.stack.far
            if self.offloads(index):
                kept[where] += self.kept_of(index)
            passing = 0
            if self.stack.engine_of(index) == "streamed" and not self.holds:
                # in backward: the gradient of its attention output, and that output where it is computed again
                passing = (2 if self.stack.recompute_of(index) == "layer" else 1) * self.attended
                if not self.offloads(index):
                    # later; of a layer that does, the store has by then given back much of what it kept
                    passing = max(passing, self.parked)
            for place, nbytes in kept.items():
                most[place] = max(most[place], nbytes + (passing if place == near else 0))
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
        adapted = self.job.adapters.keys()
        if backward:  # the input of gate and up is kept for their gradients, or their adapters'
            return t * HALF * (6 * wide + (3 if self.learns("gate_proj", "up_proj") else 2) * m.hidden)
        return t * HALF * ((4 if "up_proj" in adapted else 3) * wide + 3 * m.hidden)  # up's adapter beside up and gate
