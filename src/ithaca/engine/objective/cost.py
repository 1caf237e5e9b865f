"""What the head and its loss hold, in bytes: the terms of cross_entropy.py and log_probs.py. No torch; tested against a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost import RankCost
from ..layer.cost import Snapshot, kept_below
from ..limits import BF16, FP32, loss_tile
from ..offload.cost import InFlight

NUMBERS = 56  # bytes of a token: its label's logit, lse, mean and hit, what they are spread to, their gradients


def loss(rank: RankCost, in_flight: InFlight) -> Iterator[Snapshot]:
    model, head = rank.model, rank.model.embedding_weights
    below = {"kept": kept_below(rank, model.layers)}
    here = {"residual": rank.hidden, "kept": in_flight.copies}  # the last layer's output
    yield [below, here, rank.arriving(head, head)]
    gradient = {"residual": rank.hidden}
    yield [below, here, gradient, {"fsdp": _gathered(rank), "loss": max(_tiles(rank))}]


def log_probs(rank: RankCost, in_flight: InFlight, *, again: bool) -> Iterator[Snapshot]:
    """Forward, where a tile's logits are looked at and gone; or (again) backward, where they are computed once more for their
    gradient."""
    model, head = rank.model, rank.model.embedding_weights
    below, numbers = {"kept": kept_below(rank, model.layers)}, rank.rows * rank.tokens * NUMBERS
    here = {"residual": (2 if again else 1) * rank.hidden, "kept": in_flight.copies}
    if not again:
        yield [below, here, rank.arriving(head, head)]
    yield [below, here, {"fsdp": _gathered(rank), "loss": numbers + max(_log_prob_tiles(rank, again))}]


def _gathered(rank: RankCost) -> int:
    model = rank.model
    if rank.fsdp and not model.tied:
        return model.embedding_weights * BF16 * (2 if rank.shards > 1 else 1)  # as received, and in order
    if rank.fsdp and rank.shards > 1:  # of the last layer: nothing is gathered after it
        return rank.sent_layer
    return 0


def _tiles(rank: RankCost) -> Iterator[int]:
    """A tile's logits, their gradient in the same memory, and the gradient of the head."""
    model = rank.model
    limit = loss_tile(rank.stack.tile, rank.rows, model.vocabulary, fused=not model.capped)
    tile = min(limit, rank.tokens)
    trained = 0 if rank.job.lora else model.embedding_weights
    token = rank.rows * _token(rank)
    if tile == rank.tokens or model.capped:
        yield tile * token + trained * BF16
    else:  # the head's gradient grows in fp32
        yield max(tile * token + trained * FP32, trained * (FP32 + BF16))
    if tile < rank.tokens and model.capped:  # the second tile's joins the first's in fp32; it may be a short one
        yield min(tile, rank.tokens - tile) * token + trained * (2 * BF16 + FP32)
    if (
        model.capped
    ):  # no kernel makes loss and gradient in place: the cap's tanh, log-probabilities and two gradients, in fp32
        more = rank.rows * BF16 * 6 * model.vocabulary
        yield tile * (token + more) + (trained * FP32 if tile < rank.tokens else 0)


def _token(rank: RankCost) -> int:
    """Bytes of a token in a tile."""
    model = rank.model
    logits = 2 if model.divided else 1  # their gradient before and behind a division
    vectors = 3 if model.fused_norms else 11  # of a token, beside its logits; the final norm has four of them in fp32
    return BF16 * (logits * model.vocabulary + vectors * model.hidden)


def _log_prob_tiles(rank: RankCost, again: bool) -> Iterator[int]:
    """A tile's logits; and their gradient in the same memory, the gradient of the head, and the sum of those of earlier tiles."""
    model, tokens = rank.model, rank.rows * rank.tokens  # rows one behind the other
    tile = min(loss_tile(rank.stack.tile, 1, model.vocabulary, fused=not model.capped), tokens)
    capped = (
        6 * BF16 * model.vocabulary if model.capped else 0
    )  # no kernel: fp32 logits, probabilities and what is made of them
    logits, count = tile * (_token(rank) + capped), -(-tokens // tile)
    if not again:
        yield logits
        return
    trained = 0 if rank.job.lora else model.embedding_weights
    yield logits + trained * (BF16 + (0 if count == 1 else BF16 if count == 2 else FP32))
    if count > 1:  # by now the logits are gone
        yield trained * (2 * BF16 + FP32)


def embedding(rank: RankCost) -> Iterator[Snapshot]:
    """The end of backward: the embedding's gradient, with all others there."""
    if rank.job.lora:
        return
    model, table = rank.model, rank.model.embedding_weights
    # with one shard it stays gathered
    reducing = rank.reducing(table, 0 if model.tied or rank.shards > 1 else BF16 * table) if rank.fsdp else 0
    others = rank.gradients_of(rank.job.trained - table)
    yield [others, {"residual": rank.hidden, "gradients": BF16 * table, "fsdp": reducing}]
