"""Every stack that could work for a run, listed so that those that ask less of the GPU come later.

Combinations that cannot be the fastest are left out: tiles where nothing is computed again, a ring where Ulysses can share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..engine.model.sizes import ModelSizes
from ..stack import Stack
from .hardware import Hardware

TILES = (None, 16384, 8192, 4096, 2048)


def candidates(
    model: ModelSizes, hardware: Hardware, context: int, rows: int, pinned: dict[str, Any]
) -> Iterator[Stack]:
    world = hardware.count
    for ulysses in _choices(pinned, "ulysses", [n for n in range(1, hardware.ranks_per_node + 1) if world % n == 0]):
        if ulysses > model.heads:
            continue
        for ring in _choices(
            pinned, "ring", [n for n in range(1, world // ulysses + 1) if (world // ulysses) % n == 0]
        ):
            groups, rest = divmod(world, ulysses * ring)
            if rest or rows % groups:  # every group needs rows of its own
                continue
            if "ring" not in pinned and ring > 1 and ulysses < min(hardware.ranks_per_node, model.heads):
                continue  # a ring is for what Ulysses cannot share
            base = {
                "ulysses": ulysses,
                "ring": ring,
                **{k: v for k, v in pinned.items() if k not in ("ulysses", "ring")},
            }
            yield from _layers(model, hardware, context // (ulysses * ring), base)


def _layers(model: ModelSizes, hardware: Hardware, tokens: int, base: dict[str, Any]) -> Iterator[Stack]:
    per_rank = -(-model.heads // base["ulysses"])
    stages = [n for n in range(1, per_rank) if per_rank % n == 0]
    tiles = [tile for tile in TILES[:-1] if tile is None or tile < tokens] + [TILES[-1]]
    stores = ["gpu", "host"] + (["disk"] if hardware.disk else [])
    for recompute in _choices(base, "recompute", ["none", "keep_attention", "layer"]):
        for store in _choices(base, "store", stores):
            if recompute == "none" and store != "gpu":
                continue
            for tile in _choices(base, "tile", tiles):
                if (tile is None) != (recompute == "none") and "tile" not in base:
                    continue  # tiles are computed again, so keeping everything else brings nothing
                for heads in _choices(base, "heads_per_stage", [None, *reversed(stages)]):
                    if recompute == "none" and heads is not None and "heads_per_stage" not in base:
                        continue
                    holds = [None] if store == "gpu" else [True, False]
                    for hold in _choices(base, "hold", holds):
                        stack = Stack(**{
                            **base, "recompute": recompute, "store": store, "tile": tile, "heads_per_stage": heads,
                            "hold": hold,
                        })  # fmt: skip
                        if not stack.violations(hardware.count):
                            yield stack


def _choices(pinned: dict[str, Any], name: str, otherwise: list[Any]) -> list[Any]:
    return [pinned[name]] if name in pinned else otherwise
