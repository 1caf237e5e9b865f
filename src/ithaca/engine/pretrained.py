"""`save_pretrained` of a prepared model.

Its parameters are FSDP2's shards, which safetensors cannot write. So a prepared model gathers them first, onto rank 0 and into host
memory, and lets the method it had write them there: all ranks call it, one writes. Where every rank has the whole
parameters (one process, or shard_parameters=False) nothing is gathered and rank 0 may call it alone.
"""

from __future__ import annotations

from datetime import timedelta
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .mesh import whole_tensor
from .model.nf4 import Nf4, unpacked

WAIT = timedelta(seconds=60)  # for the other ranks to call it too; they come from the same step


def keep_saving(model: nn.Module) -> None:
    """Let `save_pretrained` work on shards."""
    for module in {id(m): m for m in (model, getattr(model, "get_base_model", lambda: model)())}.values():
        module._save_before_ithaca = module.save_pretrained  # pyright: ignore[reportArgumentType]
        module.save_pretrained = MethodType(_save, module)  # pyright: ignore[reportArgumentType]


def _save(model: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
    if args or options.get("state_dict") is not None:  # the caller knows better
        return model._save_before_ithaca(save_directory, *args, **options)
    whole = all(_is_whole(p) for p in model.parameters())
    first = dist.get_rank() == 0 if dist.is_initialized() else True
    if not whole:
        _meet()
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            if isinstance(value.to_local(), Nf4):
                if hasattr(model, "get_base_model"):
                    continue  # adapters are what it writes: the base need not be unpacked
                value = DTensor.from_local(
                    unpacked(value.to_local()), value.device_mesh, value.placements, run_check=False
                )
            value = value.to_local() if _is_whole(value) else whole_tensor(value)
        if first:
            state[name] = value.detach().cpu()
    options.setdefault("is_main_process", first)
    if not first:
        return None
    return model._save_before_ithaca(save_directory, state_dict=state, **options)


def _is_whole(value: Tensor) -> bool:
    """Whether every rank holds all of it."""
    if not isinstance(value, DTensor):
        return True
    return not any(place.is_shard() and value.device_mesh.size(i) > 1 for i, place in enumerate(value.placements))


def _meet() -> None:
    """All ranks are here, or an error: a gather that one rank begins alone never ends."""
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    counter = f"ithaca/save_pretrained/rank{dist.get_rank()}"  # how often this rank has met the others
    key = f"ithaca/save_pretrained/{store.add(counter, 0)}"
    if store.add(key, 1) == world:
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], WAIT)
    except dist.DistStoreError:
        here = store.add(key, -1) + 1  # this rank leaves again
        raise RuntimeError(
            f"save_pretrained gathers the shards of all {world} ranks, but {here} called it within {WAIT.seconds} s; call it on "
            "every rank (rank 0 writes), not inside `if rank == 0`"
        ) from None
    store.add(counter, 1)
