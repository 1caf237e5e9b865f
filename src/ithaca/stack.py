"""What the user asks for: one small record of switches, one per technique.

`Stack` is plain data. It imports nothing heavy, touches no device and knows nothing of a model, so that a planner, a
command line or a test can make thousands of them. `violations` collects everything that cannot work, each with its
remedy, and `require` turns the list into a single error: a user with three mistakes should not need three runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import groupby, product
from typing import Any

from .base.kernels import KERNELS

RECOMPUTE = ("none", "layer", "keep_attention")
ENGINES = ("auto", "composed", "streamed")
STORES = ("gpu", "host", "disk")
ATTENTION = ("auto", *KERNELS)
PER_LAYER = ("recompute", "store")  # fields that may name one for each layer


@dataclass(frozen=True)
class Stack:
    """The techniques of one run. Every field can be switched by itself."""

    ulysses: int = 1
    """Ranks that share a sequence by heads (DeepSpeed-Ulysses). Keep it inside a node: it moves the most bytes."""

    ring: int = 1
    """Ranks, times `ulysses`, that share a sequence by passing KV blocks around. Goes between nodes."""

    replicate: int = 1
    """Data-parallel replicas of the sharded parameters. What is left of the world size is data-parallel sharding."""

    heads_per_stage: int | None = None
    """Untied Ulysses: query heads per rank and stage. None = all at once; 1 = least memory."""

    recompute: str | tuple[str, ...] = "keep_attention"
    """What backward computes again: "none"; "layer" = everything; "keep_attention" = all but the attention forward. A tuple,
    or "6 layer + 10 keep_attention", names one for each layer, so that just as many keep attention as host and disk can bear."""

    store: str | tuple[str, ...] = "gpu"
    """Where kept activations wait for backward: "gpu", "host" (pinned memory) or "disk". A tuple, or "10 host + 6 gpu", names one
    for each layer: a GPU with memory to spare takes what the host has no room for."""

    tile: int | None = 4096
    """Tokens per tile of norms, projections, MLP and loss; a tile is recomputed in backward. None = untiled."""

    shard_parameters: bool = True
    """FSDP2: parameters, gradients and optimizer states sharded over all ranks of a replica."""

    attention: str = "auto"
    """Attention kernel: "auto" or one of "fa4", "cudnn", "flash", "cpu"."""

    engine: str = "auto"
    """How a layer is computed: "streamed" holds pieces, "composed" whole tensors; "auto" = streamed where it can."""

    hold: bool | None = None
    """With store="host" or "disk": what a streamed layer reads more than once stays on the device while that layer runs (three
    tensors of the size of its input). None = where the input is at most 1 GiB."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in PER_LAYER and isinstance(value, list):
                value = tuple(value)
            elif field.name in PER_LAYER and isinstance(value, str) and "+" in value:
                value = _per_layer(value)
            elif getattr(value, "ndim", None) == 0:  # a number of numpy's or torch's
                value = getattr(value, "item")()  # noqa: B009, as a str has none
            object.__setattr__(self, field.name, value)

    def recompute_of(self, layer: int) -> str:
        return self.recompute if isinstance(self.recompute, str) else self.recompute[layer]

    def store_of(self, layer: int) -> str:
        return self.store if isinstance(self.store, str) else self.store[layer]

    @property
    def far(self) -> str:
        """The store outside of the GPU that the run has; "gpu" if none."""
        return next((each for each in self._stores if each != "gpu"), "gpu")

    @property
    def uniform(self) -> bool:
        """Whether all layers are asked for the same."""
        return not any(isinstance(getattr(self, name), tuple) for name in PER_LAYER)

    def engine_of(self, layer: int) -> str:
        if self.engine != "auto":
            return self.engine
        return "composed" if self.recompute_of(layer) == "none" else "streamed"

    def words(self, name: str) -> Any:
        """A field as a user would write it: "6 layer + 10 keep_attention"."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return value
        return " + ".join(f"{len(list(same))} {kind}" for kind, same in groupby(value))

    @property
    def _recomputes(self) -> tuple[str, ...]:
        return (self.recompute,) if isinstance(self.recompute, str) else self.recompute

    @property
    def _stores(self) -> tuple[str, ...]:
        return (self.store,) if isinstance(self.store, str) else self.store

    @property
    def _pairs(self) -> Iterable[tuple[str, str]]:
        """What the layers ask for: recompute and store."""
        if (
            isinstance(self.recompute, tuple)
            and isinstance(self.store, tuple)
            and len(self.recompute) == len(self.store)
        ):
            return zip(self.recompute, self.store, strict=True)
        return product(self._recomputes, self._stores)

    @property
    def context_ranks(self) -> int:
        """Ranks that hold one sequence together."""
        return self.ulysses * self.ring

    def violations(self, world: int | None = None) -> list[str]:
        """Everything that cannot work, in words: the value, the limit and the remedy."""
        found = [*self._type_violations()]
        if found:
            return found  # arithmetic on wrong types would only add noise
        for name in ("ulysses", "ring", "replicate"):
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 1; use 1 to switch it off")
        for name in ("heads_per_stage", "tile"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name}={value} must be at least 1, or None to switch it off")
        for name, values, allowed in (
            ("recompute", self._recomputes, RECOMPUTE),
            ("store", self._stores, STORES),
            ("engine", (self.engine,), ENGINES),
            ("attention", (self.attention,), ATTENTION),
        ):
            for value in dict.fromkeys(values):
                if value not in allowed:
                    found.append(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")
        if {"host", "disk"} <= set(self._stores):
            found.append(
                f"store={self.words('store')!r} names both the host and the disk, but a run has one of them beside the GPU; the "
                "disk store holds its newest gigabytes in host memory by itself: use disk in place of host"
            )
        if any(recompute == "none" and store != "gpu" for recompute, store in self._pairs):
            found.append(
                f"store={self.far!r} has nothing to hold with recompute='none', where autograd keeps every activation "
                "on the GPU; use recompute='keep_attention' or 'layer', or store='gpu'"
            )
        if self.engine == "streamed" and "none" in self._recomputes:
            found.append(
                "engine='streamed' computes tiles again in backward, so recompute='none' cannot be kept; use "
                "recompute='keep_attention', or engine='composed'"
            )
        if not self.shard_parameters and self.replicate > 1:
            found.append(
                f"replicate={self.replicate} splits the ranks that shard parameters, but shard_parameters=False makes "
                "every rank a replica already; set replicate=1 or shard_parameters=True"
            )
        if world is not None and min(self.ulysses, self.ring, self.replicate) >= 1:
            need = self.context_ranks * self.replicate
            if world % need:
                found.append(
                    f"the world size {world} is not a multiple of ulysses × ring × replicate = {self.ulysses} × "
                    f"{self.ring} × {self.replicate} = {need}; start a multiple of {need} processes or lower one of them"
                )
        return found

    def layer_violations(self, layers: int) -> list[str]:
        """Fields that name other than one for each layer of the model."""
        return [
            f"{name}={self.words(name)!r} names {len(value)} layers, but the model has {layers}; give one for each, or one for all"
            for name in PER_LAYER
            if isinstance(value := getattr(self, name), tuple) and len(value) != layers
        ]

    def _type_violations(self) -> Iterable[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in PER_LAYER and isinstance(value, tuple):
                good, want = bool(value) and all(isinstance(each, str) for each in value), "one string per layer"
            elif field.name in ("recompute", "store", "engine", "attention"):
                good, want = isinstance(value, str), "a string"
            elif field.name == "shard_parameters":
                good, want = isinstance(value, bool), "True or False"
            elif field.name == "hold":
                good, want = value is None or isinstance(value, bool), "True, False or None"
            else:
                optional = field.name in ("heads_per_stage", "tile")
                good = (isinstance(value, int) and not isinstance(value, bool)) or (optional and value is None)
                want = "a whole number" + (" or None" if optional else "")
            if not good:
                yield f"{field.name}={value!r} must be {want}"


def _per_layer(text: str) -> str | tuple[str, ...]:
    """ "6 layer + 10 keep_attention" -> one for each layer; what cannot be read stays as it is and is refused by name."""
    found: list[str] = []
    for part in text.split("+"):
        count, _, kind = part.strip().partition(" ")
        if not count.isdigit():
            return text
        found += [kind.strip()] * int(count)
    return tuple(found)


def require(violations: list[str], subject: str) -> None:
    """Raise one ValueError that lists every violation with its remedy; do nothing if there is none."""
    if not violations:
        return
    if len(violations) == 1:
        raise ValueError(f"{subject}: {violations[0]}")
    raise ValueError(f"{subject}: {len(violations)} problems\n" + "\n".join(f"  - {line}" for line in violations))
