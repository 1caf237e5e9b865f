"""What the user asks for: one small record of switches, one per technique.

`Stack` is plain data. It imports nothing heavy, touches no device and knows nothing of a model, so that a planner, a
command line or a test can make thousands of them. `violations` collects everything that cannot work, each with its
remedy, and `require` turns the list into a single error: a user with three mistakes should not need three runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import groupby, product
from typing import Any

from .base.kernels import KERNELS

RECOMPUTE = ("none", "layer", "keep_attention")
ENGINES = ("auto", "composed", "streamed", "module")
STORES = ("gpu", "host", "disk")
ATTENTION = ("auto", *KERNELS)
CHOICES = {"recompute": RECOMPUTE, "store": STORES, "engine": ENGINES, "attention": ATTENTION}
PER_LAYER = ("recompute", "store")  # fields that may name one for each layer
DEEPEST = 100_000  # layers that a text may name: a billion are a mistake, and gigabytes
_COUNTED = re.compile(r"([0-9]{1,9})\s+(\S.*)", re.ASCII)


class PerLayer(tuple[str, ...]):
    """One word for each layer of a model, from the lowest up; written "6 layer + 10 keep_attention"."""

    @classmethod
    def read(cls, text: str) -> PerLayer | None:
        """None where the text is not written so."""
        words: list[str] = []
        for part in text.split("+"):
            if not (match := _COUNTED.fullmatch(part.strip())) or int(match[1]) > DEEPEST - len(words):
                return None
            words += [match[2]] * int(match[1])
        return cls(words)

    def __str__(self) -> str:
        return " + ".join(f"{len(list(same))} {word}" for word, same in groupby(self))


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

    tile: int | None = field(default=4096, metadata={"unit": "tokens"})
    """Tokens per tile of norms, projections, MLP and loss; a tile is recomputed in backward. None = untiled."""

    shard_parameters: bool = True
    """FSDP2: parameters, gradients and optimizer states sharded over all ranks of a replica."""

    attention: str = "auto"
    """Attention kernel: "auto" or one of "fa4", "cudnn", "flash", "cpu", "math" (plain matrix products, slow)."""

    engine: str = "auto"
    """How a layer is computed: "streamed" holds pieces, "composed" whole tensors, "module" runs the model's own code, of any
    decoder; "auto" = streamed where it can, and module for models without arithmetic of their own here."""

    hold: bool | None = None
    """With store="host" or "disk": what a streamed layer reads more than once stays on the device while that layer runs (three
    tensors of the size of its input). None = where the input is at most 1 GiB."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.name in PER_LAYER and isinstance(value, (list, tuple)):
                value = PerLayer(value)
            elif declared.name in PER_LAYER and isinstance(value, str):
                value = PerLayer.read(value) or value  # what cannot be read stays as it is, and is refused by name
            elif getattr(value, "ndim", None) == 0:  # a number of numpy's or torch's
                value = getattr(value, "item")()  # noqa: B009, as a str has none
            object.__setattr__(self, declared.name, value)

    def recompute_of(self, layer: int) -> str:
        return self.recompute if isinstance(self.recompute, str) else self.recompute[layer]

    def store_of(self, layer: int) -> str:
        return self.store if isinstance(self.store, str) else self.store[layer]

    @property
    def offload(self) -> str:
        """The store outside of the GPU that the run has; "gpu" if none."""
        return next((store for store in self._stores if store != "gpu"), "gpu")

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
        return str(value) if isinstance(value, PerLayer) else value

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
        problems = [*self._type_violations()]
        if problems:
            return problems  # arithmetic on wrong types would only add noise
        for declared in fields(Stack):
            name, value = declared.name, getattr(self, declared.name)
            if declared.type == "int" and value < 1:
                problems.append(f"{name}={value} must be at least 1; use 1 to switch it off")
            elif declared.type == "int | None" and value is not None and value < 1:
                problems.append(f"{name}={value} must be at least 1, or None to switch it off")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            for word in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
                if word not in allowed:
                    problems.append(f"{name}={word!r} is unknown; choose one of {', '.join(map(repr, allowed))}")
        if {"host", "disk"} <= set(self._stores):
            problems.append(
                f"store={self.words('store')!r} names both the host and the disk, but a run has one of them beside the GPU; the "
                "disk store holds its newest gigabytes in host memory by itself: use disk in place of host"
            )
        if any(recompute == "none" and store != "gpu" for recompute, store in self._pairs):
            problems.append(
                f"store={self.offload!r} has nothing to hold with recompute='none', where autograd keeps every activation "
                "on the GPU; use recompute='keep_attention' or 'layer', or store='gpu'"
            )
        if self.engine == "streamed" and "none" in self._recomputes:
            problems.append(
                "engine='streamed' computes tiles again in backward, so recompute='none' cannot be kept; use "
                "recompute='keep_attention', or engine='composed'"
            )
        if not self.shard_parameters and self.replicate > 1:
            problems.append(
                f"replicate={self.replicate} splits the ranks that shard parameters, but shard_parameters=False makes "
                "every rank a replica already; set replicate=1 or shard_parameters=True"
            )
        if world is not None and min(self.ulysses, self.ring, self.replicate) >= 1:
            need = self.context_ranks * self.replicate
            if world % need:
                problems.append(
                    f"the world size {world} is not a multiple of ulysses × ring × replicate = {self.ulysses} × "
                    f"{self.ring} × {self.replicate} = {need}; start a multiple of {need} processes or lower one of them"
                )
        return problems

    def layer_violations(self, layers: int) -> list[str]:
        """Fields that name other than one for each layer of the model."""
        return [
            f"{name}={self.words(name)!r} names {len(value)} layers, but the model has {layers}; give one for each, or one for all"
            for name in PER_LAYER
            if isinstance(value := getattr(self, name), tuple) and len(value) != layers
        ]

    def _type_violations(self) -> Iterable[str]:
        for declared in fields(Stack):
            value, kind = getattr(self, declared.name), str(declared.type)
            if isinstance(value, PerLayer):
                good, want = bool(value) and all(isinstance(word, str) for word in value), "one string per layer"
            else:
                scalar, want = _SCALARS[kind.partition(" ")[0]]
                optional = kind.endswith("| None")
                good = isinstance(value, scalar) and (scalar is bool or not isinstance(value, bool))
                good, want = good or (optional and value is None), want + " or None" * optional
            if not good:
                yield f"{declared.name}={value!r} must be {want}"


_SCALARS = {"int": (int, "a whole number"), "bool": (bool, "True or False"), "str": (str, "a string")}


def require(violations: list[str], subject: str) -> None:
    """Raise one ValueError that lists every violation with its remedy; do nothing if there is none."""
    if not violations:
        return
    if len(violations) == 1:
        raise ValueError(f"{subject}: {violations[0]}")
    raise ValueError(f"{subject}: {len(violations)} problems\n" + "\n".join(f"  - {line}" for line in violations))
