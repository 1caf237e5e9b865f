"""Order shown by a trace of real ranks: what comes next is under way while this is computed, and nobody waits for it too early."""

from __future__ import annotations

import pytest

from ithaca.stack import Stack
from ithaca.verify.case import Case

from .order import LATE, Kernel, ahead, parts, traced

pytestmark = pytest.mark.ranks

LAYERS, LATE_STAGE = 4, 2
CHANGES = (
    ("hidden_size", 1024), ("head_dim", 128), ("intermediate_size", 2048), ("vocab_size", 1024),
    ("num_attention_heads", 8), ("num_key_value_heads", 4), ("num_hidden_layers", LAYERS),
)  # fmt: skip
SETTINGS = [
    ("streamed", "keep_attention", "host"),
    ("streamed", "layer", "gpu"),
    ("composed", "keep_attention", "host"),
]


def case_of(setting: tuple[str, str, str], **layout: int) -> Case:
    engine, recompute, store = setting
    stack = Stack(engine=engine, recompute=recompute, store=store, heads_per_stage=1, **layout)  # pyright: ignore[reportArgumentType]
    return Case("llama3", stack, 2, "cuda", "bfloat16", 16384, changes=CHANGES)


@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_the_next_exchange_runs_beside_attention(ranks, setting):
    """One rank is late to every exchange of one stage: its peer attends the stage before meanwhile."""
    kernels = ranks.run(traced, case_of(setting, ulysses=2), LATE_STAGE, world=2)[0]
    pairs = ahead(kernels)
    stages = 8 // 2
    assert len(pairs) >= LAYERS * (stages - 1) * 2, "forward and backward"
    for attended, brought in pairs:
        assert brought.exchanges and attended.computes
        assert max(k.queued for k in brought.exchanges) < max(k.end for k in attended.computes), (attended, brought)
        if brought.stage == LATE_STAGE:
            late = max(k.end for k in brought.exchanges)
            assert max(k.end for k in attended.computes) < late - LATE * 1e6 / 2, (attended, brought)
    _gathers_run_ahead(kernels)


def test_the_next_block_travels_beside_attention(ranks):
    """In a ring: one rank is late to one stage, its peer attends the block that it has meanwhile."""
    kernels = ranks.run(traced, case_of(SETTINGS[0], ring=2), LATE_STAGE, world=2)[0]
    attended = [part for part in parts(kernels) if part.what.startswith("_attend")]
    assert len(attended) >= LAYERS * 4 * 2
    for part in attended:
        travels = part.exchanges[0]
        first = max(part.computes[: len(part.computes) // 2], key=lambda k: k.end - k.start)
        assert travels.queued < first.end, part
        if part.stage == LATE_STAGE and part.what == "_attend":
            assert first.end < travels.end - LATE * 1e6 / 2, part


def _gathers_run_ahead(kernels: list[Kernel]) -> None:
    """FSDP2 asks for the weights of a layer while the GPU still computes what was queued before."""
    gathers = [kernel for kernel in kernels if kernel.gather]
    waited = [g for g in gathers if not any(k.computes and k.queued < g.queued < k.end for k in kernels)]
    print(f"{len(gathers)} gathers, {len(waited)} with nothing left to compute")
    assert len(gathers) >= 2 * LAYERS
    assert len(waited) <= 2, "but the first ones"
