"""Head stages: what runs, in which order, and in whose memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from ithaca.engine.attention import stages
from ithaca.engine.attention.backends import Cpu
from ithaca.engine.attention.formula import Math
from ithaca.engine.attention.head_schedule import head_schedule
from ithaca.engine.attention.segments import plan_segments
from ithaca.engine.attention.stages import Exchange, Shape, StagedAttention
from ithaca.engine.mesh import Group

from .masks import distance, plain_attention

SHAPE = Shape(rows=1, tokens=24, heads=8, kv_heads=4, head_dim=4)


class Noted:
    """A source of random heads that notes what it was asked for."""

    def __init__(self, log: list) -> None:
        self.log = log
        self.got: list = []
        self.out: dict[int, torch.Tensor] = {}

    def attended(self, stage, heads, value):
        self.out[stage] = value.clone()

    def fill(self, stage, heads, name, into):
        into.copy_(self.out[stage] if name == "out" else torch.ones_like(into))

    def project(self, stage, heads, into):
        self.log.append(f"project {stage}")
        generator = torch.Generator().manual_seed(1)
        for name, value in into.items():
            count = SHAPE.heads if name == "q" else SHAPE.kv_heads
            every = torch.randn(count, SHAPE.rows, SHAPE.tokens, SHAPE.head_dim, generator=generator)
            value.copy_(every[heads[name]])

    def stash(self, sums):
        return lambda: sums

    def receive(self, stage, heads, grads):
        self.log.append(f"receive {stage}")
        self.got.append((heads, {name: g.clone() for name, g in grads.items()}))


class NotedKernel(Cpu):
    def __init__(self, log: list) -> None:
        super().__init__()
        self.log = log

    def forward(self, q, k, v, **options):
        self.log.append(f"attend {self.calls.forward}")
        return super().forward(q, k, v, **options)


def attention(world: int, heads_per_stage: int | None, log: list) -> tuple[StagedAttention, Group]:
    import torch.distributed as dist

    group = Group(world, dist.get_rank(), dist.group.WORLD) if world > 1 else Group(1, 0, None)
    length = SHAPE.tokens * world
    plan = plan_segments([(0, length)], [(0, length)], None, None, torch.device("cpu"))
    schedule = head_schedule(SHAPE.heads, SHAPE.kv_heads, world, heads_per_stage)
    return StagedAttention(schedule, SHAPE, group, Group(1, 0, None), NotedKernel(log), [plan], 0.5), group


def order_on_two_ranks() -> list[str]:
    log: list[str] = []
    staged, _ = attention(2, 1, log)
    untouched = stages.all_to_all

    def noted(out, send, counts_out, counts_in, group):
        log.append("send")
        return untouched(out, send, counts_out, counts_in, group)

    stages.all_to_all = noted
    try:
        staged.forward(Noted(log), torch.zeros(1), keep=False)
    finally:
        stages.all_to_all = untouched
    return log


def test_next_exchange_starts_before_this_attention(workers):
    """The order that lets stage t+1 travel while stage t attends."""
    for log in workers.run(order_on_two_ranks, world=2):
        for stage in range(3):
            assert log.index(f"project {stage + 1}") < log.index(f"attend {stage}")
            between = log[log.index(f"project {stage + 1}") : log.index(f"attend {stage}")]
            assert "send" in between
        assert log.index("project 2") > log.index("attend 0")  # one stage ahead, not all of them


def late_on_two_ranks() -> list[str]:
    log: list[str] = []
    staged, _ = attention(2, 1, log)
    limit, stages.OVERLAP_BYTES = stages.OVERLAP_BYTES, 0
    try:
        staged.forward(Noted(log), torch.zeros(1), keep=False)
    finally:
        stages.OVERLAP_BYTES = limit
    return log


def test_long_stages_run_one_after_the_other(workers):
    """Where a second set of buffers would be what does not fit, nothing runs ahead."""
    for log in workers.run(late_on_two_ranks, world=2):
        assert log == [f"{what} {stage}" for stage in range(4) for what in ("project", "attend")]


def test_one_rank_looks_not_ahead():
    log: list[str] = []
    staged, _ = attention(1, 2, log)
    staged.forward(Noted(log), torch.zeros(1), keep=False)
    assert log == [f"{what} {stage}" for stage in range(4) for what in ("project", "attend")]


def test_kv_heads_travel_once():
    """Two query heads share a KV head: the second stage of a group asks for no KV."""
    asked = []

    class Source(Noted):
        def project(self, stage, heads, into):
            asked.append(sorted(heads))
            super().project(stage, heads, into)

    staged, _ = attention(1, 1, [])
    staged.forward(Source([]), torch.zeros(1), keep=False)
    assert asked == [["k", "q", "v"], ["q"]] * 4


def test_buffers_of_a_stage_serve_all_stages():
    exchange = Exchange(Group(4, 0, None), SHAPE, torch.zeros(1), reuse=True)
    places = {exchange.buffer("q send", 4).data_ptr() for _ in range(10)}
    assert len(places) == 2  # one in use, one on its way
    kept = Exchange(Group(4, 0, None), SHAPE, torch.zeros(1), reuse=False)
    held = [kept.buffer("q send", 4) for _ in range(3)]
    assert len({t.data_ptr() for t in held}) == 3


def test_an_empty_turn_does_not_hand_out_memory_in_use():
    exchange = Exchange(Group(4, 0, None), SHAPE, torch.zeros(1), reuse=True)
    mine = exchange.buffer("k received", 4)
    exchange.buffer("k received", 0)
    assert exchange.buffer("k received", 4).data_ptr() != mine.data_ptr()


def test_gradients_come_home_to_every_head():
    """All query heads once; a KV head when its last query head is through."""
    log: list[str] = []
    staged, _ = attention(1, 1, log)
    source = Noted(log)
    lses, _ = staged.forward(source, torch.zeros(1), keep=False)
    staged.backward(source, torch.zeros(1), lses, [])
    assert [heads.get("q") for heads, _ in source.got] == [[h] for h in range(8)]
    assert [heads.get("k") for heads, _ in source.got] == [None, [0], None, [1], None, [2], None, [3]]
    assert staged.kernel.calls.forward == 8 and staged.kernel.calls.backward == 8


def test_a_soft_cap_reaches_every_stage():
    """Output and gradients of all heads, two at a time."""
    plain, _ = attention(1, 2, [])
    staged, source = replace(plain, kernel=Math(), softcap=0.4), Noted([])
    lses, _ = staged.forward(source, torch.zeros(1), keep=False)
    staged.backward(source, torch.zeros(1), lses, [])
    generator = torch.Generator().manual_seed(1)
    counts = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    made = [torch.randn(n, SHAPE.rows, SHAPE.tokens, SHAPE.head_dim, generator=generator) for n in counts]
    leaves = [t.double().transpose(0, 1).requires_grad_() for t in made]
    seen = torch.ones(SHAPE.tokens, SHAPE.tokens, dtype=torch.bool).tril()[None]
    right, _ = plain_attention(*leaves, seen, 0.5, 0.4)
    right.sum().backward()
    right = right.detach()
    assert distance(torch.cat([source.out[t] for t in range(4)]).transpose(0, 1), right) < 1e-6
    for name, leaf in zip("qkv", leaves, strict=True):
        ours = torch.cat([grads[name] for _, grads in source.got if name in grads])
        assert leaf.grad is not None and distance(ours.transpose(0, 1), leaf.grad) < 1e-6
