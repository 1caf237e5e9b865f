"""What a step of one rank holds, by arithmetic: peak bytes of each phase, split by what holds them.

The same walk as the code, with sizes in place of tensors (sizes.py): each function here, in forward.py and in backward.py names the
moments at which a part of a step holds the most, and the largest moment of a phase is its peak. Nothing is fitted; the constants
are those of the code, and the dry run (dry_run.py), which executes that code, is what all of it is tested against.
"""

from __future__ import annotations

from collections import Counter, deque

from .backward import backward
from .forward import forward
from .job import FULL, HALF, IN_FLIGHT, TABLE_BYTES, Job, Memory
from .sizes import Sizes


def predict(job: Job) -> Memory:
    return Walk(job).run()


class Walk(Sizes):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.base: Counter[str] = Counter()  # there all the time
        self.found: dict[str, Counter[str]] = {}
        self.flight = Flight()
        self.kept = 0  # bytes on the device that wait for backward

    def moment(self, phase: str, *parts: dict[str, int]) -> None:
        total = Counter(self.base)
        for part in parts:
            total.update(part)
        total["kept"] += self.kept
        if phase not in self.found or sum(total.values()) > sum(self.found[phase].values()):
            self.found[phase] = +total

    def land(self) -> None:
        """Nothing is on its way to the store any more."""
        self.flight = Flight()

    def run(self) -> Memory:
        m, job = self.m, self.job
        master = FULL if self.stack.shard_parameters else HALF
        frozen = (m.weights if job.lora else 0) // self.shards * HALF
        self.base = Counter(
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
            forward(self, index)
        self.loss()
        for index in reversed(self.walked()):
            backward(self, index)
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


class Flight:
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
