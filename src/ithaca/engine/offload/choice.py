"""Which store: `open_store`."""

from __future__ import annotations

from pathlib import Path

import torch

from .disk import DiskStore
from .host import HostStore
from .store import GpuStore, Store, StoreKind


def open_store(kind: StoreKind, *, device: torch.device, scratch: Path | None = None) -> Store:
    """Open the store `kind` for tensors of `device`. `scratch` is the folder of the disk store (default: the
    system's temporary folder); the other kinds do not use it."""
    if kind == "gpu":
        return GpuStore(device)
    if kind == "host":
        return HostStore(device)
    if kind == "disk":
        return DiskStore(device, scratch)
    raise ValueError(f"store={kind!r} is unknown: choose 'gpu', 'host' or 'disk'")
