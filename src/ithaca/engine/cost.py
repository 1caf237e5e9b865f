"""What a step of one rank holds beside its layers, in bytes: its tokens, and weights, gradients and states as FSDP2 keeps them.

`RankCost` is what the cost files of the parts (attention/cost.py, layer/cost.py, offload/cost.py, objective/cost.py) count with:
the sizes of a job as one rank sees it. The planner adds their terms up (planner/memory.py). Nothing is fitted, and the dry run,
which executes the code that they describe, is what all of it is tested against. No torch.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from .attention.cost import AttentionCost, Bytes
from .job import Job
from .limits import BF16, BLOCK, FP32, HOLD_BYTES, NF4, PROJECTION_TILES, SLOTS, TABLE_BYTES, TILES_PER_PIECE
from .offload.cost import pinned

INT64 = 8

_attention_cost = lru_cache(1024)(AttentionCost)  # a search asks for the same again and again; it does not change


class RankCost:
    def __init__(self, job: Job) -> None:
        model, stack = job.model, job.stack
        self.job, self.model, self.stack = job, model, stack
        groups = max(1, job.world // (stack.ulysses * stack.ring))
        self.rows = max(1, job.batch // groups)
        # the sequence is padded to a length that ranks can share; a ring cuts each part in two
        step = stack.ulysses if stack.ring == 1 else lcm(2 * stack.ring, stack.ring * stack.ulysses)
        self.tokens = -(-job.context // step) * step // (stack.ulysses * stack.ring)
        self.vectors = self.rows * self.tokens  # tokens of all rows
        self.hidden = (
            self.vectors * model.hidden * BF16
        )  # the residual stream: a layer's input, its output, their gradients
        self.attended = self.vectors * model.heads * model.head_dim * BF16  # the attention output, all heads
        self.tile = min(stack.tile or self.tokens, self.tokens)
        self.projection_tile = min((stack.tile or self.tokens) * PROJECTION_TILES, self.tokens)
        self.piece = min((stack.tile or self.tokens) * TILES_PER_PIECE, self.tokens)
        self.pieces = -(-self.tokens // self.piece)
        self.rotary = 2 * self.tokens * (model.rotary or model.head_dim) * BF16  # cos and sin of every position
        self.attention = _attention_cost(
            model.heads, model.kv_heads, model.head_dim, self.rows, self.tokens, stack.ulysses, stack.ring,
            stack.heads_per_stage, job.trees,
        )  # fmt: skip
        # whole weights on every rank of several are shards of one each
        self.fsdp = stack.shard_parameters or job.world > 1
        self.shards = job.world // stack.replicate if stack.shard_parameters else 1

    # -- there all the time ---------------------------------------------------------------------------------------------

    def standing(self) -> Bytes:
        model, job = self.model, self.job
        weights = job.frozen // self.shards * BF16 + job.trained // self.shards * self.master
        weights -= self.spared * model.layers // self.shards
        ids_labels_positions = 3 * INT64 * self.vectors
        standing = {
            "parameters": self.on_device * weights,
            "optimizer": self.on_device * self.states,
            "other": ids_labels_positions,
            "tile": self.rotary if self.rotary <= TABLE_BYTES else 0,
        }
        if model.tied and self.fsdp:  # the embedding is not given back: the head wants it again
            standing["fsdp"] = model.embedding_weights * BF16
        return standing

    @property
    def on_device(self) -> int:
        """1 where weights, gradients and states stay on the GPU, 0 where they wait on the host (train.offload_optimizer)."""
        return 0 if self.job.offload else 1

    @property
    def master(self) -> int:
        """Bytes of a trained weight, and of its gradient, in a shard: fp32 wherever FSDP2 is."""
        return FP32 if self.fsdp else BF16

    @property
    def shard_gradients(self) -> int:
        return self.job.trained // self.shards * self.master

    @property
    def states(self) -> int:
        """AdamW's averages are of the weights' type."""
        return int(self.job.trained // self.shards * min(self.job.optimizer_bytes, 2 * self.master))

    @property
    def offloaded(self) -> int:
        """Weights and gradients of a rank in pinned host memory, and the optimizer's states beside them. With several micro-batches
        the gradients of one, and the sum of those before it."""
        trained, frozen = self._tensors

        def held(groups: list[tuple[int, int]], size: int) -> int:
            return sum(times * pinned(weights * size) for times, weights in groups)

        weights_and_gradients = (3 if self.job.accumulation > 1 else 2) * held(trained, self.master)
        return weights_and_gradients + held(frozen, BF16) + self.states

    @property
    def _tensors(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Those that are trained and those that are frozen: how many, and the weights of a shard of one."""
        model, job, rank = self.model, self.job, self.job.lora
        tables = [(model.vocabulary, model.hidden)] * (1 if model.tied else 2)
        base = [(model.layers, model.layer_tensors), (1, [*tables, (model.hidden, 1)])]
        adapters = []
        for name in job.adapters:
            rows, columns = model.linears[name]
            adapters.append((1 if name == "lm_head" else model.layers, [(rank, columns), (rows, rank)]))
        trained, frozen = (adapters, base) if rank else (base, [])
        shards = [
            [(times, -(-rows // self.shards) * columns) for times, shapes in groups for rows, columns in shapes]
            for groups in (trained, frozen)
        ]
        return shards[0], shards[1]

    # -- FSDP2 ----------------------------------------------------------------------------------------------------------

    @property
    def spared(self) -> int:
        """Bytes by which NF4 makes the weights of a layer fewer, as they wait and as they are sent."""
        return int(self.job.packed * (BF16 - NF4))

    @property
    def sent_layer(self) -> int:
        """Bytes of a layer as they arrive from the other ranks."""
        return self.model.layer_weights * BF16 - self.spared

    def gathered_layer(self) -> Bytes:
        """The weights of this layer, and of the one before or after it, as they arrived."""
        layer = self.model.layer_weights * BF16
        return {"fsdp": layer + (self.sent_layer if self.shards > 1 else 0)} if self.fsdp else {}

    def unpacking(self) -> Bytes:
        """Of a layer that is being gathered: the packed bytes in order, until each parameter is unpacked."""
        return {"fsdp": self.sent_layer} if self.job.quantize else {}

    def arriving(self, largest: int, weights: int) -> Bytes:
        """Shards of a group on their way from the host: one of them as it is (the `largest`), and all as layers compute."""
        if self.on_device:
            return {}
        master = largest * FP32 if not self.job.lora else 0  # frozen ones are small already
        alone = (
            weights * BF16 if self.shards == 1 else 0
        )  # where there is nobody to gather from, it is copied all the same
        return {"fsdp": (max(master, alone) + weights * BF16) // self.shards}

    def gradients_of(self, weights: int) -> Bytes:
        """Gradients of so many weights, in shards. With several micro-batches all of them are there all the time."""
        if self.job.accumulation > 1:
            return {"gradients": 0}
        return {"gradients": self.on_device * (weights // self.shards * self.master)}

    def updating(self) -> Bytes:
        """What Muon works on, one matrix at a time (muon.py), and states that wait on the host, in blocks (host_adamw.py)."""
        if self.job.optimizer == "muon":
            return {"fsdp": 5 * BF16 * max(rows * columns for rows, columns in self.job.matrices)}
        if self.on_device:
            return {}
        weight_averages_gradient = 4 * FP32
        largest = max(weights for _, weights in self._tensors[0])
        return {"optimizer": SLOTS * weight_averages_gradient * min(BLOCK, largest)}

    def reducing(self, weights: int, beside: int) -> int:
        """Gradients on their way to their shards: in fp32, what is there beside them, and this rank's part of the sum."""
        return FP32 * weights + beside + FP32 * weights // self.shards

    # -- which way a layer goes ----------------------------------------------------------------------------------------

    def streamed(self, layer: int) -> bool:
        return self.stack.engine_of(layer) == "streamed"

    def offloads(self, layer: int) -> bool:
        """Whether what a layer keeps leaves the device."""
        return self.stack.store_of(layer) != "gpu"

    @property
    def holds(self) -> bool:
        """Whether what a streamed layer reads again stays on the device."""
        if self.stack.offload == "gpu":
            return True
        return self.hidden <= HOLD_BYTES if self.stack.hold is None else self.stack.hold

    def learns(self, *linears: str) -> bool:
        """Whether any of these linears has a gradient: then their input is kept for it."""
        return not self.job.lora or self.adapts(*linears)

    def adapts(self, *linears: str) -> bool:
        """Whether any of these linears, or one that it is a part of, has an adapter."""
        fused = self.model.traits.fused
        return any(fused.get(name, name) in self.job.adapters for name in linears)
