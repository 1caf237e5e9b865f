"""Host memory for what a disk store put last.

Backward asks for the newest puts first, when the disk may not even have them yet. So a put is copied to host memory, written to
the file from there, and stays until newer puts need the room: the oldest goes first, and only what the file has and nobody
is reading. What is there comes back without the disk.

All memory is in buffers of one chunk, pinned once and reused: puts of any size can follow each other without pinning anew. A
small put goes behind the one before it where that left room: the attention output of a piece and stage may be 4 MB, and there are
hundreds.
Puts pin up to HOST_CACHE bytes, less where the host has little memory. What backward reads ahead takes the memory of older puts
that the file has, since those are asked for later, and may pin more, as much as it asks for and half of the memory can bear; puts
then use that too. Where the file is slow, puts that it does not have yet fill what they may, and reading ahead pins beside them:
that much more and no more, however many steps there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from ..limits import HOST_CACHE
from . import transfer
from .host import HostBuffer, available_memory
from .transfer import Copy, Transfer

SHARE = 8  # puts pin no more than this part of the memory available: the ranks of a host share it


class HostCache:
    """Buffers, and the copies that hold them. Used under the lock of the store."""

    def __init__(self, device: torch.device):
        self._device = device
        self._all: list[HostBuffer] = []
        self._idle: list[HostBuffer] = []
        self._copies: dict[int, Copy] = {}  # by the order of their puts
        self._sharing: Counter[HostBuffer] = Counter()  # how many copies each buffer holds
        self._last: tuple[HostBuffer, int] | None = None  # the buffer that the last copy ends in, and where
        self._refused = False

    @property
    def held_bytes(self) -> int:
        return len(self._all) * transfer.CHUNK

    @property
    def idle_bytes(self) -> int:
        return len(self._idle) * transfer.CHUNK

    def keep(self, order: int, start: int, length: int, write: Transfer) -> Copy | None:
        """Memory for a put. None where even the oldest copies make no room for it now: nobody waits for room here."""
        if self._behind(length) is None:
            used = len(self._all) - len(self._idle)
            short = _buffers([length]) + used - self._most()
            evicted, room = self._spare(short, self._copies)
            if room < short:
                return None
            for copy in evicted:
                self.give(copy)
        return self._copy(order, start, length, write, saving=True)

    def affords(self, lengths: list[int], before: int) -> bool:
        """Whether `fetch` may bring so much of what was put from `before` on, and room for it: what has to be pinned is at most
        half of the memory available. Two such layers are near at once, the one at hand and the one below, beside puts."""
        need = _buffers(lengths)
        older, room = self._spare(need - len(self._idle), [order for order in self._copies if order < before])
        new = max(0, need - len(self._idle) - room)
        most = HOST_CACHE // transfer.CHUNK + 2 * need
        if new and (self._refused or len(self._all) + new > most or 2 * new * transfer.CHUNK > available_memory()):
            return False
        for copy in older:
            self.give(copy)
        return True

    def fetch(self, order: int, start: int, length: int, write: Transfer) -> Copy | None:
        """Memory for a put that is read back from the file."""
        return self._copy(order, start, length, write, saving=False)

    def give(self, copy: Copy) -> None:
        """Take the memory of a copy back."""
        if copy.buffers:
            for buffer in copy.buffers:
                self._sharing[buffer] -= 1
                if not self._sharing[buffer]:
                    self._idle.append(buffer)
                    if self._last is not None and self._last[0] is buffer:
                        self._last = None
            copy.buffers = []
            del self._copies[copy.order]

    def close(self) -> None:
        for buffer in self._all:
            buffer.close()
        self._all.clear()
        self._idle.clear()
        self._copies.clear()
        self._sharing.clear()
        self._last = None

    def _most(self) -> int:
        """Buffers that puts may use. What is pinned already costs nothing more."""
        if self._refused:
            return len(self._all)
        share = (available_memory() + self.held_bytes) // SHARE
        return max(len(self._all), min(HOST_CACHE, share) // transfer.CHUNK)

    def _spare(self, wanted: int, orders: Iterable[int]) -> tuple[list[Copy], int]:
        """The oldest of these copies that nobody needs here, and how many buffers they leave: as many as wanted, if there are."""
        spare, freed, room = [], Counter[HostBuffer](), 0
        for order in sorted(orders) if wanted > 0 else ():
            copy = self._copies[order]
            if copy.spare:
                spare.append(copy)
                freed.update(copy.buffers)
                room += sum(freed[buffer] == self._sharing[buffer] for buffer in copy.buffers)
                if room >= wanted:
                    break
        return spare, room

    def _behind(self, length: int) -> tuple[HostBuffer, int] | None:
        """Where the last copy left room for so much."""
        return self._last if self._last is not None and self._last[1] + length <= transfer.CHUNK else None

    def _copy(self, order: int, start: int, length: int, write: Transfer, *, saving: bool) -> Copy | None:
        behind = self._behind(length)
        if behind is not None:
            taken, skipped = [behind[0]], behind[1]
        else:
            need, skipped = _buffers([length]), 0
            try:
                while len(self._idle) < need:
                    buffer = HostBuffer(transfer.CHUNK, self._device)
                    self._all.append(buffer)
                    self._idle.append(buffer)
            except (
                MemoryError,
                OSError,
            ):  # no more can be pinned: work with what there is, and do not try at every put
                self._refused = True
                return None
            taken = self._idle[len(self._idle) - need :]
            del self._idle[len(self._idle) - need :]
        self._sharing.update(taken)
        self._last = taken[-1], skipped + length - (len(taken) - 1) * transfer.CHUNK
        copy = self._copies[order] = Copy(taken, skipped, order, start, length, write, saving=saving)
        return copy


def _buffers(lengths: list[int]) -> int:
    """For copies one after the other."""
    count, end = 0, transfer.CHUNK
    for length in lengths:
        if end + length > transfer.CHUNK:
            needed = -(-length // transfer.CHUNK)
            count, end = count + needed, -(needed - 1) * transfer.CHUNK
        end += length
    return count
