"""What a step of one rank holds, by arithmetic: peak bytes of each phase, split by what holds them.

The same walk as the code, with sizes in place of tensors: each function below names the moments at which a part of a step holds
the most, and the largest moment of a phase is its peak. Nothing here is fitted; the constants are those of the code, and the
dry run (dry_run.py), which executes that code, is what this file is tested against.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from math import lcm

from ..attention.head_schedule import Stage, head_schedule
from ..stack import PER_LAYER, Stack
from .model import ModelSizes
from .workspace import attention_workspace

HALF, FULL = 2, 4  # bytes of bf16 and fp32
# Of the code, which cannot be imported here without torch; a test compares them.
PROJECTION_TILES, TILES_PER_PIECE = 4, 8
HOLD_BYTES, OVERLAP_BYTES, IN_FLIGHT, TABLE_BYTES = 2**30, 2**29, 2**30, 2**27


@dataclass(frozen=True)
class Job:
    """One training step, as a rank sees it."""

    model: ModelSizes
    stack: Stack
    context: int
    world: int = 1
    rows: int = 1
    kernel: str = "fa4"
    optimizer_bytes: float = 8.0  # for each trained weight
    lora: int = 0  # rank of adapters on all linear layers; 0 = all weights are trained


@dataclass
class Memory:
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    host: int = 0
    disk: int = 0

    @property
    def peak(self) -> int:
        return max(sum(each.values()) for each in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))


def predict(job: Job) -> Memory:
    return _Walk(job).run()


class _Walk:
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
        self.found: dict[str, Counter[str]] = {}
        biggest = max(self.heads(stage, "all") for stage in self.schedule) * self.head(1)
        self.ahead = self.ranks > 1 and biggest <= OVERLAP_BYTES
        self.flight = _Flight()
        self.kept = 0  # bytes on the device that wait for backward

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def head(self, heads: int) -> int:
        """Bytes of so many heads of this rank's tokens."""
        return heads * self.bs * self.m.head_dim * HALF

    def heads(self, stage: Stage, which: str) -> int:
        if which == "all":
            return sum(len(each) for each in stage.queries)
        if which == "mine":
            return self.ranks * len(stage.queries[0])
        if which == "fresh":
            return sum(len(each) for each in stage.fresh)
        return self.ranks * len(stage.kv[0])  # "kv"

    def lse(self, stage: Stage) -> int:
        return FULL * self.bs * self.ranks * len(stage.queries[0])

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

    def parts(self, heads: int) -> int:
        """Tensors that hold what arrives: what was received, and, where heads or rows must be put in order, a copy of that."""
        if self.ranks == 1:
            return 1 if self.rows > 1 else 0
        return 2 if heads > 1 or self.rows > 1 else 1

    # -- the step -------------------------------------------------------------------------------------------------------

    def moment(self, phase: str, *parts: dict[str, int]) -> None:
        total = Counter(self.base)
        for part in parts:
            total.update(part)
        total["kept"] += self.kept
        if phase not in self.found or sum(total.values()) > sum(self.found[phase].values()):
            self.found[phase] = +total

    def run(self) -> Memory:
        m, job = self.m, self.job
        master = FULL if self.stack.shard_parameters else HALF
        frozen = (m.weights if job.lora else 0) // self.shards * HALF
        self.base: Counter[str] = Counter(
            parameters=frozen + self.trained // self.shards * master,
            # AdamW's averages are of the weights' type
            optimizer=int(self.trained // self.shards * min(job.optimizer_bytes, 2 * master)),
            other=3 * 8 * self.bs,
        )
        self.base["tile"] = self.rotary if self.rotary <= TABLE_BYTES else 0
        if m.tied and self.stack.shard_parameters:
            self.base["fsdp"] += m.embedding_weights * HALF
        self.moment("load")
        for index in self.walked():
            self.forward(index)
        self.loss()
        for index in reversed(self.walked()):
            self.backward(index)
        self.embedding()
        grads = self.trained // self.shards * master
        self.kept = 0
        self.moment("step", {"gradients": grads, "fsdp": -self.base["fsdp"], "tile": -self.base["tile"]})
        total = self.stored()
        return Memory(
            {phase: dict(by) for phase, by in self.found.items()},
            host=total if self.stack.far == "host" else 0,
            disk=total if self.stack.far == "disk" else 0,
        )

    def walked(self) -> list[int]:
        """The layers that tell: where all are alike, those in the middle hold what their neighbours do."""
        layers = self.m.layers
        if layers <= 4 or any(isinstance(getattr(self.stack, name), tuple) for name in PER_LAYER):
            return list(range(layers))
        return [0, 1, layers - 2, layers - 1]

    def stored(self) -> int:
        """The most that waits in the store: what layers keep, and a little of the one that runs."""
        kept = most = 0
        for index in range(self.m.layers):
            kept += self.kept_of(index) if self.offloads(index) else 0
            passing = 0
            if self.stack.engine_of(index) == "streamed" and not self.holds:
                # in backward: the gradient of its attention output, and that output where it is computed again
                passing = (2 if self.stack.recompute_of(index) == "layer" else 1) * self.attended
                if not self.offloads(
                    index
                ):  # later: otherwise the store has by then given back what the layer kept in it
                    passing = max(passing, self.parked)
            most = max(most, kept + passing)
        return most

    @property
    def parked(self) -> int:
        """Sums of KV gradients that wait for the next stage, and the gradients of the output that the stages behind it need."""
        most = 0
        for t, stage in enumerate(self.schedule[:-1]):
            if not any(self.schedule[t + 1].fresh):
                behind = self.schedule[t + (3 if self.ahead else 2) :]
                waiting = sum(self.head(self.heads(each, "all")) for each in behind)
                most = max(most, 4 * self.head(self.heads(stage, "kv")) + waiting)
        return most

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

    def gathered(self, backward: bool) -> dict[str, int]:
        """FSDP2: the weights of this layer, and of the one before or after it."""
        if not self.stack.shard_parameters:
            return {}
        each = self.m.layer_weights * HALF
        return {"fsdp": 2 * each if self.shards > 1 else each}

    # -- forward --------------------------------------------------------------------------------------------------------

    def kept_below(self, index: int) -> int:
        """Bytes on the device that the layers below this one keep."""
        return sum(self.kept_of(each) for each in range(index) if not self.offloads(each))

    def forward(self, index: int) -> None:
        self.kept = self.kept_below(index)
        streamed = self.stack.engine_of(index) == "streamed"
        recompute, offloads = self.stack.recompute_of(index), self.offloads(index)
        here = {"residual": self.x, **self.gathered(False)}
        if index and offloads != self.offloads(index - 1):
            self.flight = _Flight()  # the store was told to let go
        if streamed and offloads:
            self.put_pieces(self.x, copied=self.rows > 1)
        lses, outs = 0, 0 if streamed else self.attended
        handed: Stage | None = None  # the stage whose output is still on its way home
        # what stages leave for the layer's second half stays here, or goes to the store, or both
        stays = streamed and (self.holds or (not offloads and recompute == "keep_attention"))
        puts = streamed and ((offloads and recompute == "keep_attention") or not stays)
        for t, stage in enumerate(self.schedule):
            lses += self.lse(stage)
            q, mine = self.head(self.heads(stage, "all")), self.head(self.heads(stage, "mine"))
            leaving = 0 if handed is None else self.head(self.heads(handed, "all") + self.heads(handed, "mine"))
            held = {**here, "kept": outs + self.flight.bytes, "attention": lses}
            if not self.ahead:
                self.moment("forward", held, self.buffers(t, "bring"), self.project_tile(stage))
            self.moment("forward", held, self.buffers(t, "attend"), self.attend(stage), {"exchange": leaving})
            if handed is not None:
                outs += self.hand_over(handed, stays, puts)
            held["kept"] = outs + self.flight.bytes
            home = (q if self.ranks > 1 else 0) + (mine if self.parts(len(stage.queries[0])) > 1 else 0)
            self.moment("forward", held, self.buffers(t, "attend"), {"attention": mine, "exchange": home})
            handed = stage
            if not self.ahead:
                outs += self.hand_over(stage, stays, puts)
                handed = None
        if handed is not None:
            outs += self.hand_over(handed, stays, puts)
        self.kept += self.graph_bytes() if recompute == "none" else 0
        attended = {"kept": outs + self.flight.bytes, "attention": lses}
        piece = self.rows * self.piece * self.m.heads * self.m.head_dim * HALF
        if streamed:
            attended["kept"] += piece if stays else piece + 2 * piece // max(len(self.schedule), 1)
        result = 0 if streamed and offloads else self.x
        graph = recompute == "none" and self.stack.tile is None  # counted as kept
        tile = 0 if graph else self.after_tile(False)
        self.moment("forward", here, attended, {"residual": result, "tile": tile})
        if streamed and not self.holds:
            self.flight = _Flight()  # the second half has read it all back
        if offloads and not streamed:
            self.flight.put(self.x + (0 if recompute == "layer" else self.attended + lses), True)

    def hand_over(self, stage: Stage, stays: bool, puts: bool) -> int:
        """The output of a stage goes to the layer. -> bytes that stay on the device for the layer's second half"""
        q = self.head(self.heads(stage, "all"))
        if puts:
            self.put_pieces(q, copied=self.heads(stage, "all") * self.rows > 1)
        return q if stays else 0

    def attend(self, stage: Stage) -> dict[str, int]:
        """What a kernel makes in forward; around a ring partial results are merged in fp32."""
        mine, kv = self.head(self.heads(stage, "mine")), self.head(self.heads(stage, "kv"))
        return {"attention": mine} if self.stack.ring == 1 else {"attention": 11 * mine // 2, "exchange": 2 * kv}

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

    def put_pieces(self, whole: int, copied: bool) -> None:
        pieces = -(-self.tokens // self.piece)
        for _ in range(pieces):
            self.flight.put(whole // pieces, copied and pieces > 1)

    def project_tile(self, stage: Stage) -> dict[str, int]:
        m, t = self.m, self.rows * self.projected
        width = m.head_dim * HALF
        q, k = self.heads(stage, "all") * width * t, len({h for r in stage.fresh for h in r}) * width * t
        chosen = 0
        if len(self.schedule) > 1:
            chosen = (self.heads(stage, "all") + 2 * self.heads(stage, "fresh")) * m.head_dim * m.hidden * HALF
        adapters = 2 * q if self.job.lora else 0
        return {"tile": t * m.hidden * HALF + max(4 * q, q + 4 * k) + chosen + adapters}

    def after_tile(self, backward: bool) -> int:
        m, t = self.m, self.rows * self.tile
        wide = m.intermediate * (m.active_experts or 1)
        more = 1 if self.job.lora else 0  # what an adapter adds to a projection
        return t * HALF * ((6 if backward else 3) * wide + more * wide + 3 * m.hidden)

    def buffers(self, t: int, when: str) -> dict[str, int]:
        """What a stage of forward has on its way or in use. when: "bring" (sent, not yet used), "attend" or "kept"."""
        stage = self.schedule[t]
        q, k = self.head(self.heads(stage, "all")), self.head(self.heads(stage, "fresh"))
        mine, kv = self.head(self.heads(stage, "mine")), self.head(self.heads(stage, "kv"))
        keeps = when == "kept"
        own, shared = self.parts(len(stage.queries[0])), self.parts(len(stage.kv[0]))
        if keeps:
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

    # -- loss -----------------------------------------------------------------------------------------------------------

    def loss(self) -> None:
        m = self.m
        self.kept = self.kept_below(m.layers)
        head = m.embedding_weights
        limit = max(256, 2**29 // (self.rows * m.vocabulary))
        tile = self.tokens if self.stack.tile is None else min(self.stack.tile, limit, self.tokens)
        trained = 0 if self.job.lora else head
        gathered = 0
        if self.stack.shard_parameters and not m.tied:
            gathered = head * HALF * (2 if self.shards > 1 else 1)
        each = self.rows * HALF * (m.vocabulary + 3 * m.hidden)  # logits of a token, and its three vectors
        # the second tile's gradient joins the first's in fp32; it may be a short one
        moments = [tile * each + trained * HALF]
        if tile < self.tokens:
            moments.append(min(tile, self.tokens - tile) * each + trained * (2 * HALF + FULL))
        self.moment(
            "loss",
            {"residual": 2 * self.x, "fsdp": gathered, "kept": self.flight.bytes},
            {"loss": max(moments)},
        )

    # -- backward -------------------------------------------------------------------------------------------------------

    def backward(self, index: int) -> None:
        m, stack = self.m, self.stack
        streamed, offloads = stack.engine_of(index) == "streamed", self.offloads(index)
        recompute = stack.recompute_of(index)
        last = index == m.layers - 1
        self.flight = _Flight()
        above = (m.layers - 1 - index) * self.layer_trained
        head = 0 if m.tied or self.job.lora else m.embedding_weights
        size = FULL if stack.shard_parameters else HALF
        here: Counter[str] = Counter({"gradients": (above + head) // self.shards * size, **self.gathered(True)})
        if stack.shard_parameters:
            here["fsdp"] += FULL * (head if last else self.layer_trained)
            if index == 0 and not m.tied and not self.job.lora and self.shards > 1:
                # no layer follows, so the embedding is gathered ahead
                here["fsdp"] += HALF * (m.embedding_weights - m.layer_weights)
            if self.job.lora and not m.tied and self.shards > 1:
                # a frozen head has no backward after which it would be given back; nor is a layer gathered ahead
                here["fsdp"] += HALF * (m.embedding_weights - m.layer_weights)
        if m.tied and not self.job.lora:
            here["gradients"] += HALF * m.embedding_weights  # of the head, until the embedding's joins it
        lses = sum(self.lse(stage) for stage in self.schedule)
        self.kept = self.kept_below(index + 1)
        x = self.x
        if streamed:
            here["residual"] += x if stack.far != "gpu" else 2 * x
            here["kept"] += lses if offloads else 0
            if offloads and self.holds:
                here["kept"] += x
            inputs = 0 if self.holds or not offloads else 3 * self.rows * self.piece * m.hidden * HALF
        else:
            here["residual"] += 2 * x + self.attended  # dy, dx and the gradient of the attention output
            if offloads:
                here["kept"] += x + (0 if recompute == "layer" else self.attended + lses)
                below = next((each for each in reversed(range(index)) if self.offloads(each)), None)
                if below is not None:  # on its way
                    here["kept"] += self.kept_of(below)
            if recompute == "layer":
                here["kept"] += self.attended
            inputs = 0
        count = -(-self.tokens // self.tile)
        trained = self.after_weights
        sums = trained * (FULL if count > 1 else HALF)
        before = trained * (0 if count == 1 else HALF if count == 2 else FULL)  # while the last tile is computed
        piece = 2 * self.rows * self.piece * m.heads * m.head_dim * HALF if streamed else 0
        mlp = 0 if self.job.lora else m.hidden * m.intermediate * HALF
        graph = recompute == "none" and stack.tile is None
        tile = max(mlp + (2 * self.bs * m.intermediate * HALF if graph else self.after_tile(True)), trained * HALF)
        waiting = 0
        beside = offloads or recompute == "layer"  # the attention output is not among what was kept here
        if streamed and self.holds:  # output, and its gradient but for the piece at hand
            waiting = (2 if beside else 1) * self.attended - piece // 2
        self.moment("backward", here, {"kept": inputs + piece + waiting, "tile": before + tile})
        self.attend_backward(here, sums, inputs, streamed, beside, recompute)
        # gradients of the layer on their way to their shards
        layer = self.layer_trained
        if stack.shard_parameters:
            total = {"fsdp": (FULL + HALF) * layer + FULL * layer // self.shards, "residual": x}
            self.moment("backward", {**self.gathered(True), "gradients": here["gradients"]}, total)

    def embedding(self) -> None:
        """The end of backward: the embedding's gradient, with all others there."""
        if self.job.lora:
            return
        m, table = self.m, self.m.embedding_weights
        size = FULL if self.stack.shard_parameters else HALF
        grads = (self.trained - table) // self.shards * size
        moving = 0
        if self.stack.shard_parameters:
            whole = 0 if m.tied or self.shards > 1 else HALF * table  # with one shard it stays gathered
            moving = FULL * table + FULL * table // self.shards + whole
        self.kept = 0
        self.moment("backward", {"residual": self.x, "gradients": grads + HALF * table, "fsdp": moving})

    def attend_backward(
        self, here: Counter[str], sums: int, inputs: int, streamed: bool, beside: bool, recompute: str
    ) -> None:
        m = self.m
        accumulator = self.x if streamed else 2 * self.x
        qkv = 0 if self.job.lora else (m.heads + 2 * m.kv_heads) * m.head_dim * m.hidden
        wide = qkv * (FULL if len(self.schedule) > 1 else HALF)
        before = 0  # dq of the stage before, while it is on its way home
        graph = recompute == "none" and self.stack.tile is None
        if graph:
            self.kept -= self.after_graph - self.x  # done with, but for its result
        for t, stage in enumerate(self.schedule):
            q, mine = self.head(self.heads(stage, "all")), self.head(self.heads(stage, "mine"))
            kv, k = self.head(self.heads(stage, "kv")), self.head(self.heads(stage, "fresh"))
            own, shared = self.parts(len(stage.queries[0])), self.parts(len(stage.kv[0]))
            follows = t > 0 and not any(stage.fresh)  # its KV heads were used before
            adds = 0 if not follows or (streamed and not self.holds) else 4 * kv
            done = Counter(here)
            delivered = t >= (2 if self.ahead else 1)  # whether an earlier stage's gradients have reached the layer
            done["tile"] += sums + (wide if delivered else 0)
            done["residual"] += accumulator if delivered else 0
            later = self.schedule[t + (2 if self.ahead else 1) :]
            waiting = sum(self.head(self.heads(each, "all")) for each in later)
            if streamed and self.holds:  # output and gradient of the stages to come
                done["kept"] += (2 if beside else 1) * waiting
            if streamed and not beside:  # what was kept here of the stages that were
                done["kept"] -= self.attended - waiting
            shape = (self.rows, len(stage.queries[0]), self.tokens * self.ranks, m.head_dim)
            inside = attention_workspace(self.job.kernel, "backward", shape, max(len(stage.kv[0]), 1))
            inside //= 1 if self.stack.ring == 1 else 2  # a ring attends in halves
            grads = {"attention": mine + 2 * kv + adds, "workspace": inside, "exchange": before}
            if self.stack.ring > 1:
                grads = {"attention": 3 * mine + 9 * kv + adds, "workspace": inside, "exchange": 6 * kv + before}
            if recompute == "none":
                bufs = {"exchange": 2 * q, "attention": 2 * own * mine}
            elif self.ranks == 1:
                bufs = {"exchange": 3 * q + 2 * kv, "attention": 3 * own * mine + 2 * shared * kv}
            elif self.ahead:
                sets = min(2, len(self.schedule), t + 2)
                fresh = min(2, sum(any(each.fresh) for each in self.schedule[: t + 2]))
                homes = min(2, t) * q + (2 * kv if any(any(each.done) for each in self.schedule[:t]) else 0)
                bufs = {
                    "exchange": 3 * sets * q + 2 * fresh * kv + homes,
                    "attention": 3 * own * sets * mine + 2 * shared * fresh * kv,
                }
                before = mine
            else:
                bufs = {"attention": 3 * mine + 2 * kv}
                bring = {"exchange": 3 * q + 2 * k, "attention": 3 * own * mine + 2 * (shared if k else 1) * kv}
                self.moment("backward", done, bring, {"kept": inputs})
            self.moment("backward", done, bufs, grads, {"kept": inputs})
            if follows and streamed and not self.holds and (self.ahead or self.ranks == 1):
                # the sums of KV gradients are back from where they were parked
                self.moment("backward", done, bufs, {"attention": mine + 2 * kv, "kept": inputs + 4 * kv})
            token = self.rows * self.projected * HALF
            heads = self.heads(stage, "all") + 2 * self.heads(stage, "fresh")
            each = token * heads * m.head_dim
            wider = 1 if self.ranks == 1 else 0
            tile = (5 + wider) * token * m.hidden // 2 + ((5 if self.job.lora else 3) + wider) * each
            if graph and len(self.schedule) == 1:  # nothing is projected again: q's rotation is undone
                tile = 7 * q // 2 + self.x
                if self.heads(stage, "kv") > m.kv_heads:  # ranks that share KV heads: their gradients are added
                    tile += 2 * self.head(m.kv_heads)
            tile += 2 * heads * m.head_dim * m.hidden * HALF
            if not delivered and self.projected < self.tokens:  # made with the first tile's gradient
                done["residual"] += accumulator
            home = q + 2 * kv if self.ranks > 1 or graph else mine
            live = bufs if self.ahead or self.ranks == 1 else {}
            leaving = 0  # gradients of this stage, on their way home while the layer takes those of the stage before
            if self.ahead and t > 0:
                leaving = mine + (2 * kv if any(stage.done) else 0)
            self.moment("backward", done, live, {"exchange": home, "attention": leaving, "tile": tile, "kept": inputs})


class _Flight:
    """Tensors on their way to the host or the disk, of which those that are copies hold memory of their own."""

    def __init__(self) -> None:
        self.puts: deque[tuple[int, bool]] = deque()
        self.total = self.bytes = 0

    def put(self, nbytes: int, copied: bool) -> None:
        while len(self.puts) >= 2 and self.total > IN_FLIGHT:
            gone, counted = self.puts.popleft()
            self.total -= gone
            self.bytes -= gone if counted else 0
        self.puts.append((nbytes, copied))
        self.total += nbytes
        self.bytes += nbytes if copied else 0
