"""What a step of one rank holds, by arithmetic: peak bytes of each phase, split by what holds them.

The same walk as the code, with sizes in place of tensors (sizes.py): each function here, in forward.py and in backward.py names the
moments at which a part of a step holds the most, and the largest moment of a phase is its peak. Nothing is fitted; the constants
are those of the code, and the dry run (dry_run.py), which executes that code, is what all of it is tested against.
"""

from __future__ import annotations

from collections import Counter, deque

from ..engine.limits import IN_FLIGHT, TABLE_BYTES, loss_tile
from .backward import backward
from .forward import forward
from .job import FULL, HALF, Job, Memory
from .sizes import Sizes


def predict(job: Job) -> Memory:
    return Walk(job).run()


class Walk(Sizes):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.base: Counter[str] = Counter()  # there all the time
        self.found: dict[str, Counter[str]] = {}  # the largest moment of each phase
        self.most: dict[str, int] = {}  # its bytes
        self.flight = Flight()
        self.kept = 0  # bytes on the device that wait for backward

    def moment(self, phase: str, *parts: dict[str, int]) -> None:
        size = sum(self.base.values()) + self.kept + sum(sum(part.values()) for part in parts)
        if size <= self.most.get(phase, -1):  # nearly always, and a plan looks at thousands of moments
            return
        total = Counter(self.base)
        for part in parts:
            total.update(part)
        total["kept"] += self.kept
        self.found[phase], self.most[phase] = +total, size

    def land(self) -> None:
        """Nothing is on its way to the store any more."""
        self.flight = Flight()

    def run(self) -> Memory:
        m, job = self.m, self.job
        weights = job.frozen // self.shards * HALF + job.trained // self.shards * self.wide
        grads = job.trained // self.shards * self.wide
        self.base = Counter(
            parameters=self.here * weights,
            optimizer=self.here * self.states,
            other=3 * 8 * self.bs,
        )
        self.base["tile"] = self.rotary if self.rotary <= TABLE_BYTES else 0
        if m.tied and self.fsdp:
            self.base["fsdp"] += m.embedding_weights * HALF
        self.moment("load")
        if job.accumulation > 1:
            self.base["gradients"] = self.here * grads  # of the micro-batch before
        self.moment("forward", self.arriving(m.embedding_weights, m.embedding_weights))
        for index in self.walked():
            forward(self, index)
        self.loss()
        for index in reversed(self.walked()):
            backward(self, index)
        self.embedding()
        self.kept = 0
        self.moment("step", self.left(job.trained), {"fsdp": -self.base["fsdp"], "tile": -self.base["tile"]})
        stored, offloaded = self.stored(), 0 if self.here else self.offloaded
        return Memory(
            {phase: dict(by) for phase, by in self.found.items()},
            host=stored["host"] + offloaded,
            disk=stored["disk"],
            offloaded=offloaded,
            snapshot=grads + self.states if job.asynchronous else 0,
        )

    def loss(self) -> None:
        m = self.m
        self.kept = self.kept_below(m.layers)
        head = m.embedding_weights
        tile = min(loss_tile(self.stack.tile, self.rows, m.vocabulary, fused=not m.capped) or self.tokens, self.tokens)
        trained = 0 if self.job.lora else head
        gathered = 0
        if self.fsdp and not m.tied:
            gathered = head * HALF * (2 if self.shards > 1 else 1)
        elif self.fsdp and self.shards > 1:  # of the last layer: nothing is gathered after it
            gathered = m.layer_weights * HALF
        copies = 3 if "lm_head" in self.job.adapters else 1  # an adapter's logits, scaled, beside those of the base
        vectors = 3 if m.fused_norms else 11  # of a token, beside its logits; the final norm has four of them in fp32
        each = self.rows * HALF * (copies * m.vocabulary + vectors * m.hidden)
        # the second tile's gradient joins the first's in fp32; it may be a short one
        moments = [tile * each + trained * HALF]
        if tile < self.tokens:
            moments.append(min(tile, self.tokens - tile) * each + trained * (2 * HALF + FULL))
        if (
            m.capped
        ):  # no kernel makes loss and gradient in place: the cap's tanh, log-probabilities and two gradients in fp32
            before = trained * FULL if tile < self.tokens else 0
            moments.append(tile * self.rows * HALF * ((6 + copies) * m.vocabulary + vectors * m.hidden) + before)
        here = {"residual": 2 * self.x, "kept": self.flight.bytes}
        self.moment("loss", here, self.arriving(head, head))
        self.moment("loss", here, {"fsdp": gathered, "loss": max(moments)})

    def embedding(self) -> None:
        """The end of backward: the embedding's gradient, with all others there."""
        if self.job.lora:
            return
        m, table = self.m, self.m.embedding_weights
        moving = 0
        if self.fsdp:
            whole = 0 if m.tied or self.shards > 1 else HALF * table  # with one shard it stays gathered
            moving = FULL * table + FULL * table // self.shards + whole
        self.kept = 0
        grads = self.left(self.job.trained - table)
        self.moment("backward", grads, {"residual": self.x, "gradients": HALF * table, "fsdp": moving})


class Flight:
    """Tensors on their way to the host or the disk, of which those that are copies hold memory of their own. Kept as runs of equal
    ones: a layer puts thousands of pieces."""

    def __init__(self) -> None:
        self.runs: deque[tuple[int, bool, int]] = deque()  # bytes of a tensor, whether it is a copy, how many
        self.total = self.bytes = self.count = 0

    def put(self, nbytes: int, copied: bool, times: int = 1) -> None:
        """Each put first lets the oldest go, as long as there are two and more than IN_FLIGHT bytes; what the last of them lets go
        of is what all of them together do."""
        self._add(nbytes, copied, times - 1)
        while self.count >= 2 and self.total > IN_FLIGHT:
            size, counted, there = self.runs.popleft()
            needed = -(-(self.total - IN_FLIGHT) // size) if size else there
            gone = min(needed, there, self.count - 1)
            self.count -= gone
            self.total -= gone * size
            self.bytes -= gone * size if counted else 0
            if gone < there:
                self.runs.appendleft((size, counted, there - gone))
        self._add(nbytes, copied, 1)

    def _add(self, nbytes: int, copied: bool, times: int) -> None:
        if times:
            self.runs.append((nbytes, copied, times))
            self.count += times
            self.total += times * nbytes
            self.bytes += times * nbytes if copied else 0
