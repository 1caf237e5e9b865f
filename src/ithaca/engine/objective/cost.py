"""What the head and its loss hold, in bytes: the terms of cross_entropy.py. No torch; tested against the dry run."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost import RankCost
from ..layer.cost import Snapshot, kept_below
from ..limits import BF16, FP32, loss_tile
from ..offload.cost import InFlight


def loss(rank: RankCost, in_flight: InFlight) -> Iterator[Snapshot]:
    model, head = rank.model, rank.model.embedding_weights
    below = {"kept": kept_below(rank, model.layers)}
    here = {"residual": 2 * rank.hidden, "kept": in_flight.copies}  # the last layer's output, and its gradient
    yield [below, here, rank.arriving(head, head)]
    yield [below, here, {"fsdp": _gathered(rank), "loss": max(_tiles(rank))}]


def _gathered(rank: RankCost) -> int:
    model = rank.model
    if rank.fsdp and not model.tied:
        return model.embedding_weights * BF16 * (2 if rank.shards > 1 else 1)  # as received, and in order
    if rank.fsdp and rank.shards > 1:  # of the last layer: nothing is gathered after it
        return model.layer_weights * BF16
    return 0


def _tiles(rank: RankCost) -> Iterator[int]:
    """A tile's logits, their gradient in the same memory, and the gradient of the head."""
    model = rank.model
    limit = loss_tile(rank.stack.tile, rank.rows, model.vocabulary, fused=not model.capped)
    tile = min(limit or rank.tokens, rank.tokens)
    trained = 0 if rank.job.lora else model.embedding_weights
    logits = 3 if "lm_head" in rank.job.adapters else 1  # an adapter's logits, scaled, beside those of the base
    vectors = 3 if model.fused_norms else 11  # of a token, beside its logits; the final norm has four of them in fp32
    token = rank.rows * BF16 * (logits * model.vocabulary + vectors * model.hidden)
    yield tile * token + trained * BF16
    if tile < rank.tokens:  # the second tile's gradient joins the first's in fp32; it may be a short one
        yield min(tile, rank.tokens - tile) * token + trained * (2 * BF16 + FP32)
    if (
        model.capped
    ):  # no kernel makes loss and gradient in place: the cap's tanh, log-probabilities and two gradients, in fp32
        more = rank.rows * BF16 * 6 * model.vocabulary
        yield tile * (token + more) + (trained * FP32 if tile < rank.tokens else 0)


def embedding(rank: RankCost) -> Iterator[Snapshot]:
    """The end of backward: the embedding's gradient, with all others there."""
    if rank.job.lora:
        return
    model, table = rank.model, rank.model.embedding_weights
    # with one shard it stays gathered
    reducing = rank.reducing(table, 0 if model.tied or rank.shards > 1 else BF16 * table) if rank.fsdp else 0
    others = rank.gradients_of(rank.job.trained - table)
    yield [others, {"residual": rank.hidden, "gradients": BF16 * table, "fsdp": reducing}]
