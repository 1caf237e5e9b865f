"""Sizes at which the engine does things differently. No torch: the engine acts by them, the costs beside it count with them."""

from __future__ import annotations

BF16, FP32 = 2, 4  # bytes of a number

NF4_BLOCK = 64  # weights of a row that share a scale
NF4 = 0.5 + FP32 / NF4_BLOCK  # bytes of a weight

PROJECTION_TILES = 4
"""Tiles of the MLP that make one of the projections. A stage projects a few heads from a tile: little work and little memory per
token, so its tiles are longer than those of the MLP, or launching the kernels would take longer than running them."""

TILES_PER_PIECE = 8
"""Tiles that make a piece of a streamed layer: a copy of a few hundred MB runs at the full rate of the link, and two of them are
small change."""

HOLD_BYTES = 2**30
"""Of a layer input, up to which a streamed layer keeps on the device what it reads again: 1M tokens of Llama3-8B on 8 ranks. Above,
what a layer reads again costs little beside its attention; below, three more tensors of this size cost little beside the memory
there is."""

OVERLAP_BYTES = 2**29
"""Of one tensor of a stage, up to which the next stage is brought while this one attends: 2M tokens of one head of 128 in bf16,
where attention takes seconds."""

IN_FLIGHT = 2**30
"""Bytes of puts under way whose sources are held before a further put waits; two always may."""

HOST_CACHE = 2**32
"""Bytes of host memory in which a disk store keeps what it was given last."""

TABLE_BYTES = 2**27
"""Of cos and sin of all tokens of a rank, up to which they are kept: 256K tokens of heads of 128 in bf16."""

NEWTON_SCHULZ = 5
"""Iterations that make Muon's update of a matrix nearly orthogonal."""

BLOCK, SLOTS = 2**24, 3
"""Weights of a block that is updated on the GPU while its like waits on the host, and how many blocks are there at once: one comes,
one is updated, one goes. 64 MB of each tensor run at the full rate of the link."""

SHORTEST_LOSS_TILE = 256
LOGITS = {True: 2**29, False: 2**27}
"""Elements of a tile of logits: near 1 GB in bf16 where one tensor is all there is (one kernel makes loss and gradient), and near
0.5 GB in fp32 where there are several."""


def loss_tile(tile: int | None, rows: int, vocabulary: int, fused: bool) -> int:
    """Tokens. A logit row is 30 times a hidden row: with a large vocabulary, shorter tiles. Without tiles of layers it gets twice
    as much, not all: at 32K tokens its logits would be a fifth of what a 1B model holds."""
    longest = max(SHORTEST_LOSS_TILE, LOGITS[fused] * (2 if tile is None else 1) // (rows * vocabulary))
    return longest if tile is None else min(tile, longest)
