"""What a step of one rank holds: peak bytes of each phase, split by what holds them.

What a part costs is said beside the part, in the engine's cost files, which walk as the code does and yield the snapshots at which
each part holds most. Here they are added up: the largest snapshot of a phase is its peak. Nothing is fitted; the dry run, which
executes that code, is what all of it is tested against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..engine.cost import RankCost
from ..engine.job import Job, Memory
from ..engine.layer.cost import Snapshot, backward, forward, near, stored
from ..engine.limits import IN_FLIGHT
from ..engine.objective.cost import embedding, log_probs, loss
from ..engine.offload.cost import InFlight


def predict(job: Job) -> Memory:
    rank, peaks, in_flight = RankCost(job), Peaks(), InFlight()
    table = job.model.embedding_weights
    standing = Counter(rank.standing())
    peaks.add("load", standing, [[]])
    if job.accumulation > 1:
        standing["gradients"] = rank.on_device * rank.shard_gradients  # of the micro-batch before
    peaks.add("forward", standing, [[rank.arriving(table, table)]])
    layers = walked(job)
    for layer in layers:
        peaks.add("forward", standing, forward(rank, layer, in_flight))
    if job.units:
        peaks.add("loss", standing, log_probs(rank, in_flight, again=False))
        peaks.add("backward", standing, log_probs(rank, in_flight, again=True))
    else:
        peaks.add("loss", standing, loss(rank, in_flight))
    for layer in reversed(layers):
        peaks.add("backward", standing, backward(rank, layer, in_flight))
    peaks.add("backward", standing, embedding(rank))
    standing["fsdp"] = standing["tile"] = 0
    peaks.add("step", standing, [[rank.gradients_of(job.trained), rank.updating()]])
    waiting, offloaded = stored(rank), 0 if rank.on_device else rank.offloaded
    return Memory(
        {phase: {name: held for name, held in parts.items() if held > 0} for phase, parts in peaks.parts.items()},
        host=waiting["host"] + offloaded,
        disk=waiting["disk"],
        offloaded=offloaded,
        snapshot=rank.shard_gradients + rank.states if job.asynchronous else 0,
        near=near(rank, waiting["disk"]),
    )


def walked(job: Job) -> list[int]:
    """The layers that tell: where all are alike, those in the middle hold what their neighbours do. So does one amid its
    like, where a copy is so large that two are all that may be under way; else they reach over many layers, and all are walked."""
    layers, stack = job.model.layers, job.stack
    if layers <= 4:
        return list(range(layers))
    if stack.uniform:
        return [0, 1, layers - 2, layers - 1]
    kinds = [(stack.recompute_of(layer), stack.store_of(layer)) for layer in range(layers)]
    if RankCost(job).hidden < IN_FLIGHT or any(stack.engine_of(layer) != "streamed" for layer in range(layers)):
        return list(range(layers))
    edges = [layer for layer in range(layers + 1) if layer in (0, layers) or kinds[layer] != kinds[layer - 1]]
    return sorted({layer for edge in edges for layer in range(max(0, edge - 2), min(layers, edge + 2))})


class Peaks:
    """The largest snapshot of each phase."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}
        self.bytes: dict[str, int] = {}

    def add(self, phase: str, standing: Counter[str], snapshots: Iterable[Snapshot]) -> None:
        base = sum(standing.values())
        for snapshot in snapshots:
            size = base
            for part in snapshot:
                size += sum(part.values())
            if size <= self.bytes.get(phase, -1):  # nearly always, and a plan looks at thousands of them
                continue
            total = dict(standing)  # Counter.update takes three times as long
            for part in snapshot:
                for name, held in part.items():
                    total[name] = total.get(name, 0) + held
            self.parts[phase], self.bytes[phase] = total, size
