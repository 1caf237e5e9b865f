"""Counts live bytes while real code runs on fake tensors.

Every tensor that an operator returns is looked at; a storage that was not seen before is an allocation, and its end is noticed by
a weak reference. FSDP2 gives storages back and takes them again by resizing them, which is watched too. Sizes are rounded as
torch's CUDA allocator rounds them. What comes out is the peak of each phase, by category (categories.py).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from .categories import category

ROUND = 512  # bytes: the allocator's smallest step
LARGE = 1 << 20  # bytes of an allocation that is worth a line of its own


class LiveBytes(TorchDispatchMode):
    """Enter it inside a FakeTensorMode, so that it sees that mode's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "load"
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peaks: dict[str, Counter[str]] = {}
        self.lines: dict[str, Counter[str]] = {}  # the same by the line of ours, or of FSDP2, that allocated
        self._held: dict[int, tuple[weakref.ref, str, int]] = {}  # id of a storage -> itself, category, bytes
        self._line: dict[int, str] = {}

    @property
    def peak(self) -> int:
        return max((sum(each.values()) for each in self.peaks.values()), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                self.see(each)
        return out

    def see(self, tensor: Tensor, name: str | None = None) -> None:
        """Count a tensor's storage, if it is new; `name` gives it another category."""
        storage = _storage(tensor)
        if storage is None:
            return
        known = self._held.get(id(storage))
        if known is not None and known[0]() is storage:
            if name is not None and known[1] != name:
                self._change(storage, known[2], name)
            return
        self._line[id(storage)] = _line()
        self._change(storage, _rounded(storage.nbytes()), name or category(_frames()))

    def _change(self, storage: Any, nbytes: int, name: str) -> None:
        key = id(storage)
        reference = self._forget(key) or weakref.ref(storage, lambda _, key=key: self._forget(key))
        self._held[key] = (reference, name, nbytes)
        self.live[name] += nbytes
        self.total += nbytes
        best = self.peaks.get(self.phase)
        if best is None or self.total >= best.total():
            self._note()

    def _forget(self, key: int) -> weakref.ref | None:
        known = self._held.pop(key, None)
        if known is None:
            return None
        self.live[known[1]] -= known[2]
        self.total -= known[2]
        return known[0]

    @contextmanager
    def watching(self) -> Iterator[LiveBytes]:
        """The mode itself, and an eye on resized storages."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._held.get(id(storage))
            name = "fsdp" if known is None else known[1]
            self._change(storage, _rounded(storage.nbytes()), name)
            return result

        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._note()

    def _note(self) -> None:
        """This is the largest of the phase so far."""
        self.peaks[self.phase] = +self.live
        self._at_peak = {
            key: (self._line.get(key, ""), held[2]) for key, held in self._held.items() if held[2] >= LARGE
        }
        self.lines[self.phase] = Counter()
        for line, nbytes in self._at_peak.values():
            self.lines[self.phase][line] += nbytes


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def _storage(tensor: Tensor) -> Any:
    """The storage of a plain tensor; None for a wrapper such as DTensor, whose inside is seen by itself."""
    return None if is_traceable_wrapper_subclass(tensor) else tensor.untyped_storage()


def _line() -> str:
    for file, function in (found := list(_numbered())):
        if ("/ithaca/" in file and "/planner/" not in file) or "distributed/fsdp" in file:
            return f"{file.split('/ithaca/')[-1].split('/site-packages/')[-1]} {function}"
    return found[0][0] if found else ""


def _numbered() -> Iterator[tuple[str, str]]:
    frame = sys._getframe(3)
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back


def _frames() -> Iterator[tuple[str, str]]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back
