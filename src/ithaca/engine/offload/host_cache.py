"""Host memory for what a disk store put last.

Backward asks for the newest puts first, when the disk may not even have them yet. So a put is copied to host memory, written to
the file from there, and stays until newer puts need the room: the oldest goes first, and only what the file has and nobody
is reading. What is there comes back without the disk.

All memory is in buffers of one chunk, pinned once and reused: puts of any size can follow each other without pinning anew.
Puts pin up to HOST_CACHE bytes, less where the host has little memory. What backward reads ahead takes the memory of older puts
that the file has, since those are asked for later, and may pin more, as much as it asks for and half of the memory can bear; puts
then use that too. Where the file is slow, puts that it does not have yet fill what they may, and reading ahead pins beside them:
that much more and no more, however many steps there are.
"""

from __future__ import annotations

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
        self._refused = False

    @property
    def held_bytes(self) -> int:
        return len(self._all) * transfer.CHUNK

    @property
    def idle_bytes(self) -> int:
        return len(self._idle) * transfer.CHUNK

    def keep(self, order: int, start: int, length: int, write: Transfer) -> Copy | None:
        """Memory for a put. None where even the oldest copies make no room for it now: nobody waits for room here."""
        need = _buffers(length)
        used = len(self._all) - len(self._idle)
        short = need + used - self._most()
        evicted: list[Copy] = []
        if short > 0:
            for copy in sorted(self._copies.values(), key=lambda copy: copy.order):
                if copy.spare:
                    evicted.append(copy)
                    short -= len(copy.buffers)
                    if short <= 0:
                        break
            else:
                return None
        for copy in evicted:
            self.give(copy)
        return self._copy(need, order, start, length, write, saving=True)

    def affords(self, lengths: list[int], before: int) -> bool:
        """Whether `fetch` may bring so much of what was put from `before` on, and room for it: what has to be pinned is at most
        half of the memory available. Two such layers are near at once, the one at hand and the one below, beside puts."""
        need = sum(_buffers(length) for length in lengths)
        room, older = len(self._idle), []
        for copy in sorted(self._copies.values(), key=lambda copy: copy.order):
            if room >= need or copy.order >= before:
                break
            if copy.spare:
                older.append(copy)
                room += len(copy.buffers)
        new = max(0, need - room)
        most = HOST_CACHE // transfer.CHUNK + 2 * need
        if new and (self._refused or len(self._all) + new > most or 2 * new * transfer.CHUNK > available_memory()):
            return False
        for copy in older:
            self.give(copy)
        return True

    def fetch(self, order: int, start: int, length: int, write: Transfer) -> Copy | None:
        """Memory for a put that is read back from the file."""
        return self._copy(_buffers(length), order, start, length, write, saving=False)

    def give(self, copy: Copy) -> None:
        """Take the memory of a copy back."""
        if copy.buffers:
            self._idle += copy.buffers
            copy.buffers = []
            del self._copies[copy.order]

    def close(self) -> None:
        for buffer in self._all:
            buffer.close()
        self._all.clear()
        self._idle.clear()
        self._copies.clear()

    def _most(self) -> int:
        """Buffers that puts may use. What is pinned already costs nothing more."""
        if self._refused:
            return len(self._all)
        share = (available_memory() + self.held_bytes) // SHARE
        return max(len(self._all), min(HOST_CACHE, share) // transfer.CHUNK)

    def _copy(self, need: int, order: int, start: int, length: int, write: Transfer, *, saving: bool) -> Copy | None:
        try:
            while len(self._idle) < need:
                buffer = HostBuffer(transfer.CHUNK, self._device)
                self._all.append(buffer)
                self._idle.append(buffer)
        except (MemoryError, OSError):  # no more can be pinned: work with what there is, and do not try at every put
            self._refused = True
            return None
        taken = self._idle[len(self._idle) - need :]
        del self._idle[len(self._idle) - need :]
        copy = self._copies[order] = Copy(taken, order, start, length, write, saving=saving)
        return copy


def _buffers(length: int) -> int:
    return -(-length // transfer.CHUNK)
