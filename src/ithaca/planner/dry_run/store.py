"""The store of a dry run: keeps shapes, holds and brings back what the real one would, and copies nothing.

Copies have no time here, so it takes the worst case of the real stores: a tensor on its way out is held until others push it out
(IN_FLIGHT), and the next handle's memory is allocated as soon as it is asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.holding import module_holds
from ...engine.limits import IN_FLIGHT
from ...engine.offload.packing import Layout, pack
from ...engine.offload.store import GpuStore, Store
from .tracker import LiveBytes

module_holds(__name__, "kept")


@dataclass
class _Entry:
    layouts: list[Layout]
    nbytes: int
    source: list[Tensor] | None
    arrival: list[Tensor] | None = None


class DryStore(Store):
    """Stands for the host and the disk store."""

    def __init__(self, device: torch.device, kind: str) -> None:
        super().__init__(device)
        self.kind = kind
        self.most = self._now = 0
        self._leaving: deque[_Entry] = deque()
        self._scratch_store: DryStore | None = None

    @property
    def scratch_store(self) -> DryStore:
        """Beside a disk, host memory."""
        if self.kind != "disk":
            return self
        if self._scratch_store is None:
            self._scratch_store = DryStore(self.device, "host")
            self._scratch_store._leaving = self._leaving
        return self._scratch_store

    @property
    def held(self) -> dict[str, int]:
        """The most that was held, by where."""
        held = {self.kind: self.most}
        return held if self._scratch_store is None else {**held, "host": self._scratch_store.most}

    @property
    def medium(self) -> str:
        return "nothing: a dry run"

    @property
    def held_bytes(self) -> int:
        return self.most

    @property
    def now(self) -> int:
        return self._now

    def hold(self, nbytes: int) -> None:
        """So many bytes come from, or with a minus go to, layers that are not run."""
        self._now += nbytes
        self.most = max(self.most, self._now)

    def _keep(self, tensors: list[Tensor]) -> _Entry:
        while len(self._leaving) >= 2 and sum(entry.nbytes for entry in self._leaving) > IN_FLIGHT:
            self._leaving.popleft().source = None
        packed = [pack(tensor) for tensor in tensors]
        nbytes = sum(layout.nbytes for layout, _ in packed)
        entry = _Entry([layout for layout, _ in packed], nbytes, [flat for _, flat in packed])
        self._leaving.append(entry)
        self._now += nbytes
        self.most = max(self.most, self._now)
        return entry

    def _bring(self, entry: _Entry, following: _Entry | None, *, spend: bool) -> list[Tensor]:
        self._wait_copied(entry)
        if entry.arrival is None:
            entry.arrival = self._fetch(entry)
        if following is not None and following.arrival is None:
            following.arrival = self._fetch(following)
        tensors, entry.arrival = entry.arrival, None
        if spend:
            self._discard(entry)
        return tensors

    def _fetch(self, entry: _Entry) -> list[Tensor]:
        return [layout.empty(self.device) for layout in entry.layouts]

    def _wait_copied(self, entry: _Entry) -> None:
        while any(other is entry for other in self._leaving):
            self._leaving.popleft().source = None

    def _discard(self, entry: _Entry) -> bool:
        self._wait_copied(entry)
        self._now -= entry.nbytes
        entry.nbytes = 0
        return True

    def _close(self) -> None:
        self._leaving.clear()


class DryGpuStore(GpuStore):
    """References, as the real one; what it holds is called kept."""

    def __init__(self, device: torch.device, tracker: LiveBytes) -> None:
        super().__init__(device)
        self.tracker = tracker

    def _keep(self, tensors: list[Tensor]):
        for tensor in tensors:
            self.tracker.see(tensor, "kept")
        return super()._keep(tensors)
